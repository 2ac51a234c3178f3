"""The fla contract: what we rely on is what the tested version has."""

from __future__ import annotations

import importlib.util
import inspect

import pytest

from kernel_fun._common import compat, support
from kernel_fun.kda import chunk_kda, fused_recurrent_kda

needs_fla = pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla-core is not installed")


@needs_fla
@pytest.mark.parametrize("ours", [chunk_kda, fused_recurrent_kda], ids=lambda f: f.__name__)
def test_signature_is_fla_s(ours):
    theirs = compat.function_of(next(op for op in compat.FLA_OPS if op.name == ours.__name__))
    a, b = (inspect.signature(f).parameters for f in (ours, theirs))
    assert [(p.name, p.kind, p.default) for p in a.values()] == [
        (p.name, p.kind, p.default) for p in b.values()
    ]


@needs_fla
def test_contract_holds_for_the_installed_fla():
    assert support.version_of("fla-core") in compat.FLA_TESTED
    assert compat.check_fla() is None


def test_contract_names_our_own_parameters():
    for op, function in zip(compat.FLA_OPS, (chunk_kda, fused_recurrent_kda)):
        assert compat._named(function) == op.parameters


@needs_fla
def test_a_changed_fla_is_named(monkeypatch):
    def chunk_kda(q, k, v, beta, g, **kwargs): ...

    monkeypatch.setattr(compat, "function_of", lambda op: chunk_kda)
    assert "has 'beta' where 'g' was tested" in compat.check_fla()
    monkeypatch.setattr(compat, "function_of", lambda op: None)
    assert "has no fla.ops.kda.chunk_kda" in compat.check_fla()


def test_an_older_fla_loses_no_argument():
    def old(q, k, **kwargs): ...

    assert compat.accepted_by(old, {"q": 1, "use_graph": False, "A_log": 2}) == {"q": 1, "A_log": 2}
    with pytest.raises(TypeError, match="does not know `use_graph`, got True"):
        compat.accepted_by(old, {"q": 1, "use_graph": True})

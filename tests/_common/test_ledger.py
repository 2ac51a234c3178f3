"""The ledger names what changed, and an unverified stage serves only where it is forced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernel_fun._common import cache, ledger, support
from kernel_fun._common.device import named
from kernel_fun._common.ledger import Verified
from kernel_fun._common.plan import Impl, Policy, Stage, resolve
from kernel_fun.kda import _provenance, dispatch
from kernel_fun.kda._kernels import sm90
from kernel_fun.kda._kernels.sm90.launched import KERNELS

MODULE = "kernel_fun._common.cache"


def entry(**changed: str) -> Verified:
    return Verified({**cache.sources(MODULE), **changed}, "a GPU", "2026-01-01T00:00:00Z", {})


def test_drift():
    assert ledger.drift({"s": entry()}, {"s": (MODULE,)}) == {}
    assert ledger.drift({"s": entry(**{MODULE: "0" * 64})}, {"s": (MODULE,)}) == {"s": [MODULE]}
    assert ledger.drift({}, {"s": (MODULE,)}) == {"s": list(cache.sources(MODULE))}
    other = "kernel_fun._common.ledger"
    assert ledger.drift({"s": entry()}, {"s": (MODULE, other)}) == {"s": [other]}


def test_kernels_are_those_of_the_table():
    ours = {i.target: s.name for s in dispatch.STAGES for i in s.impls if i.backend == "sm90"}
    assert list(ours.values()) == list(KERNELS)
    assert set(_provenance.VERIFIED) <= set(KERNELS)


def test_every_kernel_of_hopper_is_of_a_stage():
    folder = Path(sm90.__file__).parent
    kernels = {f"{sm90.__name__}.{p.stem}" for p in folder.glob("*.py") if "@jit(" in p.read_text()}
    assert len(kernels) >= 7
    held = {name for modules in KERNELS.values() for name in ledger.sources(modules)}
    assert kernels <= held


@pytest.mark.parametrize("forced", [None, "sm90"])
def test_unverified_serves_only_where_forced(forced, monkeypatch):
    monkeypatch.setattr(support, "missing", lambda need: None)
    reason = ledger.unverified({}, "s")
    assert ledger.unverified({"s": entry()}, "s") is None
    table = (Stage("s", (Impl("sm90", "m:f", unverified=reason), Impl("eager", "m:f"))),)
    policy = Policy(None, forced, "auto", "BACKEND")
    plan = resolve(
        "toy",
        table,
        "problem",
        named("sm90"),
        policy,
        gpu_refusal=None,
        fla_refusal="none",
        eager_refusal=None,
    )
    assert plan.backend == ("sm90" if forced else "eager")
    assert plan.reason == (None if forced else f"s: sm90: {reason}")
    assert replace(table[0].impls[0], unverified=None).refusal("problem", named("sm90")) is None


def test_what_is_called_verified_is_what_passed():
    """A changed kernel is verified again, or its entry goes: then it serves nobody unasked."""
    changed = ledger.drift(_provenance.VERIFIED, {s: KERNELS[s] for s in _provenance.VERIFIED})
    assert not changed, f"run `kernel-fun verify` on a GPU, or remove the entries of {changed}"


@pytest.mark.parametrize("entries", [{}, {"s": entry(), "t": entry()}], ids=["none", "two"])
def test_the_text_of_a_ledger_is_its_entries(entries):
    namespace: dict[str, object] = {}
    exec(ledger.text("KDA", entries), namespace)
    assert namespace["VERIFIED"] == entries

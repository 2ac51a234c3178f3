"""Every backend's stage has the signature of the contract."""

from __future__ import annotations

import importlib
import inspect

import pytest

from kernel_fun.kda import dispatch, stages

PROTOCOLS = {
    "fwd_intra": stages.FwdIntra,
    "fwd_state": stages.FwdState,
    "bwd_state": stages.BwdState,
    "bwd_grads": stages.BwdGrads,
}
IMPLS = [(s.name, i.backend, i.target, i.needs) for s in dispatch.STAGES for i in s.impls]


@pytest.mark.parametrize(
    ("stage", "backend", "target", "needs"), IMPLS, ids=[f"{b}-{s}" for s, b, *_ in IMPLS]
)
def test_signature(stage, backend, target, needs):
    if needs == "cute":
        pytest.importorskip("cutlass")
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(f"kernel_fun.kda._kernels.{module}"), name)
    contract = list(inspect.signature(PROTOCOLS[stage].__call__).parameters.values())[1:]
    given = list(inspect.signature(function).parameters.values())
    assert [(p.name, p.kind, p.annotation) for p in given] == [
        (p.name, p.kind, p.annotation) for p in contract
    ]


def test_the_table_lists_the_four_stages_in_order():
    assert [s.name for s in dispatch.STAGES] == list(PROTOCOLS)

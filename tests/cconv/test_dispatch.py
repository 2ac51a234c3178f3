"""Who serves what, and why not another."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch

from kernel_fun import cconv
from kernel_fun._common import device as devices
from kernel_fun._common import support
from kernel_fun._common.plan import BackendUnavailable, announce
from kernel_fun.cconv import dispatch, fallback
from kernel_fun.cconv.call import Problem
from kernel_fun.kda import build_cp_context

SM90, CPU = devices.named("sm90"), devices.named("cpu")
GOOD = Problem(2, 64, 128, 4, activation="silu", needs_grad=True)


def problem(**changes: Any) -> Problem:
    return Problem(**{**{f: getattr(GOOD, f) for f in GOOD.__dataclass_fields__}, **changes})


@pytest.fixture(autouse=True)
def _all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "module_found", lambda name: True)


@pytest.mark.parametrize("W", range(2, 9))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("weight", ["bfloat16", "float16", "float32", "float64"])
def test_what_triton_takes(W: int, dtype: str, weight: str) -> None:
    plan = dispatch.plan(problem(W=W, dtypes=(dtype, weight), N=3), SM90)
    assert plan.backend == "triton"
    assert plan.reason is None


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"W": 1}, "W = 1, kernels are built for 2 to 8"),
        ({"W": 9}, "W = 9, kernels are built for 2 to 8"),
        ({"T": 1 << 30}, "kernels count tokens of a row below 1073741824"),
        ({"asked": "cuda"}, "`backend='cuda'` asks for an implementation of fla's"),
    ],
)
def test_what_triton_refuses_goes_to_fla_whole(changes: dict[str, Any], reason: str) -> None:
    plan = dispatch.plan(problem(**changes), SM90)
    assert plan.backend == "fla"
    assert plan.fallback
    assert plan.reason is not None
    assert reason in plan.reason


def test_float64_runs_on_eager() -> None:
    plan = dispatch.plan(problem(dtypes=("float64", "float64")), SM90)
    assert plan.backend == "eager"
    assert plan.reason is not None
    assert "x is float64" in plan.reason


def test_without_fla_eager_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "module_found", lambda name: name != "fla")
    assert dispatch.plan(problem(W=9), SM90).backend == "eager"


@pytest.mark.parametrize("states", [{}, {"has_h0": True}, {"wants_ht": True}, {"reduces": True}])
def test_context_parallel(states: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(context_parallel=True, N=3, **states)
    assert dispatch.plan(asked, SM90).backend == "triton"
    monkeypatch.setenv("KERNEL_FUN_CCONV_BACKEND", "fla")
    if not states:
        assert dispatch.plan(asked, SM90).backend == "fla"
        return
    with pytest.raises(BackendUnavailable, match=r"fla takes and returns no states|fla reduces no gradients"):
        dispatch.plan(asked, SM90)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "module_found", lambda name: name not in ("triton", "fla"))
    plan = dispatch.plan(GOOD, SM90)
    assert plan.backend == "eager"
    assert plan.reason is not None
    assert "triton not installed" in plan.reason


def test_cpu_runs_on_eager_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    plan = dispatch.plan(GOOD, CPU)
    assert plan.backend == "eager"
    assert not plan.fallback
    support.forget_logged()
    with caplog.at_level(logging.INFO, logger="kernel_fun"):
        announce(plan, "causal_conv1d")
        announce(plan, "causal_conv1d")
    assert [r.levelname for r in caplog.records] == ["INFO"]


def test_a_fallback_warns_once_for_a_kind_of_problem(caplog: pytest.LogCaptureFixture) -> None:
    support.forget_logged()
    with caplog.at_level(logging.INFO, logger="kernel_fun"):
        for T in (64, 65):
            announce(dispatch.plan(problem(W=9, T=T), SM90), "causal_conv1d")
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "WARNING"
    assert "delegated to fla" in caplog.records[0].getMessage()
    assert "W = 9" in caplog.records[0].getMessage()


@pytest.mark.parametrize("switch", ["KERNEL_FUN_DISABLE", "KERNEL_FUN_CCONV_DISABLE"])
def test_disabling(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switch, "1")
    plan = dispatch.plan(GOOD, SM90)
    assert plan.backend == "fla"
    assert plan.reason is not None
    assert f"{switch}=1" in plan.reason


def test_forcing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNEL_FUN_CCONV_BACKEND", "triton")
    assert dispatch.plan(GOOD, SM90).backend == "triton"
    with pytest.raises(BackendUnavailable, match="KERNEL_FUN_CCONV_BACKEND=triton cannot serve"):
        dispatch.plan(problem(W=9), SM90)
    monkeypatch.setenv("KERNEL_FUN_CCONV_BACKEND", "eager")
    assert dispatch.plan(GOOD, SM90).backend == "eager"
    monkeypatch.setenv("KERNEL_FUN_CCONV_BACKEND", "fla")
    assert dispatch.plan(GOOD, SM90).backend == "fla"


def test_fallback_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNEL_FUN_FALLBACK", "error")
    assert dispatch.plan(GOOD, SM90).backend == "triton"
    with pytest.raises(BackendUnavailable, match="W = 9"):
        dispatch.plan(problem(W=9), SM90)


def test_update_has_its_own_plan() -> None:
    step = Problem(8, 1, 128, 4, has_h0=True, wants_ht=True)
    assert dispatch.plan_update(step, SM90).backend == "triton"
    assert dispatch.plan_update(step, CPU).backend == "eager"


def test_is_supported_is_the_plan() -> None:
    x, weight = torch.zeros(1, 5, 8), torch.zeros(8, 4)
    supported, reason = cconv.is_supported(x, weight, activation="silu")
    assert not supported
    assert reason is not None
    assert "cpu" in reason
    with pytest.raises(ValueError, match="`activation`"):
        cconv.is_supported(x, weight, activation="gelu")


def test_delegation_is_verbatim(monkeypatch: pytest.MonkeyPatch, group_of_one: Any) -> None:
    seen: dict[str, Any] = {}

    def peer(**arguments: Any) -> tuple[str, None]:
        seen.update(arguments)
        return "y", None

    monkeypatch.setattr(fallback.compat, "function_of", lambda op: peer)
    monkeypatch.setattr(devices, "of", lambda device: SM90)
    monkeypatch.setenv("KERNEL_FUN_CCONV_BACKEND", "fla")
    x, weight = torch.zeros(1, 5, 8), torch.zeros(8, 4)
    context = build_cp_context(torch.tensor([0, 5]), group_of_one)
    assert cconv.causal_conv1d(x, weight, cp_context=context, activation="swish") == ("y", None)
    assert seen.pop("x") is x
    assert seen.pop("weight") is weight
    assert seen.pop("cp_context") is context
    given = {n: v for n, v in seen.items() if v is not None}
    assert given == {"output_final_state": False, "activation": "swish", "backend": "triton"}


def test_the_contract_with_the_installed_fla() -> None:
    pytest.importorskip("fla.modules.convolution")
    import inspect

    for op in (dispatch.CAUSAL_CONV1D, dispatch.CAUSAL_CONV1D_UPDATE):
        function = fallback._function(op)
        named = [n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]
        assert tuple(named) == op.parameters


def test_importing_the_family_loads_torch_and_no_more() -> None:
    code = "import kernel_fun.cconv, sys; print({'triton', 'cutlass', 'fla'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

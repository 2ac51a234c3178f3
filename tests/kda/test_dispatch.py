"""Who serves a chunk_kda call: golden plans, switches, delegation, what is said and when."""

from __future__ import annotations

import logging
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernel_fun._common import config, support
from kernel_fun._common import device as devices
from kernel_fun._common.device import ARCHS, named
from kernel_fun._common.plan import BackendUnavailable, Impl, Stage
from kernel_fun.kda import build_cp_context, chunk_kda, dispatch, fused_recurrent_kda, is_supported, warmup
from kernel_fun.kda.call import Problem

GOLDEN = Path(__file__).parent / "golden_plans.txt"

BASE = Problem(
    B=16,
    T=8192,
    H=16,
    HV=16,
    K=128,
    V=256,
    gate="softplus",
    beta_mode="sigmoid",
    l2norm=True,
    needs_grad=True,
)
PROBLEMS = {
    "prod8192": BASE,
    "kimi_8k": replace(BASE, B=1, H=32, HV=32, V=128, gate="bounded"),
    "inference": replace(BASE, needs_grad=False, has_h0=True, wants_ht=True, state_v_first=True),
    "packed": replace(BASE, B=1, T=65536, H=32, HV=32, V=128, N=20, gate="bounded"),
    "grouped": replace(BASE, B=2, T=2048, H=8, HV=32, K=64, V=64),
    "fp32": replace(BASE, dtypes=("float32",) * 5),
    "fp64": replace(BASE, dtypes=("float64",) * 5),
    "mixed": replace(BASE, dtypes=("bfloat16", "float32", "bfloat16", "float32", "float32")),
    "odd_dims": replace(BASE, K=100, V=60),
    "short": replace(BASE, B=1, T=15, H=1, HV=1),
    "context_parallel": replace(BASE, B=1, N=3, context_parallel=True),
    "context_parallel with states": replace(
        BASE, B=1, N=3, has_h0=True, wants_ht=True, context_parallel=True
    ),
    "context_parallel captured": replace(BASE, B=1, N=3, context_parallel=True, use_graph=True),
}


def plans() -> str:
    """Every golden plan as text."""
    out = []
    for name, problem in PROBLEMS.items():
        for arch in ARCHS:
            try:
                text = str(dispatch.plan(problem, named(arch)))
            except (NotImplementedError, BackendUnavailable) as refusal:
                text = f"{type(refusal).__name__}: {refusal}"
            out.append(f"## {name} on {arch}\n{text}\n")
    return "\n".join(out)


@pytest.fixture
def packages(monkeypatch):
    """Every optional package counts as installed."""
    monkeypatch.setattr(support, "missing", lambda need: None)


@pytest.fixture(autouse=True)
def _fresh_log():
    support.forget_logged()


def test_golden_plans(packages):
    """A change of routing shows up here; rewrite the file with ``python -m tests.kda.test_dispatch``."""
    assert plans() == GOLDEN.read_text()


def inputs(T: int = 4, dtype: torch.dtype = torch.float32, **extra):
    make = torch.Generator().manual_seed(3)
    shapes = dict(q=(1, T, 1, 8), k=(1, T, 1, 8), v=(1, T, 2, 8), g=(1, T, 2, 8), beta=(1, T, 2))
    x = {n: torch.rand(s, generator=make).to(dtype) for n, s in shapes.items()}
    return {**x, "g": -x["g"], **extra}


class Standin:
    """fla as a stand-in: records what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict]] = []

    def chunk_kda(self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                  use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
                  allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
                  return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
                  cp_context=None, use_graph=False, max_num_seqs=None, shiny=None, **kwargs):  # fmt: skip
        given = {n: a for n, a in locals().items() if n not in ("self", "kwargs")} | kwargs
        self.calls.append(("chunk_kda", given))
        return "o", "ht"

    def fused_recurrent_kda(self, q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
                            output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                            use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None,
                            state_v_first=False, cu_seqlens=None, **kwargs):  # fmt: skip
        given = {n: a for n, a in locals().items() if n not in ("self", "kwargs")} | kwargs
        self.calls.append(("fused_recurrent_kda", given))
        return "o", "ht"


@pytest.fixture
def fla(monkeypatch, packages):
    """A CPU tensor counts as one on an H200, and fla is the stand-in."""
    standin = Standin()
    module = types.ModuleType("fla.ops.kda")
    module.chunk_kda, module.fused_recurrent_kda = standin.chunk_kda, standin.fused_recurrent_kda
    parents = {n: types.ModuleType(n) for n in ("fla", "fla.ops")}
    parents["fla.ops"].kda = module
    parents["fla"].ops = parents["fla.ops"]
    for name, value in {**parents, "fla.ops.kda": module}.items():
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setattr(devices, "of", lambda device: named("sm90"))
    monkeypatch.setattr(
        dispatch, "STAGES", tuple(Stage(s.name, s.impls[-1:], s.needed) for s in dispatch.STAGES)
    )
    monkeypatch.setattr(dispatch, "plan", lambda p, d, plan=dispatch.plan: plan(p, d, dispatch.STAGES))
    return standin


def test_delegation_is_verbatim(fla, caplog):
    given = inputs(
        scale=0.5,
        use_gate_in_kernel=True,
        A_log=torch.zeros(2),
        dt_bias=torch.zeros(16),
        safe_gate=True,
        lower_bound=-5.0,
        chunk_size=32,
    )
    with caplog.at_level(logging.WARNING, "kernel_fun"):
        assert chunk_kda(**given) == ("o", "ht")
        assert chunk_kda(**given) == ("o", "ht")
    (name, got), _ = fla.calls
    assert name == "chunk_kda"
    for key, value in given.items():
        assert got[key] is value, key
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "chunk_kda delegated to fla: no GPU backend implements fwd_intra" in warnings[0].getMessage()


def test_recurrent_delegation_is_verbatim(fla):
    given = inputs(initial_state=torch.zeros(1, 2, 8, 8), output_final_state=True)
    given["beta"] = given["beta"][..., None].expand(1, 4, 2, 8)
    assert fused_recurrent_kda(**given) == ("o", "ht")
    ((name, got),) = fla.calls
    assert name == "fused_recurrent_kda"
    for key, value in given.items():
        assert got[key] is value, key


def test_a_keyword_fla_knows_is_delegated_and_one_nobody_knows_is_refused(fla):
    chunk_kda(**inputs(shiny=3))
    assert fla.calls[0][1]["shiny"] == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_l2norm'"):
        chunk_kda(**inputs(use_l2norm=True))


def test_cp_context_is_delegated_verbatim_unless_only_we_can(fla, group_of_one, monkeypatch):
    cp_context = build_cp_context(torch.tensor([0, 4]), group_of_one)
    assert chunk_kda(**inputs(cp_context=cp_context)) == ("o", "ht")
    assert fla.calls[0][1]["cp_context"] is cp_context
    for more in (
        {"output_final_state": True},
        {"initial_state": torch.zeros(1, 2, 8, 8)},
        {"cp_context": replace(cp_context, reduce_gradients=True)},
    ):
        o, _ = chunk_kda(**inputs(**{"cp_context": cp_context, **more}))
        assert torch.is_tensor(o)
    assert len(fla.calls) == 1
    monkeypatch.setenv(config.KDA_BACKEND.name, "fla")
    with pytest.raises(BackendUnavailable, match="fla takes and returns no states with `cp_context`"):
        chunk_kda(**inputs(cp_context=cp_context, output_final_state=True))


def test_unknown_keyword_names_itself():
    with pytest.raises(TypeError, match=r"chunk_kda\(\) got an unexpected keyword argument 'use_l2norm'"):
        chunk_kda(**inputs(use_l2norm=True))
    with pytest.raises(
        TypeError, match=r"fused_recurrent_kda\(\) got an unexpected keyword argument 'chunk_size'"
    ):
        fused_recurrent_kda(**inputs(chunk_size=64))


def test_engaged_line_once_per_kind_of_problem(caplog):
    with caplog.at_level(logging.INFO, "kernel_fun"):
        for T in (3, 4, 5):
            chunk_kda(**inputs(T))
        chunk_kda(**inputs(output_final_state=True))
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2
    assert all(line.startswith("kernel-fun kda: engaged (chunk_kda on eager, CPU: ") for line in lines)


def test_debug_logs_the_whole_plan(caplog, monkeypatch):
    monkeypatch.setenv(config.DEBUG.name, "1")
    with caplog.at_level(logging.INFO, "kernel_fun"):
        chunk_kda(**inputs())
    assert any("eager.fwd_intra:fwd_intra" in r.getMessage() for r in caplog.records)


def test_without_fla_cuda_runs_on_eager_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(devices, "of", lambda device: named("sm80"))
    monkeypatch.setattr(support, "missing", lambda need: f"{need} not installed")
    with caplog.at_level(logging.WARNING, "kernel_fun"):
        o, _ = chunk_kda(**inputs())
    assert torch.is_tensor(o)
    assert "chunk_kda running on eager (slow on a GPU)" in caplog.records[0].getMessage()


def test_switches_reach_the_call(monkeypatch):
    monkeypatch.setattr(devices, "of", lambda device: named("sm80"))
    monkeypatch.setenv(config.FALLBACK.name, "error")
    with pytest.raises(BackendUnavailable, match="KERNEL_FUN_FALLBACK=error"):
        chunk_kda(**inputs())
    monkeypatch.setenv(config.KDA_BACKEND.name, "eager")
    chunk_kda(**inputs())
    monkeypatch.setenv(config.KDA_BACKEND.name, "sm90")
    with pytest.raises(BackendUnavailable, match="KERNEL_FUN_KDA_BACKEND=sm90 cannot serve"):
        chunk_kda(**inputs())


GPU_TABLE = (
    Stage(
        "fwd_intra", (Impl("sm90", "sm90.fwd_intra:fwd_intra"), Impl("eager", "eager.fwd_intra:fwd_intra"))
    ),
)


@pytest.mark.parametrize("switch", [config.DISABLE, config.KDA_DISABLE])
def test_disable_switches(switch, monkeypatch, packages):
    assert dispatch.plan(BASE, named("sm90"), GPU_TABLE).backend == "sm90"
    monkeypatch.setenv(switch.name, "1")
    plan = dispatch.plan(BASE, named("sm90"), GPU_TABLE)
    assert plan.backend == "fla"
    assert plan.reason == f"fwd_intra: sm90: {switch.name}=1"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (
            replace(BASE, context_parallel=True, use_graph=True),
            "`use_graph` with `cp_context`: the host waits in every exchange, a graph cannot hold that",
        ),
        (replace(BASE, unknown=("shiny",)), "keyword 'shiny' is not ours"),
    ],
)
def test_no_gpu_backend_takes_what_only_fla_knows(problem, reason, packages, monkeypatch):
    monkeypatch.setattr("kernel_fun._common.compat.keywords", lambda op: frozenset({"shiny"}))
    plan = dispatch.plan(problem, named("sm90"), GPU_TABLE)
    assert plan.backend == "fla"
    assert plan.reason == f"fwd_intra: sm90: {reason}"
    monkeypatch.setenv(config.KDA_BACKEND.name, "sm90")
    with pytest.raises(BackendUnavailable, match="cannot serve"):
        dispatch.plan(problem, named("sm90"), GPU_TABLE)


def test_min_ctas(monkeypatch, packages):
    small = replace(BASE, B=1, H=2, HV=2, V=128)
    assert small.columns == 4
    assert replace(small, N=3).columns == 12
    monkeypatch.setenv(config.KDA_MIN_CTAS.name, "5")
    plan = dispatch.plan(small, named("sm90"), GPU_TABLE)
    assert plan.reason == "fwd_intra: sm90: 4 state columns in flight, KERNEL_FUN_KDA_MIN_CTAS=5"
    monkeypatch.setenv(config.KDA_MIN_CTAS.name, "4")
    assert dispatch.plan(small, named("sm90"), GPU_TABLE).reason is None


def test_is_supported_is_the_plan():
    x = inputs()
    assert is_supported(x["q"], x["v"]) == (False, "tensor on cpu")
    with pytest.raises(ValueError, match="`chunk_size` must be either 32 or 64"):
        is_supported(x["q"], x["v"], chunk_size=16)


def test_warmup_runs_and_refuses(monkeypatch):
    monkeypatch.setattr("kernel_fun._common.compat.check_fla", lambda: None)
    small = dict(K=8, V=8, HV=1, dtype=torch.float32)
    assert warmup(device="cpu", **small) > 0
    assert warmup(device="cpu", use_gate_in_kernel=False, use_qk_l2norm=False, **small) > 0
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="nothing warmed, cuda was asked for"):
            warmup(**small)
    monkeypatch.setattr("kernel_fun._common.compat.check_fla", lambda: "fla-core 9 has no chunk_kda")
    with pytest.raises(RuntimeError, match="fla-core 9 has no chunk_kda"):
        warmup(device="cpu", **small)


if __name__ == "__main__":
    support.missing = lambda need: None  # type: ignore[assignment]
    GOLDEN.write_text(plans())

"""Who serves a call: the table, the predicates, and nothing else."""

from __future__ import annotations

from functools import lru_cache

from kernel_fun._common import compat, config, support
from kernel_fun._common.device import Device
from kernel_fun._common.plan import Impl, Plan, Policy, Stage, resolve
from kernel_fun.cconv.call import Problem

CAUSAL_CONV1D = compat.FlaOp(
    "fla.modules.convolution",
    "causal_conv1d",
    (
        "x", "weight", "bias", "residual", "initial_state", "output_final_state", "activation", "backend",
        "cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "cp_context",
    ),
    ("seq_idx",),
)  # fmt: skip
CAUSAL_CONV1D_UPDATE = compat.FlaOp(
    "fla.modules.convolution",
    "causal_conv1d_update",
    ("x", "cache", "residual", "weight", "bias", "activation"),
)

WIDTHS = range(2, 9)
DTYPES = ("bfloat16", "float16", "float32")
MAX_T = 1 << 30
"""Tokens of one row the kernels count in int32, with room for what they look ahead."""


def box(problem: Problem, device: Device) -> str | None:
    """What the Triton kernels take."""
    if problem.W not in WIDTHS:
        return f"W = {problem.W}, kernels are built for {WIDTHS[0]} to {WIDTHS[-1]}"
    if problem.dtypes[0] not in DTYPES:
        return f"x is {problem.dtypes[0]}, kernels take {', '.join(DTYPES)}"
    if problem.T >= MAX_T:
        return f"T = {problem.T}, kernels count tokens of a row below {MAX_T}"
    return None


STAGES = (
    Stage("fwd", (Impl("triton", "triton.fwd:fwd", "triton", box), Impl("eager", "eager.fwd:fwd"))),
    Stage(
        "bwd",
        (Impl("triton", "triton.bwd:bwd", "triton", box), Impl("eager", "eager.bwd:bwd")),
        lambda p: p.needs_grad,
    ),
)
UPDATE = (
    Stage(
        "update",
        (Impl("triton", "triton.update:update", "triton", box), Impl("eager", "eager.update:update")),
    ),
)


def plan(problem: Problem, device: Device) -> Plan:
    """The plan for a causal_conv1d problem on a device, under the switches of the environment."""
    return _plan(STAGES, CAUSAL_CONV1D, problem, device, *_surroundings())


def plan_update(problem: Problem, device: Device) -> Plan:
    """The plan for a causal_conv1d_update problem."""
    return _plan(UPDATE, CAUSAL_CONV1D_UPDATE, problem, device, *_surroundings())


def _surroundings() -> tuple[Policy, str | None, str | None]:
    """What a plan depends on besides problem and device: the switches, and what is not installed."""
    policy = Policy.read(config.CCONV_DISABLE, config.CCONV_BACKEND, ("triton", "eager", "fla"))
    return policy, support.missing("triton"), support.missing("fla")


@lru_cache(maxsize=4096)
def _plan(
    stages: tuple[Stage, ...],
    op: compat.FlaOp,
    problem: Problem,
    device: Device,
    policy: Policy,
    _no_triton: str | None,
    _no_fla: str | None,
) -> Plan:
    return resolve(
        "cconv",
        stages,
        problem,
        device,
        policy,
        gpu_refusal=_gpu_refusal(problem),
        fla_refusal=_fla_refusal(problem, device, op),
        eager_refusal=None,
    )


def _gpu_refusal(problem: Problem) -> str | None:
    if problem.asked != "triton":
        return f"`backend={problem.asked!r}` asks for an implementation of fla's"
    return None


def _fla_refusal(problem: Problem, device: Device, op: compat.FlaOp) -> str | None:
    """Why fla cannot take the call verbatim, or None."""
    if device.type != "cuda":
        return f"fla runs on CUDA, tensor on {device.type}"
    if (reason := support.missing("fla")) is not None:
        return reason
    if "float64" in problem.dtypes:
        return "fla computes no float64"
    if problem.context_parallel and (problem.has_h0 or problem.wants_ht):
        return "fla takes and returns no states with `cp_context`"
    if problem.reduces:
        return "fla reduces no gradients over a context-parallel group"
    if not problem.unknown:
        return None
    known = compat.keywords(op)
    if known is None:
        return f"the installed fla-core {support.version_of('fla-core')} has no {op.name}"
    strange = [name for name in problem.unknown if name not in known]
    return f"fla {op.name} takes no keyword {strange[0]!r}" if strange else None

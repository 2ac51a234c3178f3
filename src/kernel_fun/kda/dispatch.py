"""Who serves a call: the table, the predicates, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from kernel_fun._common import compat, config, ledger, support
from kernel_fun._common.device import Device
from kernel_fun._common.plan import Impl, Plan, Policy, Predicate, Stage, resolve
from kernel_fun.kda import _provenance
from kernel_fun.kda.call import Problem


def hopper(problem: Problem, device: Device) -> str | None:
    """What the sm90 kernels take."""
    io = problem.dtypes[:3]
    if len(set(io)) > 1 or io[0] not in ("bfloat16", "float16"):
        return f"q, k, v are {', '.join(io)}; kernels take bfloat16 or float16, the same for all three"
    if "float64" in problem.dtypes:
        return "g or beta is float64"
    if problem.K not in (64, 128):
        return f"K = {problem.K}, kernels are built for 64 and 128"
    if problem.V < 64 or problem.V % 64:
        return f"V = {problem.V}, kernels take multiples of 64"
    if problem.wants_h and problem.chunk_size != 64:
        return f"states every {problem.chunk_size} tokens are wanted, chunks have 64"
    if problem.B * problem.T >= MAX_TOKENS:
        return f"{problem.B * problem.T} tokens, kernels count below {MAX_TOKENS}"
    return None


MAX_TOKENS = 1 << 31
"""Token indices are 32-bit; element offsets are 64-bit."""


def _stage(name: str, takes: Predicate, needed: Callable[[Problem], bool] = lambda p: True) -> Stage:
    """A stage: Hopper's kernel, then eager."""
    unverified = ledger.unverified(_provenance.VERIFIED, name)
    return Stage(
        name,
        (
            Impl("sm90", f"sm90.stages:{name}", "cute", takes, unverified),
            Impl("eager", f"eager.{name}:{name}"),
        ),
        needed,
    )


STAGES = (
    _stage("fwd_intra", hopper),
    _stage("fwd_state", hopper),
    _stage("bwd_state", hopper, lambda p: p.needs_grad),
    _stage("bwd_grads", hopper, lambda p: p.needs_grad),
)
RECURRENT = (Stage("recurrent", (Impl("eager", "eager.recurrent:recurrent"),)),)


def plan(problem: Problem, device: Device, stages: tuple[Stage, ...] = STAGES) -> Plan:
    """The plan for a chunk_kda problem on a device, under the switches of the environment."""
    return resolve(
        "kda",
        stages,
        problem,
        device,
        Policy.read(config.KDA_DISABLE, config.KDA_BACKEND),
        gpu_refusal=_gpu_refusal(problem),
        fla_refusal=fla_refusal(problem, device, compat.CHUNK_KDA),
        eager_refusal=_captured_exchange(problem),
    )


def plan_recurrent(problem: Problem, device: Device) -> Plan:
    """The plan for a fused_recurrent_kda problem."""
    return resolve(
        "kda",
        RECURRENT,
        problem,
        device,
        Policy.read(config.KDA_DISABLE, config.KDA_BACKEND),
        gpu_refusal=None,
        fla_refusal=fla_refusal(problem, device, compat.FUSED_RECURRENT_KDA),
        eager_refusal=None,
    )


def _gpu_refusal(problem: Problem) -> str | None:
    """What no GPU backend of ours takes, whatever its kernels."""
    if (reason := _captured_exchange(problem)) is not None:
        return reason
    if problem.unknown:
        return f"keyword {problem.unknown[0]!r} is not ours"
    floor = config.integer(config.KDA_MIN_CTAS)
    if problem.columns >= floor:
        return None
    return f"{problem.columns} state columns in flight, {config.KDA_MIN_CTAS.name}={floor}"


def fla_refusal(problem: Problem, device: Device, op: compat.FlaOp) -> str | None:
    """Why fla cannot take the call verbatim, or None."""
    if device.type != "cuda":
        return f"fla runs on CUDA, tensor on {device.type}"
    if (reason := support.missing("fla")) is not None:
        return reason
    if "float64" in problem.dtypes:
        return "fla computes no float64"
    if len(set(problem.dtypes[:3])) > 1 and op is compat.CHUNK_KDA:
        return "fla needs one dtype for q, k and v"
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


def _captured_exchange(problem: Problem) -> str | None:
    if problem.context_parallel and problem.use_graph:
        return "`use_graph` with `cp_context`: the host waits in every exchange, a graph cannot hold that"
    return None

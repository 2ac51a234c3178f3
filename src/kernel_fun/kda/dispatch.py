"""Who serves a call: the table, the predicates, and nothing else."""

from __future__ import annotations

from kernel_fun._common import compat, config, support
from kernel_fun._common.device import Device
from kernel_fun._common.plan import Impl, Plan, Policy, Stage, resolve
from kernel_fun.kda.call import Problem

STAGES = (
    Stage("fwd_intra", (Impl("eager", "eager.fwd_intra:fwd_intra"),)),
    Stage("fwd_state", (Impl("eager", "eager.fwd_state:fwd_state"),)),
    Stage("bwd_state", (Impl("eager", "eager.bwd_state:bwd_state"),), lambda p: p.needs_grad),
    Stage("bwd_grads", (Impl("eager", "eager.bwd_grads:bwd_grads"),), lambda p: p.needs_grad),
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
        gpu_refusal=_too_few_columns(problem),
        fla_refusal=fla_refusal(problem, device, compat.CHUNK_KDA),
        eager_refusal=_eager_refusal(problem),
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


def _too_few_columns(problem: Problem) -> str | None:
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
    if not problem.unknown:
        return None
    known = compat.keywords(op)
    if known is None:
        return f"the installed fla-core {support.version_of('fla-core')} has no {op.name}"
    strange = [name for name in problem.unknown if name not in known]
    return f"fla {op.name} takes no keyword {strange[0]!r}" if strange else None


def _eager_refusal(problem: Problem) -> str | None:
    if problem.context_parallel:
        return "`cp_context` is served only by delegation to fla on CUDA, which this call cannot use"
    return None

"""chunk_kda calls that were bound and planned before; see :mod:`kernel_fun._common.known`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_fun._common import check, config, context_parallel
from kernel_fun._common.known import Known
from kernel_fun.kda.call import TENSORS
from kernel_fun.kda.stages import AGAIN

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from kernel_fun._common.context_parallel import Split
    from kernel_fun._common.plan import Plan
    from kernel_fun.kda.call import Call
    from kernel_fun.kda.stages import Again

KNOWN: Known[tuple[Call, Plan]] = Known(config.KDA_POLICY)

_PARAMETERS = frozenset({"A_log", "dt_bias"})


def signature(a: dict[str, Any], split: Split | None = None) -> Hashable | None:
    """The signature of a call's arguments, or None if it is to be bound anew: where ``cu_seqlens`` lies on
    the host, with keywords beyond A_log and dt_bias, and with a context that is read as None. ``split``: its
    context as it is read.
    """
    kwargs, cu, context = a["kwargs"], a["cu_seqlens"], a["cp_context"]
    place = None
    if context is not None:
        if split is None:
            return None
        cu, place = context.cu_seqlens, split.place
    elif cu is not None and getattr(cu, "is_cpu", True):
        return None
    if not kwargs.keys() <= _PARAMETERS:
        return None
    return KNOWN.signature(
        (
            a["q"], a["k"], a["v"], a["g"], a["beta"], kwargs.get("A_log"), kwargs.get("dt_bias"),
            a["initial_state"], cu, a["cu_seqlens_cpu"],
        ),
        (
            a["scale"], a["output_final_state"], a["use_qk_l2norm_in_kernel"], a["use_gate_in_kernel"],
            a["use_beta_sigmoid_in_kernel"], a["allow_neg_eigval"], a["safe_gate"], a["lower_bound"],
            a["disable_recompute"], a["return_intermediate_states"], a["state_v_first"], a["use_graph"],
            a["max_num_seqs"],
        ),
        place,
    )  # fmt: skip


def again(signature: Hashable | None, a: dict[str, Any]) -> tuple[Tensor, Tensor | None] | None:
    """(o, final_state) of a call without a graph, where its backend does in one step what it did for this
    signature before; None otherwise."""
    found = KNOWN.recall(signature)
    if found is None:
        return None
    call, plan = found
    forward: Again | None = call.notes.get(AGAIN)
    if forward is None or plan.problem.needs_grad:
        return None
    kwargs = a["kwargs"] if call.gate != "log" else {}
    A_log, dt_bias = kwargs.get("A_log"), kwargs.get("dt_bias")
    done = forward(a["q"], a["k"], a["v"], a["g"], a["beta"], A_log, dt_bias, a["initial_state"])
    return None if done is None else done[:2]


def recall(
    signature: Hashable | None, a: dict[str, Any], split: Split | None = None
) -> tuple[Call, Plan] | None:
    """The bound call and the plan of a signature seen before, with the tensors of this call.

    Raises ContractError where boundaries on the host, which are values and no part of a signature, are none.
    """
    found = KNOWN.recall(signature)
    if found is None:
        return None
    call, plan = found
    context, cu, cu_cpu = a["cp_context"], a["cu_seqlens"], a["cu_seqlens_cpu"]
    if context is not None:
        cu, cu_cpu = context_parallel.local_boundaries(context, a["q"].device, split)
    elif cu_cpu is not None:
        check.boundaries("cu_seqlens", cu_cpu.tolist(), a["q"].shape[1])
    kwargs = a["kwargs"] if call.gate != "log" else {}
    return call.like(
        notes=call.notes, q=a["q"], k=a["k"], v=a["v"], g=a["g"], beta=a["beta"], A_log=kwargs.get("A_log"),
        dt_bias=kwargs.get("dt_bias"), initial_state=a["initial_state"], cu_seqlens=cu, cu_seqlens_cpu=cu_cpu,
        split=split, memo={},
    ), plan  # fmt: skip


def keep(signature: Hashable | None, call: Call, plan: Plan) -> None:
    """Remember a signature, if the plan is our own."""
    if plan.backend != "fla" and not call.unknown:
        none = dict.fromkeys((*TENSORS, "cu_seqlens", "cu_seqlens_cpu", "split"))
        KNOWN.keep(signature, (call.like(notes=call.notes, **none, verbatim={}, memo={}), plan))

"""causal_conv1d calls that were bound and planned before; see :mod:`kernel_fun._common.known`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_fun._common import config
from kernel_fun._common.known import Known
from kernel_fun.cconv.call import TENSORS

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kernel_fun._common.plan import Plan
    from kernel_fun.cconv.call import Call

KNOWN: Known[tuple[Call, Plan]] = Known(config.CCONV_POLICY)


def signature(a: dict[str, Any]) -> Hashable | None:
    """The signature of a call's arguments, or None if it is to be bound anew: where boundaries lie on the
    host and are read, under context parallel, and with any keyword beyond the named ones."""
    cu = a["cu_seqlens"]
    if a["cp_context"] is not None or a["cu_seqlens_cpu"] is not None or a["kwargs"]:
        return None
    if cu is not None and getattr(cu, "is_cpu", True):
        return None
    return KNOWN.signature(
        (*[a[name] for name in TENSORS], cu), (a["output_final_state"], a["activation"], a["backend"])
    )


def recall(signature: Hashable | None, a: dict[str, Any]) -> tuple[Call, Plan] | None:
    """The bound call and the plan of a signature seen before, with the tensors of this call."""
    found = KNOWN.recall(signature)
    if found is None:
        return None
    call, plan = found
    x, residual = a["x"], a["residual"]
    if x.dim() > 3:
        x, residual = (None if t is None else t.flatten(2) for t in (x, residual))
    return call.like(
        x=x, weight=a["weight"], bias=a["bias"], residual=residual, initial_state=a["initial_state"],
        cu_seqlens=a["cu_seqlens"], memo={},
    ), plan  # fmt: skip


def keep(signature: Hashable | None, call: Call, plan: Plan) -> None:
    """Remember a signature, if the plan is our own."""
    if plan.backend != "fla" and not call.unknown:
        bare = call.like(**dict.fromkeys((*TENSORS, "cu_seqlens")), verbatim={}, memo={})
        KNOWN.keep(signature, (bare, plan))

"""The order of the stages and what flows between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kernel_fun._common import config
from kernel_fun.kda.stages import AGAIN, Grads, Intra

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun._common.plan import Plan
    from kernel_fun.kda.call import Call
    from kernel_fun.kda.stages import Again, BwdGrads, BwdState, FwdIntra, FwdState, ReverseScan


class Forward(NamedTuple):
    o: Tensor
    ht: Tensor | None
    h: Tensor | None
    v_new: Tensor | None
    intra: Intra


def forward(call: Call, plan: Plan) -> Forward:
    """``fwd_intra`` then ``fwd_state``; in one step where the backend has done it before."""
    again: Again | None = call.notes.get(AGAIN)
    if again is not None:
        done = again(call.q, call.k, call.v, call.g, call.beta, call.A_log, call.dt_bias, call.initial_state)
        if done is not None:
            return Forward(done[0], done[1], None, None, done[2])
    fwd_intra: FwdIntra = plan.load("fwd_intra")
    fwd_state: FwdState = plan.load("fwd_state")
    keep = call.return_intermediate_states or (call.disable_recompute and plan.problem.needs_grad)
    intra = fwd_intra(call, scan_next=True)
    _settle(call)
    scan = fwd_state(call, intra, keep=keep)
    _settle(call)
    assert scan.o is not None
    return Forward(scan.o, scan.ht, scan.h, scan.v_new, intra)


def backward(
    call: Call,
    plan: Plan,
    intra: Intra,
    do: Tensor | None,
    dht: Tensor | None,
    h: Tensor | None,
    v_new: Tensor | None,
) -> tuple[Grads, Tensor | None]:
    """``bwd_state`` then ``bwd_grads``. Returns the gradients and dh0."""
    bwd_state: BwdState = plan.load("bwd_state")
    scan = bwd_state(call, intra, do, dht, h, v_new)
    _settle(call)
    return gradients(call, plan, intra, scan, do), scan.dh0


def gradients(call: Call, plan: Plan, intra: Intra, scan: ReverseScan, do: Tensor | None) -> Grads:
    """``bwd_grads``, whose partial sums of dA_log and d dt_bias become gradients in the shape and dtype of
    their inputs."""
    bwd_grads: BwdGrads = plan.load("bwd_grads")
    grads = bwd_grads(call, intra, scan, do)
    _settle(call)
    dA_log, ddt_bias = _reduce(grads.dA_log, call.A_log), _reduce(grads.ddt_bias, call.dt_bias)
    return grads._replace(dA_log=dA_log, ddt_bias=ddt_bias)


def _reduce(partial: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    if partial is None or parameter is None:
        return None
    total = partial.sum(0)
    if total.shape != parameter.shape:
        total = total.view(-1) if parameter.dim() == 1 else total.reshape(parameter.shape)
    return total if total.dtype == parameter.dtype else total.to(parameter.dtype)


def _settle(call: Call) -> None:
    """Under KERNEL_FUN_DEBUG wait for the device, so that a fault is raised by the stage that made it."""
    if config.DEBUG.on() and call.q.device.type == "cuda":
        import torch

        torch.cuda.synchronize(call.q.device)

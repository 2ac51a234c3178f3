"""One autograd Function: what is saved, and why nothing else is."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from kernel_fun._common import check, config
from kernel_fun.cconv.call import TENSORS, Call

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun._common.plan import Plan
    from kernel_fun.cconv.stages import Bwd, Fwd


class CausalConv1d(torch.autograd.Function):
    """causal_conv1d with its own backward.

    Saved: the caller's tensors and, for a packed call, the row table. The pre-activation is computed again.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y, ht = forward(call, plan)
        # the residual enters as a sum: its value is not needed again
        x, weight, bias, residual, h0 = tensors
        ctx.save_for_backward(x, weight, bias, h0, check.kept(call.cu_seqlens))
        ctx.facts, ctx.plan = call.facts(), plan
        ctx.residual = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, ht

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        dy, dht = grad_outputs
        if dy is None and dht is None:
            return (None,) * (2 + len(TENSORS))
        with no_grad():
            gradients = CausalConv1d._gradients(ctx, dy, dht)
        if torch.is_grad_enabled():
            gradients = _NoDoubleBackward.apply(len(gradients), *gradients, dy, dht, *ctx.saved_tensors)
        return (None, None, *gradients)

    @staticmethod
    def _gradients(ctx: Any, dy: Tensor | None, dht: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, h0, cu = ctx.saved_tensors
        call = Call.for_backward(ctx.facts, x, weight, bias, h0, cu)
        wants = dict(zip(TENSORS, ctx.needs_input_grad[2:]))
        bwd: Bwd = ctx.plan.load("bwd")
        given = torch.zeros_like(x, memory_format=torch.contiguous_format) if dy is None else dy
        with no_autocast(x):
            g = bwd(call, given, dht, wants["weight"] or wants["bias"])
        settle(x)
        dr = None
        if wants["residual"] and dy is not None:
            dr = residual_gradient(call, dy).to(ctx.residual)
        return g.dx, g.dweight, g.dbias, dr, g.dh0


class _NoDoubleBackward(torch.autograd.Function):
    """Gradients asked for with ``create_graph=True``: as they are, but a backward through them raises."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """``tensors``: n gradients, then everything they depend on."""
        return tuple(None if t is None else t.view_as(t) for t in tensors[:n])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        raise RuntimeError("causal_conv1d has no double backward: its gradients cannot be differentiated")


def residual_gradient(call: Call, dy: Tensor) -> Tensor:
    """dy, with zeros in the rows outside every sequence, where the residual was not added."""
    if call.cu_seqlens is None:
        return dy
    t = torch.arange(dy.shape[1], device=dy.device)
    return torch.where((t < call.cu_seqlens[-1])[:, None], dy, 0.0)


def forward(call: Call, plan: Plan) -> tuple[Tensor, Tensor | None]:
    fwd: Fwd = plan.load("fwd")
    with no_autocast(call.x):
        y, ht = fwd(call)
    settle(call.x)
    return y, ht


def run(call: Call, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """Forward with or without a graph: (y, final state)."""
    if plan.problem.needs_grad:
        return CausalConv1d.apply(call, plan, *call.tensors())
    with no_grad():
        return forward(call, plan)


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """The op computes in its own dtypes, whatever an enclosing autocast says."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return _NOTHING


def no_grad() -> contextlib.AbstractContextManager[object]:
    """No graph is recorded; nothing to do where none is anyway."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


_NOTHING = contextlib.nullcontext()


def settle(x: Tensor) -> None:
    """Under KERNEL_FUN_DEBUG wait for the device, so that a fault is raised by the stage that made it."""
    if config.DEBUG.on() and x.device.type == "cuda":
        torch.cuda.synchronize(x.device)

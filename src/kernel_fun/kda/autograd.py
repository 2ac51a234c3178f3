"""One autograd Function: what is saved, and why nothing else is."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from kernel_fun._common import check
from kernel_fun.kda import chain
from kernel_fun.kda.call import TENSORS, Call
from kernel_fun.kda.stages import Intra

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun._common.plan import Plan


class ChunkKDA(torch.autograd.Function):
    """chunk_kda with its own backward.

    Saved: the caller's tensors and what fwd_intra returned (and the forward's states with
    ``disable_recompute``), and boundaries, so that autograd refuses a backward after they were changed.
    Normalised q and k, the activated gate and beta are rebuilt.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        with undisturbed(call):
            out = chain.forward(call, plan)
        ctx.call, ctx.plan = call.without_tensors(), plan
        ctx.save_for_backward(*tensors, *out.intra, out.h, out.v_new, check.kept(call.cu_seqlens))
        ctx.set_materialize_grads(False)
        return out.o, out.ht

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        do, dht = grad_outputs
        n = len(TENSORS)
        if do is None and dht is None:
            return (None,) * (2 + n)
        saved = ctx.saved_tensors
        *intra, h, v_new, cu = saved[n:]
        call = ctx.call.with_tensors(saved[:n], cu, notes=ctx.call.notes.of(*saved, do, dht))
        with undisturbed(call):
            grads, dh0 = chain.backward(call, ctx.plan, Intra(*intra), do, dht, h, v_new)
        results = (*grads, dh0)
        if torch.is_grad_enabled():
            results = _NoDoubleBackward.apply(len(results), *results, *saved[:n], do, dht)
        return (None, None, *results)


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
        raise RuntimeError("chunk_kda has no double backward: its gradients cannot be differentiated again")


def undisturbed(call: Call) -> AbstractContextManager[object]:
    """No graph is recorded, and the op computes in its own dtypes: autocast would narrow its products."""
    kind = call.q.device.type
    if torch.is_autocast_enabled(kind):
        return _computing(kind)
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


@contextmanager
def _computing(kind: str) -> Generator[None]:
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        yield


_NOTHING = nullcontext()


def run(call: Call, plan: Plan) -> Any:
    """Forward with or without a graph. (o, final_state), or a 3-tuple with the chunk states."""
    if plan.problem.needs_grad:
        return ChunkKDA.apply(call, plan, *call.tensors())
    with undisturbed(call):
        out = chain.forward(call, plan)
    if not call.return_intermediate_states:
        return out.o, out.ht
    return out.o, out.ht, intermediate_states(call, out)


def intermediate_states(call: Call, out: chain.Forward) -> Tensor:
    """h ``[B, ceil(T/BT), HV, K, V]`` dense, ``[1, chunks, HV, K, V]`` packed, in k's dtype and the caller's
    layout. With ``use_graph`` there are ceil(T/BT) + max_num_seqs - 1 rows; those past the last chunk mean
    nothing. Without it a packed call on a GPU waits for the number of chunks if no cu_seqlens_cpu says it.
    """
    assert out.h is not None
    h = out.h.to(call.k.dtype)
    if call.state_v_first:
        h = h.mT
    B, T = call.q.shape[:2]
    bound = -(-T // call.BT)
    if call.cu_seqlens is None:
        return h.unflatten(0, (B, bound)).contiguous()
    if call.use_graph:
        rows = bound + call.cu_seqlens.numel() - 2
    else:
        host = call.cu_seqlens if call.cu_seqlens_cpu is None else call.cu_seqlens_cpu
        rows = int((host.diff() + call.BT - 1).div(call.BT, rounding_mode="floor").sum())
    pad = h.new_zeros((max(0, rows - h.shape[0]), *h.shape[1:]))
    return torch.cat((h[:rows], pad)).unsqueeze(0)

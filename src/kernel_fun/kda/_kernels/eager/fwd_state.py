"""fwd_state: the recurrence over chunks, and the output.

    t     = v - (k E) S
    v_new = (A beta) t
    o     = (scale q E) S + Aqk v_new
    S     = total S + (k R)^T v_new

E decays from the chunk's start to a token, R from a token to the chunk's end. [k E; scale q E] S is one
product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kernel_fun.kda._kernels.eager import operands
from kernel_fun.kda._kernels.eager.decay import whole
from kernel_fun.kda._kernels.eager.layout import Group, Index, Layout, Step, compute_dtype, io_dtype, layout
from kernel_fun.kda.stages import Intra, Scan

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call


class KeySide(NamedTuple):
    """K-side operands of a tile, ``X`` chunk-heads."""

    kq: Tensor
    """[k E; scale q E], ``[X, 2 BT, K]``."""
    kR: Tensor
    """``[X, BT, K]``."""
    total: Tensor
    """``[X, K, 1]``."""
    Ab: Tensor
    """A times beta of the column, ``[X, BT, BT]``."""
    Aqk: Tensor


def key_side(lay: Layout, call: Call, intra: Intra, chunks: Index, dtype: torch.dtype) -> KeySide:
    """Rebuild the K-side operands of the scans for a list of chunks."""
    HV = call.v.shape[2]
    G = HV // call.q.shape[2]
    a = operands.decays(lay, call, chunks, dtype)
    E, R = whole(a, torch.ones_like(a))
    q = operands.normalised(lay, call.q, intra.q_rstd, chunks, G, dtype)
    k = operands.normalised(lay, call.k, intra.k_rstd, chunks, G, dtype)
    kq = E.new_empty(E.shape[0], 2 * lay.BT, E.shape[2])
    torch.mul(k, E, out=kq[:, : lay.BT])
    torch.mul(q.mul_(call.scale), E, out=kq[:, lay.BT :])
    Ab = operands.flat(lay.load(intra.A, chunks, dtype))
    Ab = Ab * operands.betas(lay, call, chunks, dtype).mT
    Aqk = operands.flat(lay.load(intra.Aqk, chunks, dtype))
    return KeySide(kq, k.mul_(R), E[:, -1].unsqueeze(-1), Ab, Aqk)


def heads(step: Step, HV: int) -> slice:
    """Chunk-heads of a step within its block's operands."""
    return slice(step.lo * HV, step.hi * HV)


def fwd_state(call: Call, intra: Intra, *, keep: bool, output: bool = True) -> Scan:
    """See :class:`kernel_fun.kda.stages.FwdState`.

    States of 16-bit calls are float32 here, twice the size and more exact than a 16-bit copy: they are
    not kept for the backward, which rebuilds them.
    """
    whole_states = call.return_intermediate_states or io_dtype(call) == compute_dtype(call)
    return scan(call, intra, output=output, keep=keep and (whole_states or not output))


def scan(call: Call, intra: Intra, *, output: bool, keep: bool) -> Scan:
    """The forward recurrence; without ``output`` the states and v_new of a rescan, or the final state."""
    lay, dtype = layout(call), compute_dtype(call)
    HV, V = call.v.shape[2:]
    K = call.q.shape[3]
    new = call.q.new_empty
    o = lay.output(call.q, HV, V, call.q.dtype) if output else None
    h = new((lay.NT, HV, K, V), dtype=dtype) if keep else None
    v_new = lay.output(call.q, HV, V, dtype) if keep else None
    wants_ht = call.output_final_state and (output or not keep)
    ht = new((lay.N, HV, K, V), dtype=dtype) if wants_ht else None
    for group in lay.groups(HV):
        S = initial_states(call, call.initial_state, group, dtype)
        for block in group.blocks:
            x = key_side(lay, call, intra, block.chunks, dtype)
            v = operands.flat(lay.load(call.v, block.chunks, dtype))
            vn, out = torch.empty_like(v), torch.empty_like(v) if output else None
            for step in block.steps:
                at = heads(step, HV)
                state = S[: at.stop - at.start]
                if h is not None:
                    h[step.chunks] = state.unflatten(0, (-1, HV))
                kq_S = torch.bmm(x.kq[at], state)
                torch.bmm(x.Ab[at], v[at].sub_(kq_S[:, : lay.BT]), out=vn[at])
                if out is not None:
                    torch.baddbmm(kq_S[:, lay.BT :], x.Aqk[at], vn[at], out=out[at])
                state.mul_(x.total[at]).baddbmm_(x.kR[at].mT, vn[at])
            if v_new is not None:
                lay.store(v_new, block.chunks, vn.unflatten(0, (-1, HV)))
            if o is not None and out is not None:
                lay.store(o, block.chunks, out.unflatten(0, (-1, HV)))
        if ht is not None:
            ht[group.sequences] = S.unflatten(0, (-1, HV))
    return Scan(o, final_states(call, ht), h, v_new)


def initial_states(call: Call, states: Tensor | None, group: Group, dtype: torch.dtype) -> Tensor:
    """Fresh K-first states ``[n HV, K, V]`` of a group from states in the caller's layout, or zeros."""
    HV, V = call.v.shape[2:]
    K = call.q.shape[3]
    if states is None:
        return call.q.new_zeros((group.n * HV, K, V), dtype=dtype)
    S = states[group.sequences]
    if call.state_v_first:
        S = S.mT
    return torch.empty(S.shape, dtype=dtype, device=S.device).copy_(S).flatten(0, 1)


def final_states(call: Call, states: Tensor | None) -> Tensor | None:
    """K-first states in the caller's layout."""
    return states.mT.contiguous() if states is not None and call.state_v_first else states

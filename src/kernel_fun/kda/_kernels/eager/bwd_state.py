"""bwd_state: the recurrence over chunks in reverse, after a rescan of the forward's states if need be.

    dv2 = Aqk^T do + (k R) dS               dS: gradient of the state at the chunk's end
    y   = (A beta)^T dv2
    dS  = total dS + (scale q E)^T do - (k E)^T y

The last line is one product of [k E; scale q E]^T with [-y; do].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_fun.kda._kernels.eager import operands
from kernel_fun.kda._kernels.eager.fwd_state import final_states, heads, initial_states, key_side, scan
from kernel_fun.kda._kernels.eager.layout import compute_dtype, layout
from kernel_fun.kda.stages import Intra, ReverseScan

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call


def bwd_state(
    call: Call,
    intra: Intra,
    do: Tensor | None,
    dht: Tensor | None,
    h: Tensor | None,
    v_new: Tensor | None,
    *,
    only_dh0: bool = False,
) -> ReverseScan:
    """See :class:`kernel_fun.kda.stages.BwdState`."""
    lay, dtype = layout(call), compute_dtype(call)
    HV, V = call.v.shape[2:]
    K = call.q.shape[3]
    if only_dh0:
        h = v_new = None
    elif h is None or v_new is None:
        rescan = scan(call, intra, output=False, keep=True)
        h, v_new = rescan.h, rescan.v_new
    dh = None if only_dh0 else call.q.new_empty((lay.NT, HV, K, V), dtype=dtype)
    dv2 = None if only_dh0 else lay.output(call.q, HV, V, dtype)
    wants_dh0 = only_dh0 or call.initial_state is not None
    dh0 = call.q.new_empty((lay.N, HV, K, V), dtype=dtype) if wants_dh0 else None
    for group in lay.groups(HV):
        dS = initial_states(call, dht, group, dtype)
        for block in reversed(group.blocks):
            x = key_side(lay, call, intra, block.chunks, dtype)
            ydo = dS.new_zeros(x.kq.shape[0], 2 * lay.BT, V)
            if do is not None:
                ydo[:, lay.BT :] = operands.flat(lay.load(do, block.chunks, dtype))
            dO, du = ydo[:, lay.BT :], ydo.new_empty(x.kq.shape[0], lay.BT, V)
            for step in reversed(block.steps):
                at = heads(step, HV)
                state = dS[: at.stop - at.start]
                if dh is not None:
                    dh[step.chunks] = state.unflatten(0, (-1, HV))
                torch.baddbmm(torch.bmm(x.Aqk[at].mT, dO[at]), x.kR[at], state, out=du[at])
                ydo[at, : lay.BT] = torch.bmm(x.Ab[at].mT, du[at]).neg_()
                state.mul_(x.total[at]).baddbmm_(x.kq[at].mT, ydo[at])
            if dv2 is not None:
                lay.store(dv2, block.chunks, du.unflatten(0, (-1, HV)))
        if dh0 is not None:
            dh0[group.sequences] = dS.unflatten(0, (-1, HV))
    return ReverseScan(dh, dv2, final_states(call, dh0), h, v_new)

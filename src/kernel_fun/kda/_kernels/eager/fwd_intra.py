"""fwd_intra: what the tokens of one chunk know of each other.

    S_q[i,j] = sum_c q[i,c] k[j,c] decay(j to i, c)     i >= j
    S_k[i,j] = sum_c k[i,c] k[j,c] decay(j to i, c)     i >  j
    Aqk = scale S_q          A = (I + beta S_k)^-1

Level s gives the (right, left) blocks: [q f; k f][right] (k r)[left]^T.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_fun.kda._kernels.eager import gates, operands
from kernel_fun.kda._kernels.eager.decay import halves, level_blocks, levels
from kernel_fun.kda._kernels.eager.layout import Layout, compute_dtype, io_dtype, layout
from kernel_fun.kda.stages import Intra

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call


def fwd_intra(call: Call, *, scan_next: bool = False) -> Intra:
    """See :class:`kernel_fun.kda.stages.FwdIntra`."""
    lay, dtype = layout(call), compute_dtype(call)
    HV, BT = call.v.shape[2], lay.BT
    G = HV // call.q.shape[2]
    A = lay.output(call.q, HV, BT, io_dtype(call))
    Aqk = lay.output(call.q, HV, BT, io_dtype(call))
    q_rstd, k_rstd = (_rstd(lay, x, dtype) if call.l2norm else None for x in (call.q, call.k))
    for chunks in lay.tiles(HV):
        q = operands.normalised(lay, call.q, q_rstd, chunks, G, dtype)
        k = operands.normalised(lay, call.k, k_rstd, chunks, G, dtype)
        a = operands.decays(lay, call, chunks, dtype)
        S_q, S_k = scores(q, k, a)
        L = S_k.mul_(operands.betas(lay, call, chunks, dtype))
        lay.store(Aqk, chunks, S_q.mul_(call.scale).unflatten(0, (-1, HV)))
        lay.store(A, chunks, unit_lower_inverse(L).unflatten(0, (-1, HV)))
    return Intra(A, Aqk, q_rstd, k_rstd, None)


def _rstd(lay: Layout, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Reciprocal norms ``[B, T, H]``, a tile at a time."""
    out = lay.output(x, x.shape[2], 1, dtype)
    for chunks in lay.tiles(x.shape[2]):
        lay.store(out, chunks, gates.rstd(lay.load(x, chunks, dtype)))
    return out.squeeze(-1)


def scores(q: Tensor, k: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """S_q and S_k ``[X, BT, BT]`` of tiles ``[X, BT, K]``; ``a`` is overwritten."""
    X, BT, K = q.shape
    S = q.new_zeros(2, X, BT, BT)
    f, r = a, torch.ones_like(a)
    for s in levels(f, r):
        f_right = halves(f, s)[1]
        left = halves(k, s)[0] * halves(r, s)[0]
        right = q.new_empty(X, BT // (2 * s), 2, s, K)
        torch.mul(halves(q, s)[1], f_right, out=right[:, :, 0])
        torch.mul(halves(k, s)[1], f_right, out=right[:, :, 1])
        block = torch.bmm(right.view(-1, 2 * s, K), left.view(-1, s, K).mT)
        block = block.view(X, -1, 2, s, s).permute(2, 0, 3, 4, 1)
        level_blocks(S[0], s).copy_(block[0])
        level_blocks(S[1], s).copy_(block[1])
    S[0].diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    return S[0], S[1]


def unit_lower_inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 of strictly lower triangular ``L [X, BT, BT]`` by substitution."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False, unitriangular=True)

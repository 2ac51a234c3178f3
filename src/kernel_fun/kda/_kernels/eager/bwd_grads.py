"""bwd_grads: every gradient of a chunk. S: the state at its start; dS: the gradient of the state at its end.

    dAqk = scale tril(do v_new^T)          dw  = -dv2 S^T
    dq   = scale E (do S^T)                ck  = R (v_new dS^T)
    dM   = dv2 v^T + dw (k E)^T            gradient of A before the column's beta
    y    = A^T dv2                         rk  = E (A^T dw)
    dAkk = -tril_-1(A^T tril_-1(dM beta_j) A^T)
    over levels, rows:                     dq += f dAqk (k r)      rk += f dAkk (k r)
    over levels, columns:                  ck += r (dAqk^T (q f) + dAkk^T (beta k f))
    dv   = beta y                          dbeta = y . v + rk . k
    dk   = ck + beta rk

The log decay of token t appears in every pair whose decay spans it, and dl[t] is the sum of just those
terms: at a level, for t in the right half the row terms of i >= t in its half, for t in the left half the
column terms of j < t in its half; against S the row terms of i >= t; against dS the column terms of j < t;
and total sum_v S dS. Each carries exp(l[t]), so where the decay is 0, dl is exactly 0, and so it is at the
first token of a sequence without initial state. Nothing cancels. The i = j term carries no decay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_fun.kda._kernels.eager import gates, operands
from kernel_fun.kda._kernels.eager.decay import halves, level_blocks, levels, whole
from kernel_fun.kda._kernels.eager.layout import Index, Layout, compute_dtype, layout
from kernel_fun.kda.stages import Grads, Intra, ReverseScan

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call


def bwd_grads(call: Call, intra: Intra, scan: ReverseScan, do: Tensor | None) -> Grads:
    """See :class:`kernel_fun.kda.stages.BwdGrads`."""
    lay, dtype = layout(call), compute_dtype(call)
    (H, K), (HV, V) = call.q.shape[2:], call.v.shape[2:]
    gated = call.gate != "log"
    out = Grads(
        dq=lay.output(call.q, H, K, call.q.dtype),
        dk=lay.output(call.k, H, K, call.k.dtype),
        dv=lay.output(call.v, HV, V, call.v.dtype),
        dg=lay.output(call.g, HV, K, call.g.dtype),
        dbeta=lay.output(call.beta, HV, 1, call.beta.dtype),
        dA_log=scan.h.new_empty((lay.NT, HV)) if gated and call.A_log is not None else None,
        ddt_bias=scan.h.new_empty((lay.NT, HV, K)) if gated and call.dt_bias is not None else None,
    )
    for chunks in lay.tiles(HV):
        _tile(lay, call, intra, scan, do, chunks, dtype, out)
    return out._replace(dbeta=out.dbeta.squeeze(-1))


def _tile(
    lay: Layout,
    call: Call,
    intra: Intra,
    scan: ReverseScan,
    do: Tensor | None,
    chunks: Index,
    dtype: torch.dtype,
    out: Grads,
) -> None:
    """All gradients of a tile of chunks."""
    HV, BT = call.v.shape[2], lay.BT
    H = call.q.shape[2]
    G = HV // H
    flat = operands.flat
    raw_g = lay.load(call.g, chunks, dtype)
    l = gates.gate_fwd(raw_g, call)
    a = flat(l.exp() if lay.full else l.exp().masked_fill_(lay.padding(chunks), 1.0))
    q = operands.normalised(lay, call.q, intra.q_rstd, chunks, G, dtype)
    k = operands.normalised(lay, call.k, intra.k_rstd, chunks, G, dtype)
    b = operands.betas(lay, call, chunks, dtype)
    A = flat(lay.load(intra.A, chunks, dtype))
    v = flat(lay.load(call.v, chunks, dtype))
    dO = torch.zeros_like(v) if do is None else flat(lay.load(do, chunks, dtype))
    S, dS = flat(scan.h[chunks]), flat(scan.dh[chunks])
    dv2, v_new = flat(scan.dv2[chunks]), flat(scan.v_new[chunks])

    # between chunks: contraction over V
    dAqk = torch.bmm(dO, v_new.mT).mul_(call.scale).tril_()
    dq, dw = torch.bmm(dO, S.mT), torch.bmm(dv2, S.mT).neg_()
    E, R = whole(a.clone(), torch.ones_like(a))
    dq.mul_(E).mul_(call.scale)
    ck = torch.bmm(v_new, dS.mT).mul_(R)
    dl = (S * dS).sum(-1).mul_(E[:, -1]).unsqueeze(1).repeat(1, BT, 1)
    dl.baddbmm_(_earlier(a, BT), k * ck)

    # through A, within a chunk
    dM = torch.bmm(dv2, v.mT).baddbmm_(dw, (k * E).mT)
    dAkk = torch.bmm(A.mT, torch.bmm(dM.mul_(b.mT).tril_(-1), A.mT)).tril_(-1).neg_()
    y, rk = torch.bmm(A.mT, dv2), torch.bmm(A.mT, dw).mul_(E)

    bk = b * k
    dl.baddbmm_(_later(a, BT), torch.addcmul(q * dq, bk, rk))

    # within a chunk: sweeps over the levels, on top of what is there
    sweeps(dAqk, dAkk, q, k, bk, a, R.fill_(1.0), dq, rk, ck, dl)

    dbeta = (y * v).sum(-1, keepdim=True) + (rk * k).sum(-1, keepdim=True)
    dk = ck.addcmul_(b, rk)
    on_diagonal = dAqk.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    dq.addcmul_(on_diagonal, k)
    dk.addcmul_(on_diagonal, q)

    dl = dl.unflatten(0, (-1, HV))
    if not lay.full:
        dl.masked_fill_(lay.padding(chunks), 0.0)
    dg, dA_log, ddt_bias = gates.gate_bwd(raw_g, l, dl, call)

    per_chunk = lambda x: x.unflatten(0, (-1, HV))  # noqa: E731
    lay.store(out.dv, chunks, per_chunk(y * b))
    lay.store(out.dg, chunks, dg)
    raw_b = operands.vector(lay, call.beta, chunks, dtype)
    lay.store(out.dbeta, chunks, gates.beta_bwd(raw_b, per_chunk(dbeta), call.beta_mode))
    for grad, y_, rstd, into in ((dq, q, intra.q_rstd, out.dq), (dk, k, intra.k_rstd, out.dk)):
        dx = per_chunk(grad).unflatten(1, (H, G)).sum(2) if G > 1 else per_chunk(grad)
        if rstd is not None:
            dx = gates.norm_bwd(per_chunk(y_)[:, ::G], operands.vector(lay, rstd, chunks, dtype), dx)
        lay.store(into, chunks, dx)
    if out.dA_log is not None and dA_log is not None:
        out.dA_log[chunks] = dA_log
    if out.ddt_bias is not None and ddt_bias is not None:
        out.ddt_bias[chunks] = ddt_bias


def _later(like: Tensor, n: int) -> Tensor:
    """``[X, n, n]``: row t sums what stands at t and after."""
    return like.new_ones(n, n).triu_().expand(like.shape[0], n, n)


def _earlier(like: Tensor, n: int) -> Tensor:
    """``[X, n, n]``: row t sums what stands before t."""
    return like.new_ones(n, n).tril_(-1).expand(like.shape[0], n, n)


def sweeps(
    dAqk: Tensor,
    dAkk: Tensor,
    q: Tensor,
    k: Tensor,
    bk: Tensor,
    f: Tensor,
    r: Tensor,
    dq: Tensor,
    rk: Tensor,
    ck: Tensor,
    dl: Tensor,
) -> None:
    """Add the sweeps over all levels, i = j left out, to dq, rk, ck, dl ``[X, BT, K]``. ``f`` = a and
    ``r`` = 1 are overwritten."""
    X, BT, K = q.shape
    for s in levels(f, r):
        n = BT // (2 * s)
        f_right, r_left = halves(f, s)[1], halves(r, s)[0]
        kr = halves(k, s)[0] * r_left
        qf = q.new_empty(X, n, 2, s, K)
        torch.mul(halves(q, s)[1], f_right, out=qf[:, :, 0])
        torch.mul(halves(bk, s)[1], f_right, out=qf[:, :, 1])
        dA = q.new_empty(X, n, 2, s, s)
        dA[:, :, 0] = level_blocks(dAqk, s).permute(0, 3, 1, 2)
        dA[:, :, 1] = level_blocks(dAkk, s).permute(0, 3, 1, 2)
        dA = dA.view(-1, 2 * s, s)
        row = torch.bmm(dA, kr.view(-1, s, K)).view(X, n, 2, s, K)
        halves(dq, s)[1].addcmul_(f_right, row[:, :, 0])
        halves(rk, s)[1].addcmul_(f_right, row[:, :, 1])
        column = torch.bmm(dA.mT, qf.view(-1, 2 * s, K)).view(X, n, s, K)
        halves(ck, s)[0].addcmul_(r_left, column)
        row_terms = qf.mul_(row).sum(2)
        dl_left, dl_right = halves(dl, s)
        if s == 1:
            dl_right.add_(row_terms)
            continue
        row_terms, column_terms = row_terms.view(-1, s, K), kr.mul_(column).view(-1, s, K)
        dl_right.add_(torch.bmm(_later(row_terms, s), row_terms).view(X, n, s, K))
        dl_left.add_(torch.bmm(_earlier(column_terms, s), column_terms).view(X, n, s, K))

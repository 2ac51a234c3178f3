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

from typing import TYPE_CHECKING, NamedTuple

import torch

from kernel_fun.kda._kernels.eager import gates, operands
from kernel_fun.kda._kernels.eager.decay import halves, level_blocks, levels, whole
from kernel_fun.kda._kernels.eager.layout import Index, Layout, compute_dtype, layout
from kernel_fun.kda.stages import Grads, Intra, ReverseScan

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call


class Operands(NamedTuple):
    """A tile of X chunk-heads, rebuilt from the caller's tensors and the scans."""

    raw_g: Tensor
    """``[n, HV, BT, K]``."""
    l: Tensor
    """``[n, HV, BT, K]``."""
    a: Tensor
    """exp(l), 1 past a sequence's end, ``[X, BT, K]``."""
    q: Tensor
    k: Tensor
    b: Tensor
    """``[X, BT, 1]``."""
    A: Tensor
    v: Tensor
    do: Tensor
    v_new: Tensor
    dv2: Tensor
    S: Tensor
    dS: Tensor


class Raw(NamedTuple):
    """Gradients of a tile before gate, beta and norm."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dl: Tensor
    dbeta: Tensor


def bwd_grads(call: Call, intra: Intra, scan: ReverseScan, do: Tensor | None) -> Grads:
    """See :class:`kernel_fun.kda.stages.BwdGrads`."""
    lay, dtype = layout(call), compute_dtype(call)
    (H, K), (HV, V) = call.q.shape[2:], call.v.shape[2:]
    gated, new = call.gate != "log", call.q.new_empty
    out = Grads(
        dq=lay.output(call.q, H, K, call.q.dtype),
        dk=lay.output(call.k, H, K, call.k.dtype),
        dv=lay.output(call.v, HV, V, call.v.dtype),
        dg=lay.output(call.g, HV, K, call.g.dtype),
        dbeta=lay.output(call.beta, HV, 1, call.beta.dtype),
        dA_log=new((lay.NT, HV), dtype=dtype) if gated and call.A_log is not None else None,
        ddt_bias=new((lay.NT, HV, K), dtype=dtype) if gated and call.dt_bias is not None else None,
    )
    for chunks in lay.tiles(HV):
        x = _operands(lay, call, intra, scan, do, chunks, dtype)
        _finish(lay, call, intra, chunks, x, _gradients(call.scale, x), out)
    return out._replace(dbeta=out.dbeta.squeeze(-1))


def _operands(
    lay: Layout,
    call: Call,
    intra: Intra,
    scan: ReverseScan,
    do: Tensor | None,
    chunks: Index,
    dtype: torch.dtype,
) -> Operands:
    assert scan.h is not None
    assert scan.v_new is not None
    assert scan.dh is not None
    assert scan.dv2 is not None
    flat = operands.flat
    G = call.v.shape[2] // call.q.shape[2]
    raw_g = lay.load(call.g, chunks, dtype)
    l = gates.gate_fwd(raw_g, call)
    a = l.exp()
    v, v_new, dv2 = (flat(lay.load(x, chunks, dtype)) for x in (call.v, scan.v_new, scan.dv2))
    return Operands(
        raw_g,
        l,
        flat(a if lay.full else a.masked_fill_(lay.padding(chunks), 1.0)),
        operands.normalised(lay, call.q, intra.q_rstd, chunks, G, dtype),
        operands.normalised(lay, call.k, intra.k_rstd, chunks, G, dtype),
        operands.betas(lay, call, chunks, dtype),
        flat(lay.load(intra.A, chunks, dtype)),
        v,
        torch.zeros_like(v) if do is None else flat(lay.load(do, chunks, dtype)),
        v_new,
        dv2,
        flat(scan.h[chunks]),
        flat(scan.dh[chunks]),
    )


def _gradients(scale: float, x: Operands) -> Raw:
    """The chunk algebra of the module's docstring."""
    q, k, a, A = x.q, x.k, x.a, x.A
    n = q.shape[1]
    # between chunks: contraction over V
    dAqk = torch.bmm(x.do, x.v_new.mT).mul_(scale).tril_()
    E, R = whole(a.clone(), torch.ones_like(a))
    dq, dw = torch.bmm(x.do, x.S.mT).mul_(E).mul_(scale), torch.bmm(x.dv2, x.S.mT).neg_()
    ck = torch.bmm(x.v_new, x.dS.mT).mul_(R)
    dl = (x.S * x.dS).sum(-1).mul_(E[:, -1]).unsqueeze(1).repeat(1, n, 1)
    dl.baddbmm_(_earlier(a, n), k * ck)
    # through A
    dM = torch.bmm(x.dv2, x.v.mT).baddbmm_(dw, (k * E).mT)
    dAkk = torch.bmm(A.mT, torch.bmm(dM.mul_(x.b.mT).tril_(-1), A.mT)).tril_(-1).neg_()
    y, rk = torch.bmm(A.mT, x.dv2), torch.bmm(A.mT, dw).mul_(E)
    bk = x.b * k
    dl.baddbmm_(_later(a, n), torch.addcmul(q * dq, bk, rk))
    # within the chunk: sweeps over the levels, on top of what is there
    sweeps(dAqk, dAkk, q, k, bk, a, R.fill_(1.0), dq, rk, ck, dl)
    dbeta = (y * x.v).sum(-1, keepdim=True) + (rk * k).sum(-1, keepdim=True)
    dk = ck.addcmul_(x.b, rk)
    on_diagonal = dAqk.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    return Raw(dq.addcmul_(on_diagonal, k), dk.addcmul_(on_diagonal, q), y.mul_(x.b), dl, dbeta)


def _finish(lay: Layout, call: Call, intra: Intra, chunks: Index, x: Operands, raw: Raw, out: Grads) -> None:
    """Gate, beta and norm backward, the sum over grouped heads, and the stores."""
    H, HV = call.q.shape[2], call.v.shape[2]
    G = HV // H
    dq, dk, dv, dl, dbeta = (grad.unflatten(0, (-1, HV)) for grad in raw)
    if not lay.full:
        dl.masked_fill_(lay.padding(chunks), 0.0)
    dg, dA_log, ddt_bias = gates.gate_bwd(x.raw_g, x.l, dl, call)
    raw_b = operands.vector(lay, call.beta, chunks, x.q.dtype)
    lay.store(out.dv, chunks, dv)
    lay.store(out.dg, chunks, dg)
    lay.store(out.dbeta, chunks, gates.beta_bwd(raw_b, dbeta, call.beta_mode))
    for grad, y, r, into in ((dq, x.q, intra.q_rstd, out.dq), (dk, x.k, intra.k_rstd, out.dk)):
        dx = grad.unflatten(1, (H, G)).sum(2) if G > 1 else grad
        if r is not None:
            y = y.unflatten(0, (-1, HV))[:, ::G]
            dx = gates.norm_bwd(y, operands.vector(lay, r, chunks, y.dtype), dx)
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

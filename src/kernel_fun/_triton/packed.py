"""Packed sequences: from cu_seqlens to a table a kernel reads by row, built on the device.

    rows int32 [3, T]    rows[0, t]  position of row t in its sequence, -1 outside every sequence
                         rows[1, t]  the sequence, 0 outside every sequence
                         rows[2, t]  rows of the sequence after t

Empty sequences own no row. Positions never exceed t, so that no table leads a kernel out of bounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize=["T", "N"])
def packed_rows_triton(cu_seqlens, rows, T, N, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    o_t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_t = o_t < T
    # below: entries known to be <= t; above: the first entry known to be > t, or N + 1
    below = tl.full([BLOCK], 0, tl.int32)
    above = tl.full([BLOCK], 0, tl.int32) + N + 1
    for _ in tl.static_range(STEPS):
        middle = (below + above) // 2
        is_open = below < above
        b_cu = tl.load(cu_seqlens + middle, mask=is_open, other=0).to(tl.int64)
        below = tl.where(is_open & (b_cu <= o_t), middle + 1, below)
        above = tl.where(is_open & (b_cu > o_t), middle, above)
    covered = (below >= 1) & (below <= N)
    n = tl.where(covered, below - 1, 0)
    bos = tl.load(cu_seqlens + n).to(tl.int64)
    eos = tl.load(cu_seqlens + n + 1).to(tl.int64)
    b_pos = tl.where(covered, tl.minimum(o_t - bos, o_t), -1)
    b_rem = tl.where(covered, eos - 1 - o_t, 0)
    tl.store(rows + o_t, b_pos.to(tl.int32), mask=m_t)
    tl.store(rows + T + o_t, n, mask=m_t)
    tl.store(rows + 2 * T.to(tl.int64) + o_t, b_rem.to(tl.int32), mask=m_t)


@triton.jit
def sequence_span(cu_seqlens, n, T):
    """First row and length, int64, of sequence n, within [0, T); 0 and T where ``cu_seqlens`` is None."""
    bos, L = n * 0, n * 0 + T
    if cu_seqlens is not None:
        bos = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        eos = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1).to(tl.int64), 0), T)
        L = tl.maximum(eos - bos, 0)
    return bos, L


def packed_rows(cu_seqlens: Tensor, T: int) -> Tensor:
    """The row table, int32 [3, T], of ``cu_seqlens`` [N+1] (int32 or int64) on its device; no host sync.

    One entry of bisection per bit of N+1. T must be below 2^31.
    """
    N = cu_seqlens.shape[0] - 1
    rows = torch.empty(3, T, dtype=torch.int32, device=cu_seqlens.device)
    if T > 0:
        steps = (N + 1).bit_length() + 1  # halvings of the next power of two to N + 2
        packed_rows_triton[(-(-T // BLOCK),)](cu_seqlens, rows, T, N, STEPS=steps, BLOCK=BLOCK)
    return rows

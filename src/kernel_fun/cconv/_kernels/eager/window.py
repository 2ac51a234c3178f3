"""What every eager stage shares: the delayed inputs of each token, dense or packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Call


class Rows(NamedTuple):
    """Where each row stands; every tensor broadcasts to [B, T]."""

    pos: Tensor
    """Position in the row's sequence, -1 outside every sequence."""
    seq: Tensor
    """The sequence, 0 outside every sequence."""
    bos: Tensor
    """First row of each sequence, [N]."""
    length: Tensor
    """Rows of each sequence, [N]."""


def wide(c: Call) -> torch.dtype:
    """The dtype of all arithmetic."""
    return torch.float64 if c.x.dtype == torch.float64 else torch.float32


def rows_of(c: Call) -> Rows:
    """The row table of a call; packed, made from cu_seqlens without waiting for the device."""
    (B, T, _), device = c.x.shape, c.x.device
    t = torch.arange(T, device=device)
    if c.cu_seqlens is None:
        n = torch.arange(B, device=device)
        return Rows(t[None], n[:, None], torch.zeros_like(n), torch.full_like(n, T))
    cu = c.cu_seqlens.long()
    seq = torch.searchsorted(cu, t, right=True) - 1
    covered = (seq >= 0) & (seq < c.N)
    seq = torch.where(covered, seq, 0)
    bos = cu[:-1]
    # without any sequence there is nothing to look up
    pos = torch.where(covered, t - bos[seq], -1) if c.N else torch.full_like(t, -1)
    return Rows(pos[None], seq[None], bos, cu[1:] - bos)


def delayed(c: Call, rows: Rows, j: int) -> Tensor:
    """x_{t-j} of every row, [B, T, D] wide: from the row's sequence, else the initial state, else 0."""
    B, T, D = c.x.shape
    x = c.x.to(wide(c))
    shifted = torch.cat((x.new_zeros(B, min(j, T), D), x[:, : max(T - j, 0)]), 1)
    past = x.new_zeros(())
    if c.initial_state is not None and j > 0 and c.N:
        slot = (c.weight.shape[1] + rows.pos - j).clamp(0, c.weight.shape[1] - 1)
        seq, slot = torch.broadcast_tensors(rows.seq, slot)
        past = torch.where((rows.pos >= 0)[..., None], c.initial_state.to(x.dtype)[seq, :, slot], 0.0)
    return torch.where((rows.pos >= j)[..., None], shifted, past)


def pre_activation(c: Call, rows: Rows) -> Tensor:
    """z [B, T, D] wide."""
    W = c.weight.shape[1]
    weight = c.weight.to(wide(c))
    z = c.x.new_zeros((), dtype=wide(c)) if c.bias is None else c.bias.to(wide(c))
    for j in reversed(range(W)):
        z = z + weight[:, W - 1 - j] * delayed(c, rows, j)
    return z

"""Short convolution backward in torch.

    dz_t = dy_t act'(z_t)                         act' = 1 or s (1 + z (1 - s)), s = sigmoid(z)
    dx_t = sum_{j<W} w_j dz_{t+j}  (+ dht)        within t's sequence
    dw_j = sum_t dz_t x_{t-j}      db = sum_t dz_t
    dh0[:, W-k] = sum_{k<=j<W} w_j dz_{j-k}       (+ dht where the sequence is shorter than W)

w_j = weight[:, W-1-j]; dht[:, i] belongs to token L-W+i, or to initial slot L+i before the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_fun.cconv._kernels.eager.window import Rows, delayed, pre_activation, rows_of, wide
from kernel_fun.cconv.stages import Gradients

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Call


def bwd(c: Call, dy: Tensor, dht: Tensor | None, wants_dw: bool) -> Gradients:
    """The backward stage; see ``stages.bwd``."""
    rows = rows_of(c)
    dz = dy.to(wide(c))
    if c.silu:
        z = pre_activation(c, rows)
        s = torch.sigmoid(z)
        dz = dz * (s * (1.0 + z * (1.0 - s)))
    dz = torch.where((rows.pos >= 0)[..., None], dz, 0.0)
    dweight = dbias = None
    if wants_dw:
        W = c.weight.shape[1]
        # outside every sequence x may hold anything, and 0 times anything is not 0
        taps = [(dz * torch.where((rows.pos >= 0)[..., None], delayed(c, rows, W - 1 - i), 0.0)).sum((0, 1))
                for i in range(W)]  # fmt: skip
        dweight = torch.stack(taps, -1).to(c.weight.dtype)
        dbias = None if c.bias is None else dz.sum((0, 1)).to(c.bias.dtype)
    return Gradients(_grad_input(c, rows, dz, dht), dweight, dbias, _grad_initial_state(c, rows, dz, dht))


def _grad_input(c: Call, rows: Rows, dz: Tensor, dht: Tensor | None) -> Tensor:
    (B, T, D), W = c.x.shape, c.weight.shape[1]
    weight = c.weight.to(dz.dtype)
    dx = torch.zeros(B, T, D, dtype=dz.dtype, device=dz.device)
    for j in range(W):
        # token t gives to t-j, where that is in its sequence
        given = torch.where((rows.pos >= j)[..., None], weight[:, W - 1 - j] * dz, 0.0)
        dx[:, : max(T - j, 0)] += given[:, j:]
    if dht is not None and c.N:
        seq, pos = torch.broadcast_tensors(rows.seq, rows.pos)
        slot = pos - rows.length[seq] + W
        kept = dht.to(dz.dtype)[seq, :, slot.clamp(0, W - 1)]
        dx += torch.where(((pos >= 0) & (slot >= 0))[..., None], kept, 0.0)
    return dx.to(c.x.dtype)


def _grad_initial_state(c: Call, rows: Rows, dz: Tensor, dht: Tensor | None) -> Tensor | None:
    if c.initial_state is None:
        return None
    (_, T, _), W, N = c.x.shape, c.weight.shape[1], c.N
    weight = c.weight.to(dz.dtype)
    dh0 = torch.zeros(c.initial_state.shape, dtype=dz.dtype, device=dz.device)
    n = torch.arange(N, device=dz.device)
    batch = n if c.cu_seqlens is None else torch.zeros_like(n)
    for slot in range(W if N else 0):
        for t in range(slot if T else 0):
            # token t is t + W - slot tokens after the input of this slot
            given = weight[:, slot - t - 1] * dz[batch, (rows.bos + t).clamp(0, T - 1)]
            dh0[:, :, slot] += torch.where((t < rows.length)[:, None], given, 0.0)
        if dht is not None:
            kept = dht[n, :, (slot - rows.length).clamp(0, W - 1)].to(dz.dtype)
            dh0[:, :, slot] += torch.where((rows.length <= slot)[:, None], kept, 0.0)
    return dh0.to(c.initial_state.dtype)

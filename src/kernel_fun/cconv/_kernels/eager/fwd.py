"""Short convolution forward in torch.

z_t = bias + sum_{j<W} w_j x_{t-j}          w_j = weight[:, W-1-j]
y_t = act(z_t) + residual_t                 rounded once, to x's dtype; 0 outside every sequence
ht[:, i] = x_{L-W+i}                        the last W inputs, newest last
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_fun.cconv._kernels.eager.window import Rows, pre_activation, rows_of, wide

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Call


def fwd(c: Call) -> tuple[Tensor, Tensor | None]:
    """The forward stage; see ``stages.fwd``."""
    rows = rows_of(c)
    y = pre_activation(c, rows)
    if c.silu:
        y = y * torch.sigmoid(y)
    if c.residual is not None:
        y = y + c.residual.to(y.dtype)
    y = torch.where((rows.pos >= 0)[..., None], y, 0.0).to(c.x.dtype)
    return y, final_state(c, rows) if c.output_final_state else None


def final_state(c: Call, rows: Rows) -> Tensor:
    """ht [N, D, W] in x's dtype."""
    (_, T, D), W, N = c.x.shape, c.weight.shape[1], c.N
    ht = torch.zeros(N, D, W, dtype=wide(c), device=c.x.device)
    if N == 0:
        return ht.to(c.x.dtype)
    n = torch.arange(N, device=c.x.device)
    batch = n if c.cu_seqlens is None else torch.zeros_like(n)
    for slot in range(W):
        t = rows.length - W + slot
        if T > 0:
            b_x = c.x[batch, (rows.bos + t).clamp(0, T - 1)].to(ht.dtype)
            ht[:, :, slot] = torch.where((t >= 0)[:, None], b_x, 0.0)
        if c.initial_state is not None:
            old = c.initial_state[n, :, (t + W).clamp(0, W - 1)].to(ht.dtype)
            ht[:, :, slot] = torch.where((t < 0)[:, None], old, ht[:, :, slot])
    return ht.to(c.x.dtype)

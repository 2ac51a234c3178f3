"""Short convolution forward in torch.

z_t = bias + sum_{j<W} w_j x_{t-j}          w_j = weight[:, W-1-j]
y_t = act(z_t) + residual_t                 rounded once, to x's dtype; 0 outside every sequence
ht[:, i] = x_{L-W+i}                        the last W inputs, newest last
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_fun.cconv._kernels.eager.line import (
    blocks,
    inputs,
    line_of,
    one_plus_exp,
    pre_activation,
    taps,
    wide,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Call


def fwd(c: Call) -> tuple[Tensor, Tensor | None]:
    """The forward stage; see ``stages.fwd``."""
    line = line_of(c)
    placed = inputs(c, line)
    w = taps(c)
    bias = None if c.bias is None else c.bias.to(wide(c))
    computed = torch.empty_like(placed)
    for r, end in blocks(placed, line.W):
        z = pre_activation(placed, w, bias, r, end)
        if c.silu:
            z.div_(one_plus_exp(z))
        computed[r:end] = z
    y = line.tokens(computed)
    if c.residual is not None:
        residual = c.residual.to(y.dtype)
        y = y + (residual if line.covered is None else torch.where(line.covered, residual, 0.0))
    ht = line.ends(placed).to(c.x.dtype).contiguous() if c.output_final_state else None
    return y.to(c.x.dtype).contiguous(), ht

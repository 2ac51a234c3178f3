"""Short convolution backward in torch, on the line of the forward (see ``line.py``).

    dz_t = dy_t act'(z_t)                         act' = 1 or s (1 + z (1 - s)), s = sigmoid(z)
    dx_t = sum_{j<W} w_j dz_{t+j}  (+ dht)        of every row: tokens give dx, history rows dh0
    dw_j = sum_t dz_t x_{t-j}      db = sum_t dz_t

w_j = weight[:, W-1-j]; dht[:, i] belongs to row L-W+i of a sequence, or of its history where it is shorter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_fun.cconv._kernels.eager.line import (
    Line,
    blocks,
    inputs,
    line_of,
    one_plus_exp,
    pre_activation,
    taps,
    wide,
)
from kernel_fun.cconv.stages import Gradients

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Call


def bwd(c: Call, dy: Tensor, dht: Tensor | None, wants_dw: bool) -> Gradients:
    """The backward stage; see ``stages.bwd``."""
    line = line_of(c)
    placed = inputs(c, line)
    w = taps(c)
    dz = _grad_pre_activation(c, line, placed, w, dy)
    dline = torch.zeros_like(placed)
    dweight = dbias = None
    if wants_dw:
        dweight, dbias = _grad_parameters(c, line, placed, dz)
    for r, end in blocks(placed, 1):
        d = torch.mul(dz[r:end], w[0], out=dline[r:end])
        for j in range(1, line.W):
            d.addcmul_(dz[r + j : end + j], w[j])
    if dht is not None:
        line.add_to_ends(dht, dline)
    dh0 = None
    if c.initial_state is not None:
        dh0 = line.history(dline).to(c.initial_state.dtype).contiguous()
    return Gradients(line.tokens(dline).to(c.x.dtype).contiguous(), dweight, dbias, dh0)


def _grad_pre_activation(c: Call, line: Line, placed: Tensor, w: tuple[Tensor, ...], dy: Tensor) -> Tensor:
    """dz on the line with W - 1 more rows of zeros below, [L + W - 1, D]: zero wherever no token stands."""
    dz = placed.new_zeros(line.length + line.W - 1, placed.shape[1])
    on_line = dz[: line.length]
    line.place(dy, on_line)
    if not c.silu:
        return dz
    bias = None if c.bias is None else c.bias.to(wide(c))
    for r, end in blocks(placed, line.W):
        z = pre_activation(placed, w, bias, r, end)
        s = one_plus_exp(z).reciprocal_()
        slope = (1.0 - s).mul_(z).add_(1.0).mul_(s)
        dz[r:end].mul_(slope)
    line.clear_history(on_line)  # a slope there is of inputs of two sequences, and 0 times it need not be 0
    return dz


def _grad_parameters(c: Call, line: Line, placed: Tensor, dz: Tensor) -> tuple[Tensor, Tensor | None]:
    """Sums over the tokens, each in one order: over the blocks of rows, then over the rows of a block."""
    W, D = line.W, placed.shape[1]
    spans = list(blocks(placed, W))
    rows = max((end - r for r, end in spans), default=0)
    sums = placed.new_zeros(W + 1, rows, D)
    for r, end in spans:
        given = dz[r:end]
        for j in range(W):
            sums[W - 1 - j, : end - r].addcmul_(given, placed[r - j : end - j])
        if c.bias is not None:
            sums[W, : end - r].add_(given)
    total = sums.sum(1)
    return total[:W].mT.to(c.weight.dtype).contiguous(), None if c.bias is None else total[W].to(c.bias.dtype)

"""One token per sequence in torch.

state' = (state[:, 1:], x)                        shifted in place, in the state's dtype
y      = act(bias + sum_i weight[:, i] state'[:, i]) + residual
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Step


def update(s: Step) -> Tensor:
    """The decoding stage; see ``stages.update``. The newest input enters y as given, before rounding."""
    wide = torch.float64 if s.x.dtype == torch.float64 else torch.float32
    x, weight = s.x.to(wide), s.weight.to(wide)
    kept = s.cache[:, :, 1:].clone()
    y = (kept.to(wide) * weight[:, :-1]).sum(-1) + x * weight[:, -1]
    if s.bias is not None:
        y = y + s.bias.to(wide)
    if s.silu:
        y = y * torch.sigmoid(y)
    if s.residual is not None:
        y = y + s.residual.to(wide)
    s.cache[:, :, :-1] = kept
    s.cache[:, :, -1] = s.x
    return y.to(s.x.dtype)

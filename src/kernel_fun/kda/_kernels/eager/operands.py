"""What every stage rebuilds from the caller's tensors for a tile of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_fun.kda._kernels.eager import gates
from kernel_fun.kda._kernels.eager.layout import Index, Layout

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call


def flat(x: Tensor) -> Tensor:
    """``[n, HV, BT, D]`` as ``[X, BT, D]``."""
    return x.flatten(0, 1)


def spread(x: Tensor, G: int) -> Tensor:
    """Give every value head its query/key head: ``[n, H, ...]`` to ``[n, HV, ...]``."""
    return x if G == 1 else x.repeat_interleave(G, 1)


def vector(lay: Layout, x: Tensor, chunks: Index, dtype: torch.dtype) -> Tensor:
    """A tile ``[n, heads, BT, 1]`` of ``x [B, T, heads]``."""
    return lay.load(x.unsqueeze(-1), chunks, dtype)


def normalised(lay: Layout, x: Tensor, r: Tensor | None, chunks: Index, G: int, dtype: torch.dtype) -> Tensor:
    """q or k of a tile, times its reciprocal norm, one per value head: ``[X, BT, K]``."""
    tile = lay.load(x, chunks, dtype)
    if r is not None:
        tile.mul_(vector(lay, r, chunks, dtype))
    return flat(spread(tile, G))


def decays(lay: Layout, call: Call, chunks: Index, dtype: torch.dtype) -> Tensor:
    """Per-token decay a = exp(l) of a tile, ``[X, BT, K]``; 1 past a sequence's end."""
    a = gates.gate_fwd(lay.load(call.g, chunks, dtype), call).exp()
    if not lay.full:
        a.masked_fill_(lay.padding(chunks), 1.0)
    return flat(a)


def betas(lay: Layout, call: Call, chunks: Index, dtype: torch.dtype) -> Tensor:
    """Activated beta of a tile, ``[X, BT, 1]``; 0 past a sequence's end."""
    b = gates.beta_fwd(vector(lay, call.beta, chunks, dtype), call.beta_mode)
    if not lay.full:
        b = b.masked_fill(lay.padding(chunks), 0.0)
    return flat(b)

"""The oracle: one sequence at a time, in torch that autograd can differentiate, in the dtype of x."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Arguments and returns of :func:`kernel_fun.cconv.causal_conv1d`; give it float64 for the truth."""
    B, T, _ = x.shape
    W = weight.shape[1]
    if cu_seqlens is None:
        spans = [(b, 0, T) for b in range(B)]
    else:
        bounds = cu_seqlens.tolist()
        spans = [(0, first, last) for first, last in zip(bounds[:-1], bounds[1:])]
    rows: list[Tensor] = []
    states: list[Tensor] = []
    for n, (b, first, last) in enumerate(spans):
        own = x[b, first:last]  # [L, D]
        history = own.new_zeros(W, own.shape[1]) if initial_state is None else initial_state[n].to(x.dtype).T
        line = torch.cat((history, own))  # [W + L, D]
        windows = line.unfold(0, W, 1)[1:]  # [L, D, W]: the W inputs up to each token
        z = (windows * weight.to(x.dtype)).sum(-1)
        if bias is not None:
            z = z + bias.to(x.dtype)
        y = torch.nn.functional.silu(z) if activation is not None else z
        if residual is not None:
            y = y + residual[b, first:last].to(x.dtype)
        rows.append(y)
        states.append(line[-W:].T)
    if cu_seqlens is None:
        y = torch.stack(rows) if rows else torch.zeros_like(x)
    else:
        covered = sum(last - first for _, first, last in spans)
        y = torch.cat((*rows, x.new_zeros(T - covered, x.shape[2])))[None]
    if not output_final_state:
        return y, None
    return y, torch.stack(states) if states else x.new_zeros(0, x.shape[2], W)

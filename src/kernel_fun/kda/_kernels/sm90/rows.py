"""Tensors [B, T, ...] as the rows of tokens that kernels read: how is planned from facts, addresses are looked at.

A kernel that sees all tokens of a batch in one dimension takes a view where they are equally spaced, and a copy
where they are not, or where TMA, which counts in 16 bytes, cannot address the view.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda._kernels.sm90.chunk_inputs import Facts

TMA_BYTES = 16
"""What TMA wants bases and strides to be multiples of."""


class Rows(NamedTuple):
    """[tokens, ...] of a tensor [B, T, ...]."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """Of the view; None where only a copy will do."""
    align: int
    """Bytes the base of a view is a multiple of."""


def tma_rows(x: Facts) -> Rows:
    """[B, T, heads, D] as [tokens, heads, D] for TMA."""
    shape, strides, dtype = x
    (B, T, heads, D), step = shape, TMA_BYTES // dtype.itemsize
    # the stride of a size 1 says nothing, and may be none that TMA takes
    token = heads * D if B * T == 1 else _token_stride(shape, strides)
    head = D if heads == 1 else strides[2]
    fits = token is not None and strides[3] == 1 and not (token % step or head % step)
    return Rows((B * T, heads, D), (token, head, 1) if fits and token is not None else None, TMA_BYTES)


def packed_rows(x: Facts) -> Rows:
    """[B, T, heads] as contiguous [tokens, heads]."""
    shape, strides, _ = x
    B, T, heads = shape
    fits = (B * T == 1 or _token_stride(shape, strides) == heads) and (heads == 1 or strides[2] == 1)
    return Rows((B * T, heads), (heads, 1) if fits else None, 1)


def _token_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Elements between neighbouring tokens, None where they are not equally spaced."""
    (B, T), (batch, token) = shape[:2], strides[:2]
    if T == 1:
        return batch
    return token if B == 1 or batch == T * token else None


def flattened(x: Tensor, rows: Rows) -> Tensor:
    """A tensor with the facts that ``rows`` was planned from, as these rows, outside any graph."""
    shape, strides, align = rows
    if x.requires_grad:
        x = x.detach()
    if strides is not None and not x.data_ptr() % align:
        return x.as_strided(shape, strides)
    return x.new_empty(shape).copy_(x.reshape(shape))


def is_contiguous(x: Facts) -> bool:
    """What ``Tensor.is_contiguous`` says of a tensor with these facts."""
    shape, strides, _ = x
    size = 1
    for n, stride in zip(reversed(shape), reversed(strides)):
        if n != 1 and stride != size:
            return 0 in shape
        size *= n
    return True


def uninitialised(like: Tensor) -> Tensor:
    """Contiguous memory of a tensor's shape and dtype."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def zeros(like: Tensor) -> Tensor:
    """Contiguous zeros of a tensor's shape and dtype."""
    return torch.zeros_like(like, memory_format=torch.contiguous_format)

"""Tensors [B, T, ...] as the rows of tokens that kernels read: how is planned from facts, addresses are looked at.

A kernel that counts the tokens of a batch through sees them as one row of the batch, [1, B T, ...]. That is the
tensor itself where B is 1; else a view where tokens are equally spaced, and a copy where they are not, or where
TMA, which counts in 16 bytes, cannot address the view.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda._kernels.sm90.chunk_inputs import Facts

TMA_BYTES = 16
"""What TMA wants bases and strides to be multiples of."""

LAUNCHES_TAKE_LEAVES = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
"""Whether a launch takes a tensor that requires a gradient: torch's exchange in C hands it over, Python's
``__dlpack__``, which serves where a torch has no other, refuses it."""


class Rows(NamedTuple):
    """[1, tokens, ...] of a tensor [B, T, ...]."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """Of the view; None where only a copy will do."""
    align: int
    """Bytes the base of a view is a multiple of."""
    as_given: bool
    """The view is the tensor itself."""


def tma_rows(x: Facts) -> Rows:
    """[B, T, heads, D] as [1, tokens, heads, D] for TMA."""
    shape, strides, dtype = x
    (B, T, heads, D), step = shape, TMA_BYTES // dtype.itemsize
    # the stride of a size 1 says nothing, and may be none that TMA takes
    token = heads * D if B * T == 1 else _token_stride(shape, strides)
    head = D if heads == 1 else strides[2]
    if token is None or strides[3] != 1 or token % step or head % step:
        return Rows((1, B * T, heads, D), None, TMA_BYTES, False)
    as_given = B == 1 and strides[1:] == (token, head, 1) and not strides[0] % step
    return Rows((1, B * T, heads, D), (B * T * token, token, head, 1), TMA_BYTES, as_given)


def packed_rows(x: Facts) -> Rows:
    """[B, T, heads] as contiguous [1, tokens, heads]."""
    shape, strides, _ = x
    B, T, heads = shape
    fits = (B * T == 1 or _token_stride(shape, strides) == heads) and (heads == 1 or strides[2] == 1)
    as_given = fits and B == 1 and strides[1:] == (heads, 1)
    return Rows((1, B * T, heads), (B * T * heads, heads, 1) if fits else None, 1, as_given)


def _token_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Elements between neighbouring tokens, None where they are not equally spaced."""
    (B, T), (batch, token) = shape[:2], strides[:2]
    if T == 1:
        return batch
    return token if B == 1 or batch == T * token else None


def flattened(x: Tensor, rows: Rows) -> Tensor:
    """A tensor with the facts that ``rows`` was planned from, as these rows, for a launch."""
    shape, strides, align, as_given = rows
    if x.requires_grad and not LAUNCHES_TAKE_LEAVES:
        x = x.detach()
    if strides is None or x.data_ptr() % align:
        return x.new_empty(shape).copy_(x.detach().reshape(shape))
    return x if as_given else x.as_strided(shape, strides)


def flat(x: Tensor) -> Tensor:
    """Contiguous [B, T, ...] as [1, tokens, ...]."""
    return x if x.shape[0] == 1 else x.view(1, -1, *x.shape[2:])


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

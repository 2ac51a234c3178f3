"""Host-side verbs of a Triton launch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, overload

import torch

if TYPE_CHECKING:
    from torch import Tensor


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU current; nothing where it is, nor on a CPU."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


_NOTHING = contextlib.nullcontext()


def strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """The strides of a tensor, zeros for one that is absent."""
    return (0,) * dims if tensor is None else tensor.stride()


@overload
def channels_last(tensor: Tensor) -> Tensor: ...
@overload
def channels_last(tensor: None) -> None: ...
@overload
def channels_last(tensor: Tensor | None) -> Tensor | None: ...
def channels_last(tensor: Tensor | None) -> Tensor | None:
    """The tensor with its last dimension contiguous: itself, or a contiguous copy."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()

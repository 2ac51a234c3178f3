"""Argument checks every family words the same way: the argument, what is expected, what was given.

A shape is a string of letters, ``"B T HV K"``; the first tensor that carries a letter binds it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


FLOAT32_MAX = 3.4028234663852886e38


class ContractError(ValueError, AssertionError):
    """A shape or value outside the contract. Also an AssertionError: fla raises some of these so."""


class ContractTypeError(TypeError, AssertionError):
    """A dtype or type outside the contract. Also an AssertionError: fla raises some of these so."""


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def is_tensor(name: str, value: Any) -> Tensor:
    import torch

    if not isinstance(value, torch.Tensor):
        raise ContractTypeError(f"`{name}` must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise ContractTypeError(f"`{name}` must be a dense tensor, got layout {dtype_name(value.layout)}")
    return value


def holds_data(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ContractError(f"`{name}` must hold data, got a tensor on the meta device")


def kept(cu: Tensor | None) -> Tensor | None:
    """Boundaries for a backward to save and read: autograd then refuses it after they were changed. A copy
    where it cannot know that: of those made in inference mode, and of a view, whose version others share."""
    return cu if cu is None or not (cu.is_inference() or cu._is_view()) else cu.clone()


def no_tangents(operation: str, tensors: dict[str, Any]) -> None:
    """NotImplementedError where a tensor carries a tangent: a kernel would leave it behind without a word."""
    from torch.autograd import forward_ad

    if forward_ad._current_level < 0:  # pyright: ignore[reportPrivateUsage]
        return
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{operation} has no forward-mode derivative (jvp): `{name}` must carry no tangent, got one"
            )


def shape(name: str, tensor: Tensor, letters: str, sizes: dict[str, int], note: str = "") -> None:
    """Check a tensor against its letters, binding those not yet known."""
    words = letters.split()
    given = tuple(tensor.shape)
    if len(words) == len(given):
        for word, size in zip(words, given):
            sizes.setdefault(word, size)
    expected = tuple(sizes.get(w, -1) for w in words)
    if len(words) != len(given) or expected != given:
        sizes_known = ", ".join("?" if e < 0 else str(e) for e in expected)
        want = f" = [{sizes_known}]" if any(e >= 0 for e in expected) else ""
        raise ContractError(f"`{name}` must have shape [{', '.join(words)}]{want}, got {list(given)}{note}")


def dtype(name: str, tensor: Tensor, allowed: Iterable[Any]) -> None:
    allowed = tuple(allowed)
    if tensor.dtype not in allowed:
        want = " or ".join(dtype_name(d) for d in allowed)
        raise ContractTypeError(f"`{name}` must be {want}, got {dtype_name(tensor.dtype)}")


def same_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ContractError(
            f"`{name}` must be on the device of `{like_name}`, {like.device}, got {tensor.device}"
        )


def integer(name: str, value: Any) -> int:
    """An int, of numpy too; a bool, a float or a tensor is refused, whatever it holds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ContractTypeError(f"`{name}` must be an int, got {type(value).__name__}")
    return int(value)


def boundaries_device(cu: Tensor, like_name: str, like: Tensor) -> None:
    """cu_seqlens lies where the call does, or on the host."""
    if cu.device != like.device and cu.device.type != "cpu":
        raise ContractError(
            f"`cu_seqlens` must be on the device of `{like_name}`, {like.device}, or on the CPU, "
            f"got {cu.device}"
        )


def number(name: str, value: Any) -> float:
    """A real number that is finite in float32, as float; a bool or a tensor is refused."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ContractTypeError(f"`{name}` must be a number, got {type(value).__name__}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not abs(found) <= FLOAT32_MAX:
        raise ContractError(
            f"`{name}` must be finite in float32, got {value if found != math.inf else found}"
        )
    return found


def flag(name: str, value: Any) -> bool:
    """A switch: True or False, 1 or 0, or None for False; a word or a tensor is refused, whatever it says."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, numbers.Integral) and value in (0, 1):
        return bool(value)
    raise ContractTypeError(f"`{name}` must be True or False, got {value!r:.80}")


def boundaries(name: str, values: list[int], tokens: int) -> None:
    """cu_seqlens content: starts at 0, never decreases, ends within the tokens."""
    if values[0] != 0:
        raise ContractError(f"`{name}` must start at 0, got {values[0]}")
    for i in range(1, len(values)):
        if values[i] < values[i - 1]:
            raise ContractError(f"`{name}` must not decrease, got {values[i - 1]} then {values[i]} at {i}")
    if values[-1] > tokens:
        raise ContractError(f"`{name}` must end within the {tokens} tokens given, got {values[-1]}")

"""How an operation behaves under torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def outside_compiler(function: F) -> F:
    """Under torch.compile, run a function as it is, at a graph break. Costs nothing otherwise: unlike
    ``torch.compiler.disable``, decorating does not import the compiler."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, wrapper)


def traced_by(
    trace: Callable[[tuple[Any, ...], dict[str, Any]], tuple[bool, Any]],
    unbound: Callable[[dict[str, Any]], None],
) -> Callable[[F], F]:
    """Decorator: under torch.compile a function is what ``trace(args, kwargs)`` does.

    ``trace`` returns (True, results), or (False, anything) for a call that has to run as it is, at a graph
    break. ``unbound(kwargs)`` is told of a call that Python refuses: an argument is missing, or given twice.
    """

    def decorate(function: F) -> F:
        import torch

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                traced, results = trace(args, kwargs)
                return results if traced else torch.compiler.disable(function)(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                    unbound(kwargs)
                raise

        return cast(F, wrapper)

    return decorate


def by_name(
    parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Arguments by name; None where Python would not bind them: too many, or one given twice."""
    if len(args) > len(parameters) or any(name in kwargs for name in parameters[: len(args)]):
        return None
    return {**dict(zip(parameters, args)), **kwargs}


def owned(tensor: Tensor) -> Tensor:
    """The tensor as an operator may return it: contiguous and alone in its storage."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole and tensor.is_contiguous() else tensor.clone().contiguous()

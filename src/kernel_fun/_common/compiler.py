"""How an operation behaves under torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

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

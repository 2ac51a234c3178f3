"""Names of fla's rebound to our operations, for a fla-core whose dispatch cannot reach ``chunk_kda``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType, TracebackType
from typing import Any, cast

from kernel_fun._common import compat, config, support
from kernel_fun.fla.registration import require_fla


@dataclass
class Patch:
    """What :func:`patch` rebound. A context manager: leaving it undoes the patch.

    Patches are counted: fla's names are put back when the last one is undone, in whatever order.
    """

    bound: list[tuple[ModuleType, str, Any, Any]] = field(
        default_factory=list[tuple[ModuleType, str, Any, Any]]
    )
    """Module, name, what stood there, what stands there now."""

    @property
    def names(self) -> tuple[str, ...]:
        """``module.name`` of everything rebound."""
        return tuple(f"{module.__name__}.{name}" for module, name, _, _ in self.bound)

    def undo(self) -> None:
        """Put back what stood there, except where someone else has rebound the name since."""
        others = [patch for patch in _live if patch is not self]
        if len(others) == len(_live):
            return
        _live[:] = others
        if _live:  # the next oldest answers for what this one bound
            _live[0].bound[:0] = self.bound
            self.bound = []
        while self.bound:
            module, name, original, ours = self.bound.pop()
            if vars(module).get(name) is ours:
                setattr(module, name, original)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


_live: list[Patch] = []
"""Patches that are not undone, oldest first."""


def patch() -> Patch:
    """Rebind fla's operations to ours in every module that holds them, fla's own and the caller's.

    ``chunk_kda``, ``fused_recurrent_kda``, ``causal_conv1d`` and ``causal_conv1d_update``. Calls that only
    fla serves still reach fla (see ``kernel-fun explain``). For fla-core before 0.6; later ones have
    :func:`register`, which replaces nothing.

    Raises:
        ImportError: fla is not installed.
    """
    from kernel_fun import cconv, kda

    require_fla()
    importlib.import_module("fla.ops.kda")
    importlib.import_module("fla.modules.convolution")
    done = Patch()
    for op, ours in (
        (compat.CHUNK_KDA, kda.chunk_kda),
        (compat.FUSED_RECURRENT_KDA, kda.fused_recurrent_kda),
        (_op("causal_conv1d"), cconv.causal_conv1d),
        (_op("causal_conv1d_update"), cconv.causal_conv1d_update),
    ):
        original = compat.function_of(op)
        if original is None:
            continue
        stand_in = _stand_in(ours, original)
        for module, name in _holders(original):
            setattr(module, name, stand_in)
            done.bound.append((module, name, original, stand_in))
    _live.append(done)
    what = f"{len(done.bound)} names of fla-core {support.version_of('fla-core')}"
    support.log.info(f"kernel-fun: rebound {what}")
    return done


def _holders(function: Callable[..., Any]) -> list[tuple[ModuleType, str]]:
    """Every module that holds a function, and under which name; not ours."""
    modules = {
        id(module): module
        for key, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and key.partition(".")[0] != "kernel_fun"
    }
    return [
        (module, name)
        for module in modules.values()
        for name, value in list(vars(module).items())
        if value is function
    ]


def _op(name: str) -> compat.FlaOp:
    return compat.FlaOp("fla.modules.convolution", name, ())


def _stand_in(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Ours under fla's name; delegation finds the original on it."""

    @wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if config.FLA.on() else original)(*args, **kwargs)

    setattr(call, compat.ORIGINAL, original)
    return cast("Callable[..., Any]", call)

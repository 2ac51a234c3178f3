"""Launching prebuilt kernels where the compiler is not installed.

A kernel's module holds the code the compiler traces beside the launcher that needs none of it, and imports
cutlass for the former. Where cutlass is absent and ``KERNEL_FUN_KERNELS`` names prebuilt kernels, such modules are
imported with stand-ins under the names they take from cutlass. A stand-in decorates a function to itself and
can do nothing else. Once the modules are imported, cutlass is as absent as before for everybody.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from kernel_fun._common import config, support

DSL = "cutlass"


class StandIn(ModuleType):
    """A name of cutlass where cutlass is absent."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        alone = len(args) == 1 and not kwargs
        return args[0] if alone and isinstance(args[0], FunctionType) else self

    def __getitem__(self, key: Any) -> StandIn:
        return self

    def __or__(self, other: Any) -> StandIn:
        return self

    __ror__ = __or__


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        inside = fullname.partition(".")[0] == DSL
        return ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module  # it makes its names as they are asked for


def wanted() -> bool:
    """Are there prebuilt kernels, and no compiler?"""
    return bool(config.KERNELS.read()) and not support.module_found(DSL)


def prepare(*modules: str) -> None:
    """Import modules that name cutlass, if they can do without it here."""
    if wanted():
        with _standing_in():
            for name in modules:
                importlib.import_module(name)


@contextmanager
def _standing_in() -> Generator[None]:
    def ours(name: str) -> bool:
        return name.partition(".")[0] == DSL

    before = {name: module for name, module in sys.modules.items() if ours(name)}
    for name in before:
        del sys.modules[name]
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)

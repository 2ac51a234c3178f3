"""kernel-fun: fast linear-attention training kernels with the interfaces their users already call.

``import kernel_fun`` loads no framework; each family loads torch when it is imported, or first named as an
attribute of this package (``kernel_fun.kda``).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "versions", "warmup"]


_MODULES = ("cconv", "fla", "kda", "testing", "transformers", "warming")


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


def versions() -> dict[str, str | None]:
    """Installed versions of kernel-fun, Python and every package a backend can use.

    Read from distribution metadata: nothing is imported. ``None`` means not installed.
    """
    from kernel_fun._common.support import installed_versions

    return installed_versions()


def warmup(target: Any, **settings: Any) -> Any:
    """:func:`kernel_fun.warming.warmup`: make every kernel of a model, or of a list of problems
    (``kernel_fun.kda.call.Problem``, ``kernel_fun.cconv.call.Problem``), ready."""
    return importlib.import_module("kernel_fun.warming").warmup(target, **settings)

"""kernel-fun: fast linear-attention training kernels with the interfaces their users already call.

``import kernel_fun`` loads no framework; each family loads torch when it is imported.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "versions", "warmup"]


def versions() -> dict[str, str | None]:
    """Installed versions of kernel-fun, Python and every package a backend can use.

    Read from distribution metadata: nothing is imported. ``None`` means not installed.
    """
    from kernel_fun._common.support import installed_versions

    return installed_versions()


def warmup(target: Any, **settings: Any) -> Any:
    """:func:`kernel_fun.warming.warmup`: make every kernel of a model, or of a list of problems, ready."""
    import importlib

    return importlib.import_module("kernel_fun.warming").warmup(target, **settings)

"""kernel-fun: fast linear-attention training kernels with the interfaces their users already call.

``import kernel_fun`` loads no framework; each family loads torch when it is imported.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__", "versions"]


def versions() -> dict[str, str | None]:
    """Installed versions of kernel-fun, Python and every package a backend can use.

    Read from distribution metadata: nothing is imported. ``None`` means not installed.
    """
    from kernel_fun._common.support import installed_versions

    return installed_versions()

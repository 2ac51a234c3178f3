"""What is installed, and saying a thing once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import platform
import threading
from functools import cache

from kernel_fun._common import config

log = logging.getLogger("kernel_fun")

# What a backend needs, by the name used in dispatch tables: modules that must be importable.
NEEDS: dict[str, tuple[str, ...]] = {
    "cute": ("cutlass", "tvm_ffi"),
    "triton": ("triton",),
    "fla": ("fla", "triton"),
}
EXTRA = {"cute": "cute", "triton": "triton", "fla": "fla"}

_DISTRIBUTIONS = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "fla-core",
    "transformers",
    "rich",
    "matplotlib",
)


@cache
def module_found(name: str) -> bool:
    """Is a top-level module importable? Asked of the path once per process, never imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def missing(need: str) -> str | None:
    """Reason a need is unmet, or None. Prebuilt kernels need no compiler."""
    absent = [m for m in NEEDS[need] if not module_found(m)]
    if absent and need == "cute" and config.KERNELS.read():
        absent = [m for m in absent if m != "cutlass"]
    if not absent:
        return None
    return f"{', '.join(absent)} not installed (pip install 'kernel-fun[{EXTRA[need]}]')"


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str | None]:
    import kernel_fun

    found: dict[str, str | None] = {
        "kernel-fun": kernel_fun.__version__,
        "python": platform.python_version(),
    }
    found.update({name: version_of(name) for name in _DISTRIBUTIONS})
    return found


_said: set[object] = set()
_lock = threading.Lock()


def log_once(key: object, level: int, message: str) -> None:
    """Log a message the first time its key is seen in this process."""
    if key in _said:
        return
    with _lock:
        if key in _said:
            return
        _said.add(key)
    log.log(level, message)


@cache
def warn_of_unknown_switches() -> None:
    """Once per process: a warning for every variable that is named like a switch and is none."""
    for sentence in config.unknown():
        log.warning("kernel-fun: %s", sentence)


def forget_logged() -> None:
    """Let every ``log_once`` message be said again (tests, a reconfigured logger)."""
    with _lock:
        _said.clear()

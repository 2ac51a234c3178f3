"""Compiled kernels on disk.

One file per kernel, ``<digest>-<sha256 of its bytes>.o``. The digest covers everything the machine code
depends on; the sha256 is checked before a file is loaded, and a file that does not match its own name is
deleted. A file appears by rename, so that any number of processes may race and any of them may die.

A cache entry is code that will run, so the directory must be the user's own, closed to everyone else;
otherwise it is refused with the reason, and kernels are compiled without it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import secrets
import stat
import time
from functools import cache
from pathlib import Path

from kernel_fun._common.config import CACHE_DIR

FORMAT = 1
SUFFIX = ".o"
TEMPORARY = ".tmp-"
STALE_SECONDS = 3600.0
"""Age at which an unfinished file of a process that died is removed."""

DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
HOST_ONLY = frozenset(
    {
        "kernel_fun._common.cache",
        "kernel_fun._cute.absent",
        "kernel_fun._cute.inspect",
        "kernel_fun._cute.objects",
        "kernel_fun._cute.varlen",
        "kernel_fun.kda._kernels.sm90.rows",
    }
)
"""Modules a kernel module imports that leave no trace in its machine code."""


class CacheRefused(OSError):
    """The cache directory cannot be trusted or used; the message says why."""


def directory() -> Path:
    """The cache directory, created with mode 0700 where it does not exist.

    ``KERNEL_FUN_CACHE_DIR``, else ``~/.cache/kernel-fun``. Raises :class:`CacheRefused` where it is not a
    directory, belongs to another user, can be written by others, or cannot be created.
    """
    path = Path(CACHE_DIR.read() or "~/.cache/kernel-fun")
    try:
        path = path.expanduser()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise CacheRefused(f"{path}: {error.strerror or error}") from error
    except RuntimeError as error:  # of a user without a home
        raise CacheRefused(f"{path}: {error}; name a directory by {CACHE_DIR.name}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise CacheRefused(f"{path} is not a directory")
    if status.st_uid != os.geteuid():
        raise CacheRefused(
            f"{path} belongs to uid {status.st_uid} and must belong to uid {os.geteuid()} of this process: "
            f"chown {os.geteuid()} {path}, or name another by {CACHE_DIR.name}"
        )
    if status.st_mode & 0o022:
        raise CacheRefused(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so that others can write it: "
            f"chmod 700 {path}"
        )
    return path


def load(digest: str) -> tuple[Path, bytes] | None:
    """The entry of a digest and its bytes, or None. Damaged entries are deleted on the way."""
    for path in sorted(directory().glob(f"{digest}-*{SUFFIX}")):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if path.name == _file_name(digest, content):
            return path, content
        path.unlink(missing_ok=True)
    return None


def store(digest: str, content: bytes) -> Path:
    """Write an entry so that it is seen whole or not at all; returns its path."""
    folder = directory()
    _sweep(folder)
    path = folder / _file_name(digest, content)
    unfinished = folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise CacheRefused(f"{path}: {error.strerror or error}") from error
    return path


def digest_of(module: str, config: object, arch: str, options: str) -> str:
    """Hex digest of all a compiled kernel depends on.

    ``module``: dotted name of the kernel's module, whose source counts together with that of every module
    of ``_cute`` and ``_kernels`` it imports. ``config``: a frozen dataclass of plain values.
    """
    facts = {
        "format": FORMAT,
        "module": module,
        "config": repr(config),
        "arch": arch,
        "options": options,
        "sources": sources(module),
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]


@cache
def _versions() -> dict[str, str]:
    """Read once per process, as the sources are."""
    found: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def versions() -> dict[str, str]:
    """Installed distributions that shape the machine code or the way it is called."""
    return dict(_versions())


@cache
def sources(module: str) -> dict[str, str]:
    """sha256 of the source of a kernel module and of each module it is traced from, by dotted name.

    Read once per process: the code that runs is the code that was imported.
    """
    found: dict[str, str] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        source = _source(name)
        if source is not None:
            found[name], imported = source
            pending += imported
    if module not in found:
        raise ValueError(f"`module` must name a module with a source file, got {module!r}")
    return dict(sorted(found.items()))


@cache
def _source(name: str) -> tuple[str, list[str]] | None:
    """sha256 of a module's source, and the traced modules it imports; None if it has no source file."""
    path = _source_path(name)
    if path is None:
        return None
    text = path.read_bytes()
    return hashlib.sha256(text).hexdigest(), [
        m for m in _imported(ast.parse(text), name, path) if _is_traced(m)
    ]


def _is_traced(name: str) -> bool:
    inside = name.startswith("kernel_fun._cute.") or (name.startswith("kernel_fun.") and "._kernels." in name)
    return inside and name not in HOST_ONLY


def _source_path(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def _imported(tree: ast.AST, name: str, path: Path) -> list[str]:
    """Dotted names an import statement anywhere in a module may refer to."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{parent}.{base}" if base else parent
            names.append(base)
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def _file_name(digest: str, content: bytes) -> str:
    return f"{digest}-{hashlib.sha256(content).hexdigest()}{SUFFIX}"


def _sweep(folder: Path) -> None:
    """Remove what processes that died in the middle of a write have left behind."""
    oldest = time.time() - STALE_SECONDS
    for path in folder.glob(f"{TEMPORARY}*"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except OSError:
            continue

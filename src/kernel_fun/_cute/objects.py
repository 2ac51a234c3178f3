"""Kernels built ahead of time: a directory that `kernel-fun compile` writes and ``KERNEL_FUN_KERNELS`` names.

``manifest.json`` says of each kernel its module and config, the sha256 of every source it was traced from, the
versions of the compiler, and the file that holds it: a shared library, linked here, which needs no compiler
to be loaded, only apache-tvm-ffi and the runtime library of nvidia-cutlass-dsl. Where the variable is set
nothing is compiled: a kernel that is not there, or was built from other sources, is refused.

Nothing here leaves a trace in machine code.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernel_fun._common import cache, config

FORMAT = 1
MANIFEST = "manifest.json"
RUNTIME = "libcute_dsl_runtime.so"

Launch = Callable[..., None]


class ObjectsRefused(RuntimeError):
    """The directory of prebuilt kernels cannot serve a kernel; the message says why and what to do."""


@dataclass(frozen=True)
class Kernel:
    """One kernel that a process got ready, and how."""

    module: str
    config: str
    how: str
    """``compiled``, ``from the cache`` or ``prebuilt``."""
    seconds: float

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]


def refuse_under_capture(module: str, kernel_config: object) -> None:
    """RuntimeError where a CUDA graph is being captured: a kernel that is not ready yet cannot enter one."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{module.rpartition('.')[2]} for {kernel_config!r} is cold and a CUDA graph is being captured: "
            "run the same call once before capturing it, or kernel_fun.warmup"
        )


_ready: list[Kernel] = []


def note(module: str, kernel_config: object, how: str, seconds: float) -> None:
    """Remember that a kernel was made ready."""
    _ready.append(Kernel(module, repr(kernel_config), how, seconds))


def ready() -> tuple[Kernel, ...]:
    """Every kernel this process has made ready, in order."""
    return tuple(_ready)


@contextmanager
def rehearsal(seen: dict[tuple[str, str], tuple[Any, Any]]) -> Generator[None]:
    """Within the block a launch launches nothing: ``seen`` collects (jit, config) of each kernel asked for."""
    from kernel_fun._cute.compile import Jit

    def asked(self: Any, kernel_config: Any) -> Launch:
        seen[self.module, repr(kernel_config)] = (self, kernel_config)
        return lambda *tensors: None

    launch = Jit.__call__
    Jit.__call__ = asked  # the launchers hold their Jit; none of them is asked to know of rehearsals
    try:
        yield
    finally:
        Jit.__call__ = launch


def write(folder: Path, kernels: Sequence[tuple[Any, Any]], arch: str) -> dict[str, Any]:
    """Build kernels, given as (jit, config), into a directory; returns its manifest. Kernels of other configs
    that are there already stay.

    Raises:
        RuntimeError: there is no linker.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    kept = _manifest(folder) if (folder / MANIFEST).exists() else {"kernels": []}
    entries: list[dict[str, Any]] = []
    for jit, kernel_config in kernels:
        digest = jit.digest(kernel_config)
        library = folder / f"{digest}.so"
        _link(jit.object(kernel_config), library)
        entries.append(
            {
                "module": jit.module,
                "config": repr(kernel_config),
                "options": jit.options,
                "symbol": jit.symbol(kernel_config),
                "file": library.name,
                "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
                "sources": cache.sources(jit.module),
                "versions": cache.versions(),
                "arch": arch,
            }
        )
    built = {(e["module"], e["config"], e["options"]) for e in entries}
    others = [e for e in kept["kernels"] if (e["module"], e["config"], e["options"]) not in built]
    manifest = {"format": FORMAT, "kernels": [*others, *entries]}
    path = folder / MANIFEST
    unfinished = path.with_suffix(f".tmp-{os.getpid()}")
    unfinished.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return manifest


def load(module: str, kernel_config: object, options: str) -> Launch | None:
    """The prebuilt kernel of a config; None where ``KERNEL_FUN_KERNELS`` is not set.

    Raises:
        ObjectsRefused: it is set and has no such kernel, or one that does not match what is installed.
    """
    folder = _folder()
    if folder is None:
        return None
    entry = _entry(folder, module, kernel_config, options)
    return _loaded(_library(folder, entry), entry["symbol"])


def refusal(module: str, kernel_config: object, options: str) -> str | None:
    """Why ``KERNEL_FUN_KERNELS``, which is set, does not serve a config, or None; nothing is loaded."""
    folder = _folder()
    assert folder is not None
    try:
        _library(folder, _entry(folder, module, kernel_config, options))
    except ObjectsRefused as refused:
        return str(refused)
    return None


@dataclass(frozen=True)
class Holding:
    """What the directory of prebuilt kernels holds."""

    folder: str
    kernels: int
    usable: int
    """Of them, those that match what is installed."""
    reason: str | None
    """Why the directory, or the first of the others, is refused."""


def holding() -> Holding | None:
    """What ``KERNEL_FUN_KERNELS`` holds; None where it is not set."""
    folder = _folder()
    if folder is None:
        return None
    try:
        entries = _manifest(folder)["kernels"]
    except ObjectsRefused as refused:
        return Holding(str(folder), 0, 0, str(refused))
    reasons: list[str] = []
    for entry in entries:
        try:
            _match(folder, entry)
            _library(folder, entry)
        except ObjectsRefused as refused:
            reasons.append(str(refused))
    return Holding(str(folder), len(entries), len(entries) - len(reasons), next(iter(reasons), None))


def _folder() -> Path | None:
    place = config.KERNELS.read()
    return Path(place).expanduser() if place else None


def _entry(folder: Path, module: str, kernel_config: object, options: str) -> dict[str, Any]:
    """The entry of a config in the manifest, if it matches what is installed."""
    name, wanted = module.rpartition(".")[2], repr(kernel_config)
    key = (module, wanted, options)
    for entry in _manifest(folder)["kernels"]:
        if (entry["module"], entry["config"], entry["options"]) == key:
            _match(folder, entry)
            return entry
    raise _refused(folder, f"has no kernel {name} for {wanted}: build it with `kernel-fun compile`")


def _match(folder: Path, entry: dict[str, Any]) -> None:
    """ObjectsRefused where an entry was built from other sources or by another compiler."""
    name = entry["module"].rpartition(".")[2]
    now = cache.sources(entry["module"])
    changed = sorted(n for n in {*now, *entry["sources"]} if now.get(n) != entry["sources"].get(n))
    if changed:
        raise _refused(
            folder, f"holds {name} built from other sources of {', '.join(changed)}: build it again"
        )
    for package, version in cache.versions().items():
        built = entry["versions"].get(package)
        if built != version:
            raise _refused(
                folder, f"was built with {package} {built}, installed is {version}: build it again"
            )


def _library(folder: Path, entry: dict[str, Any]) -> Path:
    """The file of an entry, as it was built."""
    path = folder / entry["file"]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _refused(
            folder, f"has no readable {path.name} ({error.strerror or error}): build it again"
        ) from error
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise _refused(folder, f"holds a damaged {path.name}: build it again")
    return path


def _refused(folder: Path, why: str) -> ObjectsRefused:
    return ObjectsRefused(f"{config.KERNELS.name}={folder} {why}, or unset the variable")


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a directory that nobody else can write: what it names is code that will run."""
    path = folder / MANIFEST
    try:
        status, owner = folder.stat(), path.stat()
    except OSError as error:
        what = f"{MANIFEST} in it" if folder.is_dir() else "it"
        why = f"is no directory of prebuilt kernels: {what} cannot be read ({error.strerror or error}); build one"
        raise _refused(folder, f"{why} with `kernel-fun compile`") from error
    for found in (status, owner):
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
            raise _refused(
                folder,
                f"belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}, others can write it",
            )
    manifest = _parsed(path, owner.st_mtime_ns)
    if manifest.get("format") != FORMAT:
        raise _refused(
            folder, f"has format {manifest.get('format')}, this version reads {FORMAT}: build it again"
        )
    return manifest


@lru_cache(maxsize=4)
def _parsed(path: Path, _changed: int) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _refused(path.parent, f"has a damaged {MANIFEST} ({error}): build it again") from error


def _link(content: bytes, library: Path) -> None:
    """A relocatable object as a shared library, by the system's linker."""
    linker = next((found for name in ("ld", "ld.lld", "gold") if (found := shutil.which(name))), None)
    if linker is None:
        raise RuntimeError("no linker (ld) on this machine: kernels are linked where they are compiled")
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".tmp-") as work:
        source, made = Path(work) / "kernel.o", Path(work) / "kernel.so"
        source.write_bytes(content)
        command = [linker, "-shared", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
        made.replace(library)


def _loaded(library: Path, symbol: str) -> Launch:
    import tvm_ffi

    _runtime(library.parent)
    module: Any = tvm_ffi.load_module(str(library))
    return getattr(module, symbol)


@lru_cache(maxsize=1)
def _runtime(folder: Path) -> Any:
    """The runtime library that kernels call: beside them, or as installed, found without importing the compiler
    it is shipped with."""
    import torch

    major = (torch.version.cuda or "13").partition(".")[0]
    variants = dict.fromkeys((f"cu{major}", "cu13", "cu12"))
    installed = [Path(p) / "nvidia_cutlass_dsl" / v / "lib" for v in variants for p in sys.path]
    for place in (folder, *installed):
        path = place / RUNTIME
        if path.exists():
            return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    raise ObjectsRefused(
        f"{config.KERNELS.name} is set and {RUNTIME} is not installed (pip install nvidia-cutlass-dsl-libs-cu{major})"
    )

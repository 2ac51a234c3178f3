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
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernel_fun._common import cache, config, support

FORMAT = 1
MANIFEST = "manifest.json"
LOCK = ".lock"
FIELDS = {
    **dict.fromkeys(("module", "config", "options", "symbol", "file", "sha256"), str),
    "sources": dict,
    "versions": dict,
}
"""What an entry of the manifest says of its kernel."""
RUNTIME = "libcute_dsl_runtime.so"

Launch = Callable[..., None]


class ObjectsRefused(RuntimeError):
    """A directory of prebuilt kernels cannot serve a kernel, or take one; the message says why and what to do."""


class _Unusable(Exception):
    """What a directory or its manifest is, that nothing can be loaded from it or added to it."""


class _Unreadable(_Unusable):
    """The manifest is this user's own and holds nothing that this version can read."""


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


def prepare(folder: Path) -> None:
    """Make a directory that kernels can be built into, closed to other writers whatever the umask.

    Raises:
        ObjectsRefused: it cannot be made, or is there and not fit: others can write it, it is no directory, it
            cannot be locked.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o755)
            folder.chmod(0o755)  # a umask only takes away
    except OSError as error:
        why = f"{error.filename} cannot be made a directory ({error.strerror or error})"
        raise ObjectsRefused(f"no kernels can be built into {folder}: {why}") from error
    with _locked(folder):
        _kept(folder)


def write(folder: Path, kernels: Sequence[tuple[Any, Any]], arch: str) -> dict[str, Any]:
    """Build kernels, given as (jit, config), into a directory; returns its manifest. Kernels of other configs
    that are there already stay; a manifest that cannot be read is replaced. Any number of processes may write.

    Raises:
        ObjectsRefused: the directory is not fit (see :func:`prepare`), or there is no linker.
    """
    prepare(folder)
    built = [(jit, kernel_config, jit.object(kernel_config)) for jit, kernel_config in kernels]
    with _locked(folder):
        entries: list[dict[str, Any]] = []
        for jit, kernel_config, content in built:
            library = folder / f"{jit.digest(kernel_config)}.so"
            _link(content, library)
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
        own = {_key(e) for e in entries}
        manifest = {
            "format": FORMAT,
            "kernels": [*(e for e in _kept(folder) if _key(e) not in own), *entries],
        }
        path = folder / MANIFEST
        unfinished = path.with_suffix(f".tmp-{os.getpid()}")
        unfinished.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        unfinished.chmod(0o644)
        unfinished.replace(path)
    return manifest


def _key(entry: dict[str, Any]) -> tuple[str, str, str]:
    return entry["module"], entry["config"], entry["options"]


def _kept(folder: Path) -> list[dict[str, Any]]:
    """The kernels a directory holds already, as its lock's holder sees them; says where they are given up."""
    path = folder / MANIFEST
    try:
        _closed(path, path.stat())
        return _read(path)["kernels"]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _Unusable(f"{path} cannot be read ({error.strerror or error})") from error
    except _Unreadable as reason:
        message = f"kernel-fun: {folder} {reason}: it is replaced, what it named is lost"
        support.log_once(("manifest replaced", str(folder), str(reason)), logging.WARNING, message)
        return []


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Within the block no other process or thread adds kernels to a directory. ObjectsRefused where it, or
    what is found in it, is not fit."""
    descriptor = -1
    try:
        if not folder.is_dir():
            raise _Unusable(f"{folder} is not a directory")
        _closed(folder, folder.stat())
        descriptor = _lock(folder / LOCK)
        yield
    except _Unusable as reason:
        raise ObjectsRefused(f"no kernels can be built into {folder}: {reason}") from reason
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _lock(path: Path) -> int:
    """An open file that this process has locked; the lock goes with the file, however the process ends."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _Unusable(f"{path} cannot be written ({error.strerror or error})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o644)
    except OSError as error:
        os.close(descriptor)
        what = f"{path} cannot be locked ({error.strerror or error})"
        raise _Unusable(f"{what}: build on a local disk and copy the directory") from error
    return descriptor


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
    try:
        return Path(place).expanduser() if place else None
    except RuntimeError as error:  # of a user without a home
        raise ObjectsRefused(f"{config.KERNELS.name}={place} is no directory: {error}") from error


def _entry(folder: Path, module: str, kernel_config: object, options: str) -> dict[str, Any]:
    """The entry of a config in the manifest, if it matches what is installed."""
    name, wanted = module.rpartition(".")[2], repr(kernel_config)
    for entry in _manifest(folder)["kernels"]:
        if _key(entry) == (module, wanted, options):
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
        _closed(path, path.stat())
        content = path.read_bytes()
    except _Unusable as reason:
        raise _refused(folder, f"is refused: {reason}") from reason
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
        _closed(folder, folder.stat())
        status = path.stat()
        _closed(path, status)
        return _parsed(path, status.st_mtime_ns, status.st_ino)
    except OSError as error:
        what = f"{MANIFEST} in it" if folder.is_dir() else "it"
        why = f"is no directory of prebuilt kernels: {what} cannot be read ({error.strerror or error}); build one"
        raise _refused(folder, f"{why} with `kernel-fun compile`") from error
    except _Unreadable as reason:
        raise _refused(folder, f"{reason}: build it again") from reason
    except _Unusable as reason:
        raise _refused(folder, f"is refused: {reason}") from reason


def _closed(path: Path, status: os.stat_result) -> None:
    """_Unusable where somebody else owns a path or can write it: one sentence, with the remedy."""
    me = os.geteuid()
    if status.st_uid not in (me, 0):
        allowed = "root" if me == 0 else f"uid {me} of this process or to root"
        raise _Unusable(
            f"{path} belongs to uid {status.st_uid} and must belong to {allowed}: chown {me} {path}"
        )
    if status.st_mode & 0o022:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        raise _Unusable(f"{path} has mode {mode}, so that others can write it: chmod go-w {path}")


@lru_cache(maxsize=4)
def _parsed(path: Path, _changed: int, _inode: int) -> dict[str, Any]:
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    """A manifest whose every entry says what it must; _Unreadable otherwise."""
    try:
        manifest: Any = json.loads(path.read_bytes().decode("utf-8"))
    except ValueError as error:
        raise _Unreadable(f"has a damaged {path.name} ({error})") from error
    if isinstance(manifest, dict) and manifest.get("format", FORMAT) != FORMAT:
        raise _Unreadable(f"has format {manifest['format']}, this version reads {FORMAT}")
    kernels = manifest.get("kernels") if isinstance(manifest, dict) else None
    whole = isinstance(kernels, list) and "format" in manifest
    if not whole or not all(map(_names_a_kernel, kernels)):
        raise _Unreadable(f"has a damaged {path.name} (it does not list kernels as this version does)")
    return manifest


def _names_a_kernel(entry: Any) -> bool:
    """Whether an entry has every field, and its file is one of the directory itself."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(n), kind) for n, kind in FIELDS.items()):
        return False
    return entry["file"] != "" and Path(entry["file"]).name == entry["file"]


def _link(content: bytes, library: Path) -> None:
    """A relocatable object as a shared library, by the system's linker."""
    linker = next((found for name in ("ld", "ld.lld", "gold") if (found := shutil.which(name))), None)
    if linker is None:
        raise ObjectsRefused("no linker (ld) on this machine: kernels are linked where they are compiled")
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".tmp-") as work:
        source, made = Path(work) / "kernel.o", Path(work) / "kernel.so"
        source.write_bytes(content)
        command = [linker, "-shared", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ObjectsRefused(f"{' '.join(command)} failed: {' '.join(done.stderr.split())}")
        made.chmod(0o644)
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

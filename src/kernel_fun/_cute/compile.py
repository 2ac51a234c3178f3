"""From a frozen ``Config`` to a kernel that takes torch tensors.

    @jit(arch="sm_90a")
    def _compile(config: Config) -> Program:
        '''Fake tensors, one per argument of the kernel.'''
        T = symbol()
        return Program(Kernel(config), (tensor(config.io, T, 64), ...))

    _compile(Config(...))(x, ...)      # torch tensors; runs on the current stream of their device

A config is compiled once per process and, through the cache on disk, once per machine, or loaded from a
directory of prebuilt kernels (see ``objects.py``). No GPU is needed to compile; cutlass is imported at the
first compilation, not with this module.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from kernel_fun._common import cache, support
from kernel_fun._cute import objects

Configured = TypeVar("Configured")
Launch = Callable[..., None]

_lock = threading.RLock()
"""The DSL traces into process-wide state: one compilation at a time."""

DTYPES = {
    "bfloat16": "BFloat16",
    "float16": "Float16",
    "float32": "Float32",
    "int32": "Int32",
    "int64": "Int64",
}


@dataclasses.dataclass(frozen=True)
class Program:
    """What one config compiles: a callable under ``cute.jit`` and its fake arguments, without the stream."""

    kernel: Any
    arguments: tuple[Any, ...]


class Jit(Generic[Configured]):
    """A family of kernels, one per config. Made by :func:`jit`."""

    def __init__(self, build: Callable[[Configured], Program], arch: str) -> None:
        self._build, self.arch = build, arch
        self.module = build.__module__
        self.options = f"--enable-tvm-ffi --gpu-arch {arch}"
        self._launch: dict[Configured, Launch] = {}
        self.__doc__ = build.__doc__

    def __call__(self, config: Configured) -> Launch:
        """The kernel of a config; compiles or loads it at the first call."""
        launch = self._launch.get(config)
        if launch is None:
            with _lock:
                launch = self._launch.get(config)
                if launch is None:
                    launch = self._launch[config] = self._load_or_compile(config)
        return launch

    def digest(self, config: Configured) -> str:
        """Name of a config's machine code; changes with its source, the compiler and the config."""
        return cache.digest_of(self.module, config, self.arch, self.options)

    def object(self, config: Configured) -> bytes:
        """The exported object of a config, from the cache or compiled. Needs no GPU."""
        with _lock:
            digest = self.digest(config)
            found = _from_cache(digest)
            return found[1] if found is not None else self._compile(config, digest)[1]

    def symbol(self, config: Configured) -> str:
        """Name of the exported function in the object of a config."""
        return _symbol(self.digest(config))

    def _load_or_compile(self, config: Configured) -> Launch:
        objects.refuse_under_capture(self.module, config)
        begin = time.perf_counter()
        launch, how = self._ready(config)
        objects.note(self.module, config, how, time.perf_counter() - begin)
        return launch

    def _ready(self, config: Configured) -> tuple[Launch, str]:
        launch = objects.load(self.module, config, self.options)
        if launch is not None:
            return launch, "prebuilt"
        digest = self.digest(config)
        found = _from_cache(digest)
        if found is not None:
            return _loaded(found[0], digest), "from the cache"
        return self._compile(config, digest)[0], "compiled"

    def _compile(self, config: Configured, digest: str) -> tuple[Launch, bytes]:
        from cutlass import cute

        program = self._build(config)
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        compiled = cute.compile(program.kernel, *program.arguments, stream, options=self.options)
        content = _exported(compiled, _symbol(digest))
        try:
            cache.store(digest, content)
        except cache.CacheRefused as error:
            _say_refused(error)
        return compiled, content


def jit(*, arch: str) -> Callable[[Callable[[Configured], Program]], Jit[Configured]]:
    """Decorator: a function from a frozen dataclass to a :class:`Program` becomes a :class:`Jit`.

    ``arch``: target such as ``sm_90a``. The config is the whole key, so it must hold every static fact
    of the kernel and no tensor.
    """

    def decorate(build: Callable[[Configured], Program]) -> Jit[Configured]:
        return Jit(build, arch)

    return decorate


def symbol(divisibility: int = 1) -> Any:
    """A size known at run time, 32 bits. Every use of one object is one size, checked at the call."""
    from cutlass import cute

    return cute.sym_int(divisibility=divisibility)


def tensor(dtype: str, *shape: Any, align: int = 16, divisibility: int | None = None) -> Any:
    """A tensor argument: contiguous in its last dimension, any other strides (64 bits).

    ``dtype``: a torch dtype's name. ``align``: bytes the base address is a multiple of. ``divisibility``:
    elements the other strides are multiples of; by default as many as ``align`` needs.
    """
    import cutlass
    from cutlass import cute

    kind = getattr(cutlass, DTYPES[dtype])
    step = divisibility or max(1, 8 * align // kind.width)
    strides = tuple(cute.sym_int64(divisibility=step) for _ in shape[:-1])
    return cute.runtime.make_fake_tensor(kind, shape, stride=(*strides, 1), assumed_align=align)


def _symbol(digest: str) -> str:
    return f"kernel_fun_{digest}"


def _from_cache(digest: str) -> tuple[Path, bytes] | None:
    try:
        return cache.load(digest)
    except cache.CacheRefused as error:
        _say_refused(error)
        return None


def _say_refused(error: cache.CacheRefused) -> None:
    message = f"kernel-fun: compiled kernels are not kept on disk: {error}"
    support.log_once(("cache refused", str(error)), logging.WARNING, message)


def _exported(compiled: Any, symbol: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="kernel-fun-") as folder:
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(object_file_path=str(path), function_name=symbol)
        return path.read_bytes()


def _loaded(path: Path, digest: str) -> Launch:
    from cutlass import cute

    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    return getattr(module, _symbol(digest))

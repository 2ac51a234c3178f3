"""Every environment variable of the package: name, default, meaning. Read at each call, never cached."""

from __future__ import annotations

import difflib
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any


@dataclass(frozen=True)
class Switch:
    """One environment variable."""

    name: str
    default: str
    meaning: str

    @cached_property
    def key(self) -> Any:
        """The name as the dictionary behind ``os.environ`` spells it."""
        return os.environ.encodekey(self.name)

    def read(self) -> str:
        return os.environ.get(self.name, self.default).strip()

    @contextmanager
    def set(self, value: str) -> Generator[None]:
        """Hold the variable at a value for a block; what stood there before comes back."""
        before = os.environ.get(self.name)
        os.environ[self.name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[self.name]
            else:
                os.environ[self.name] = before

    def on(self) -> bool:
        """Is a yes-or-no switch on? ValueError for a word that is neither."""
        if words((self,)) == _UNSET:
            return self._on_unset
        return _is_yes(self.name, self.read())

    @cached_property
    def _on_unset(self) -> bool:
        return _is_yes(self.name, self.default)


def _is_yes(name: str, word: str) -> bool:
    if word.lower() in ("1", "true", "on", "yes"):
        return True
    if word.lower() in ("", "0", "false", "off", "no"):
        return False
    raise ValueError(f"{name} must be 0 or 1, got {word.lower()!r}")


DISABLE = Switch("KERNEL_FUN_DISABLE", "0", "1: no GPU backend of any family serves a call")
DEBUG = Switch(
    "KERNEL_FUN_DEBUG",
    "0",
    "1: log the whole plan of every new problem and wait for the device after each stage, "
    "so that a fault names its stage",
)
FALLBACK = Switch(
    "KERNEL_FUN_FALLBACK",
    "auto",
    "what serves a CUDA call no GPU backend of ours takes: auto (fla if installed, else eager), "
    "fla, eager, or error",
)
CACHE_DIR = Switch("KERNEL_FUN_CACHE_DIR", "", "directory of compiled kernels; default ~/.cache/kernel-fun")
KERNELS = Switch(
    "KERNEL_FUN_KERNELS",
    "",
    "directory of kernels built by `kernel-fun compile`; CuTe kernels are then loaded from it, "
    "never compiled",
)
KDA_DISABLE = Switch("KERNEL_FUN_KDA_DISABLE", "0", "1: no GPU backend serves chunk_kda")
KDA_BACKEND = Switch(
    "KERNEL_FUN_KDA_BACKEND",
    "auto",
    "auto, or the one backend that must serve chunk_kda: eager, sm90, sm100, triton or fla; "
    "an error where it cannot",
)
KDA_MIN_CTAS = Switch(
    "KERNEL_FUN_KDA_MIN_CTAS",
    "0",
    "smallest number of value-head columns in flight, B*HV*ceil(V/64) (N for B when packed), "
    "that a GPU backend of chunk_kda accepts",
)
FLA = Switch(
    "KERNEL_FUN_FLA",
    "1",
    "0: calls made through kernel_fun.fla.register() or patch() are fla's own again",
)
CCONV_DISABLE = Switch("KERNEL_FUN_CCONV_DISABLE", "0", "1: no GPU backend serves causal_conv1d")
CCONV_BACKEND = Switch(
    "KERNEL_FUN_CCONV_BACKEND",
    "auto",
    "auto, or the one backend that must serve causal_conv1d: eager, triton or fla",
)

SWITCHES = (
    DISABLE,
    DEBUG,
    FALLBACK,
    CACHE_DIR,
    KERNELS,
    KDA_DISABLE,
    KDA_BACKEND,
    KDA_MIN_CTAS,
    CCONV_DISABLE,
    CCONV_BACKEND,
    FLA,
)

PREFIX = "KERNEL_FUN_"

KDA_POLICY = (DISABLE, DEBUG, FALLBACK, KDA_DISABLE, KDA_BACKEND, KDA_MIN_CTAS)
"""What the plan of a KDA call depends on."""
CCONV_POLICY = (DISABLE, DEBUG, FALLBACK, CCONV_DISABLE, CCONV_BACKEND)
"""What the plan of a convolution depends on."""

_UNSET = (None,)
_KEY = attrgetter("key")
FALLBACKS = ("auto", "fla", "eager", "error")


def words(switches: tuple[Switch, ...]) -> tuple[Any, ...]:
    """What the environment holds for some switches, neither read nor decoded: None where nothing is set.

    From the dictionary behind ``os.environ``, where a look at a name that is not set costs a twentieth.
    """
    try:
        held = os.environ._data  # pyright: ignore
    except AttributeError:  # put in place of os.environ
        return tuple([os.environ.get(switch.name) for switch in switches])
    return tuple(map(held.get, map(_KEY, switches)))


def disabled_by(family: Switch) -> str | None:
    """The switch that turns the GPU backends of a family off, and its word, or None."""
    for switch in (DISABLE, family):
        if switch.on():
            return f"{switch.name}={switch.read()}"
    return None


def unknown() -> list[str]:
    """Of every variable that is set and named like a switch but is none: a sentence with the nearest name."""
    ours = {switch.name.removeprefix(PREFIX): switch.name for switch in SWITCHES}
    found: list[str] = []
    for name in sorted(os.environ):
        word = name.upper()
        if word.startswith(PREFIX) and name not in ours.values():
            near = difflib.get_close_matches(word.removeprefix(PREFIX), list(ours), n=1, cutoff=0.6)
            meant = f"; did you mean {ours[near[0]]}?" if near else f"; there are {', '.join(ours.values())}"
            found.append(f"{name} is no variable of kernel-fun and does nothing{meant}")
    return found


def forced_backend(switch: Switch, known: tuple[str, ...]) -> str | None:
    """The backend a switch demands, or None for auto. ValueError for a word that is no backend."""
    word = switch.read().lower() or "auto"
    if word == "auto":
        return None
    if word not in known:
        raise ValueError(f"{switch.name} must be auto or one of {', '.join(known)}, got {word!r}")
    return word


def fallback() -> str:
    """The fallback policy; ValueError for an unknown word. ``1`` and ``0`` mean auto and error."""
    word = FALLBACK.read().lower() or "auto"
    word = {"1": "auto", "0": "error"}.get(word, word)
    if word not in FALLBACKS:
        raise ValueError(f"{FALLBACK.name} must be one of {', '.join(FALLBACKS)}, got {word!r}")
    return word


def integer(switch: Switch) -> int:
    """A count; ValueError names the variable and what it holds."""
    word = switch.read() or switch.default
    if not word.isdecimal():
        raise ValueError(f"{switch.name} must be an integer, 0 or more, got {word!r}")
    return int(word)

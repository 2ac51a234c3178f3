"""What a family registers to be benchmarked, and where its registration is found.

The shapes, inputs and floors live in `benchmarks/` of the repository, next to the records. A wheel
carries the same files as `kernel_fun._suite`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FAMILIES = ("kda", "cconv")
"""What `load` registers and `kernel-fun bench --family` names."""

Outputs = dict[str, "Tensor"]


@dataclass(frozen=True)
class Candidate:
    """One implementation to time; `why_not` says why it cannot be, here."""

    name: str
    why_not: str | None = None


@dataclass(frozen=True)
class Work:
    """Least work of a call: floating point operations and bytes that must move."""

    flops: float
    bytes: float


class Shape(Protocol):
    """A named shape; `str(shape)` describes it."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Case:
    """The inputs of one comparison: the same tensors for every candidate.

    `limits` is the relative error, per tensor, above which a candidate is not timed; `peer_limits`
    holds other limits for the candidates it names.
    """

    shape: Shape
    gate: str
    arguments: Mapping[str, Any]
    upstream: Mapping[str, Tensor]
    limits: Mapping[str, float]
    peer_limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])


class Family(Protocol):
    """What a module of `benchmarks/` such as `kda.py` defines."""

    NAME: str
    PASSES: tuple[str, ...]
    GATES: tuple[str, ...]
    SHAPES: Mapping[str, Any]
    DEFAULT: Mapping[str, tuple[str, ...]]

    def case(self, shape: Any, gate: str, dtype: torch.dtype, device: torch.device) -> Case:
        """Seeded inputs of the production distribution."""
        ...

    def candidates(self, device: torch.device) -> list[Candidate]:
        """Every implementation that could be compared on a device, the baseline last."""
        ...

    def caller(self, candidate: str, case: Case, what: str) -> Callable[[], Outputs]:
        """A call of one pass of a candidate, ready to be repeated; it returns what it computed."""
        ...

    def step(self, candidate: str, case: Case, what: str) -> AbstractContextManager[Callable[[], object]]:
        """A context, and within it the operation alone: what a call of it costs the host is its own."""
        ...

    def errors(self, case: Case, what: str, found: Mapping[str, Outputs]) -> dict[str, dict[str, float]]:
        """Relative error of every tensor of every candidate against the oracle."""
        ...

    def work(self, shape: Any, what: str, dtype: torch.dtype) -> Work:
        """Floors of one pass."""
        ...


def root() -> Path:
    """The directory of the suite. FileNotFoundError where there is none."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "_suite", package.parent.parent / "benchmarks"):
        if (place / "kda.py").exists():
            return place
    raise FileNotFoundError(
        "the benchmark suite (benchmarks/ of the kernel-fun repository) is not installed here"
    )


def commit() -> tuple[str, bool]:
    """Commit of the checkout and whether it has changes; ("unknown", True) for an installed wheel."""
    from kernel_fun.bench.record import commit_of

    place = root()
    return commit_of(place) if place.name == "benchmarks" else ("unknown", True)


def load(name: str) -> Family:
    """The registration of a family. ValueError where the suite has none of this name."""
    if not (name.isidentifier() and (root() / f"{name}.py").exists()):
        raise ValueError(f"`--family` must be one of {', '.join(FAMILIES)}, got {name!r}")
    family: Any = _module(name)
    return family


def _module(name: str) -> ModuleType:
    place = root()
    if place.name == "_suite":
        return importlib.import_module(f"kernel_fun._suite.{name}")
    if str(place.parent) not in sys.path:
        sys.path.append(str(place.parent))
    return importlib.import_module(f"benchmarks.{name}")

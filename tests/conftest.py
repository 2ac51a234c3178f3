"""What every test sees: one compute thread, a seed, and the targets that numerics are asked of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import Ranks

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Target:
    """A function with the signature of chunk_kda, in one io dtype on one device."""

    backend: str
    dtype_name: str
    device: str = "cpu"
    is_oracle: bool = False

    @property
    def op(self) -> Any:
        if self.is_oracle:
            return getattr(import_module("kernel_fun.kda.reference"), self.backend)
        return import_module("kernel_fun.kda").chunk_kda

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of states: float32, or float64 for a float64 call."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def __str__(self) -> str:
        return f"{self.backend}-{self.dtype_name}"


ORACLES = [Target(form, "float64", is_oracle=True) for form in ("recurrent", "chunked")]

# A GPU backend joins here, with its dtypes, its device and the marker of its architecture.
BACKENDS = [pytest.param(Target("eager", dtype), id=f"eager-{dtype}") for dtype in DTYPES]


def _force(target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """No other backend can answer: a call the forced one cannot serve is an error."""
    if not target.is_oracle:
        monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", target.backend)
    return target


@pytest.fixture(params=BACKENDS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Every backend in every dtype it serves."""
    return _force(request.param, monkeypatch)


@pytest.fixture(params=[*(pytest.param(t, id=t.backend) for t in ORACLES), *BACKENDS])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Both oracles, and every backend in every dtype it serves."""
    return _force(request.param, monkeypatch)


@pytest.fixture(params=["eager"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every backend that serves float32 and float64 at any size on the CPU."""
    monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", request.param)
    return request.param


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    """The problems are tiny: threads cost more than they save, and workers share the cores."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    """No plan of another test: tests change what plans are made from."""
    import_module("kernel_fun._common.known").forget()


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled kernels, its directory not created yet."""
    path = tmp_path / "kernels"
    monkeypatch.setenv("KERNEL_FUN_CACHE_DIR", str(path))
    return path


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes of a gloo group, started by the first test that gives them a job."""
    processes = Ranks()
    yield processes
    processes.stop()


@pytest.fixture
def group_of_one() -> Iterator[Any]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()

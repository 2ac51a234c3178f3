"""The inverse, run lane by lane on numpy as it is traced, against float64; and that it compiles alone."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cutlass import Float32, Int32, cute

from kernel_fun._cute import inspect, trisolve
from kernel_fun._cute.compile import Jit, Program, symbol, tensor
from kernel_fun._cute.trisolve import PITCH, SIZE

LANE = np.arange(32)
ROW, COLUMN = LANE // 4, LANE % 4
PLACE = trisolve.place(np.arange(SIZE))


class Tile:
    """Shared memory: indexed by 32 lanes at once."""

    def __init__(self, L: np.ndarray) -> None:
        self.flat = np.full(SIZE * PITCH, np.nan, np.float32)
        self.flat.reshape(SIZE, PITCH)[:, PLACE] = L
        self.iterator = SimpleNamespace(toint=lambda: 0)

    def __getitem__(self, at: Any) -> np.ndarray:
        return self.flat[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self.flat[at] = value


def tf32(x: np.ndarray) -> np.ndarray:
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


def mma_tf32(acc: list[Any], at: int, a: list[np.ndarray], b: list[np.ndarray]) -> None:
    A, B = np.zeros((16, 8)), np.zeros((8, 8))
    for word, (i, k) in zip(a, ((0, 0), (8, 0), (0, 4), (8, 4))):
        A[ROW + i, COLUMN + k] = word
    for word, k in zip(b, (0, 4)):
        B[COLUMN + k, ROW] = word
    C = A @ B
    for e, (i, j) in enumerate(((0, 0), (0, 1), (8, 0), (8, 1))):
        acc[at + e] = (acc[at + e] + C[ROW + i, 2 * COLUMN + j]).astype(np.float32)


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def load4(tile: Tile):
        return lambda address: [tile.flat[address // 4 + e] for e in range(4)]

    def matrices(tile: Tile):
        return lambda address: [tile.flat[address[8 * m + ROW] // 4 + COLUMN] for m in range(4)]

    monkeypatch.setattr(trisolve, "select", np.where)
    monkeypatch.setattr(trisolve, "tf32", tf32)
    monkeypatch.setattr(trisolve, "rounded", tf32)
    monkeypatch.setattr(trisolve, "word_of", lambda x: x)
    monkeypatch.setattr(trisolve, "mma_tf32", mma_tf32)
    monkeypatch.setattr(trisolve, "accumulator", lambda: [np.zeros(32, np.float32) for _ in range(4)])
    monkeypatch.setattr(trisolve, "Int32", int)
    monkeypatch.setattr(trisolve, "Float32", np.float32)
    arch = SimpleNamespace(sync_warp=lambda: None)
    monkeypatch.setattr(trisolve, "cute", SimpleNamespace(arch=arch))
    monkeypatch.setattr(Tile, "load4", load4, raising=False)
    monkeypatch.setattr(Tile, "matrices", matrices, raising=False)


def run(L: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    tile = Tile(L)
    for name in ("load4", "matrices"):
        monkeypatch.setattr(trisolve, name, getattr(tile, name)())
    for warp in range(2):
        trisolve.invert_blocks(tile, warp, LANE)  # type: ignore[arg-type]
    rows = [trisolve.rows_of_L(tile, warp, LANE) for warp in range(4)]  # type: ignore[arg-type]
    for warp in range(4):
        trisolve.merge_16(tile, warp, LANE)  # type: ignore[arg-type]
    for warp in range(4):
        trisolve.multiply_32(tile, warp, LANE, rows[warp])  # type: ignore[arg-type]
    X_b = [trisolve.rows_of_X(tile, warp, LANE) for warp in range(4)]  # type: ignore[arg-type]
    for warp in range(4):
        trisolve.merge_32(tile, warp, LANE, X_b[warp])  # type: ignore[arg-type]
    X = np.zeros((SIZE, SIZE), np.float32)
    for I in range(4):
        for J in range(I + 1):
            for i in range(16 * I, 16 * I + 16):
                at = i * PITCH + 16 * J + trisolve.shift(I, J)
                X[i, 16 * J : 16 * J + 16] = tile.flat[at + PLACE[:16]]
    return X


def cases():
    rng = np.random.default_rng(0)
    yield "random", np.tril(rng.standard_normal((SIZE, SIZE)) * 0.1, -1), 1e-3
    yield "none", np.zeros((SIZE, SIZE)), 0.0
    yield "equal keys, beta 2", np.tril(np.full((SIZE, SIZE), 2.0), -1), 2e-3
    yield "equal keys, beta 1", np.tril(np.ones((SIZE, SIZE)), -1), 1e-6


@pytest.mark.parametrize("name, L, tolerance", list(cases()), ids=lambda c: c if isinstance(c, str) else "")
def test_inverse(name: str, L: np.ndarray, tolerance: float, on_numpy: None, monkeypatch: pytest.MonkeyPatch):
    # what stands on and above the diagonal must not matter
    X = run(L + np.triu(np.full((SIZE, SIZE), np.nan)), monkeypatch).astype(np.float64)
    true = np.linalg.inv(np.eye(SIZE) + L)
    assert (np.triu(X, 1) == 0).all()
    assert (np.diag(X) == 1).all()
    assert np.linalg.norm(X - true) <= tolerance * np.linalg.norm(true)


@dataclass(frozen=True)
class Config:
    warps: int = 4


class Inverse:
    def __init__(self, config: Config) -> None:
        self.threads = 32 * config.warps

    @cute.jit
    def __call__(self, mL: cute.Tensor, tiles: Int32, stream: Any):
        self.inverse(mL).launch(grid=(tiles, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def inverse(self, mL: cute.Tensor):
        sL = cute.make_tensor(
            cute.arch.alloc_smem(Float32, SIZE * PITCH, 128), cute.make_layout(SIZE * PITCH)
        )
        tid = cute.arch.thread_idx()[0]
        warp, lane = cute.arch.make_warp_uniform(tid >> 5), tid & 31
        sL[tid] = mL[cute.arch.block_idx()[0], tid]
        cute.arch.sync_threads()
        if warp < 2:
            trisolve.invert_blocks(sL, warp, lane)
        cute.arch.sync_threads()
        trisolve.merge_16(sL, warp, lane)
        rows = trisolve.rows_of_L(sL, warp, lane)
        cute.arch.sync_threads()
        trisolve.multiply_32(sL, warp, lane, rows)
        X_b = trisolve.rows_of_X(sL, warp, lane)
        cute.arch.sync_threads()
        trisolve.merge_32(sL, warp, lane, X_b)
        cute.arch.sync_threads()
        mL[cute.arch.block_idx()[0], tid] = sL[tid]


def build(config: Config) -> Program:
    return Program(Inverse(config), (tensor("float32", symbol(), SIZE * PITCH), Int32(1)))


def test_it_compiles_alone(cache_dir: Any):
    (kernel,) = inspect.resources(Jit(build, "sm_90a").object(Config()))
    assert kernel.registers <= 64
    assert kernel.stack_bytes == 0

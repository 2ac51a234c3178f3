"""The copy that stores part of a tile: which elements each thread moves, run on numpy; and that it compiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from tests._cute import tiles

from kernel_fun._cute import copy, inspect
from kernel_fun._cute.compile import Jit


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def autovec_copy(source: np.ndarray, target: np.ndarray) -> None:
        target[:] = source

    cute = SimpleNamespace(
        size=lambda n: n,
        make_rmem_tensor=lambda shape, dtype: np.empty(shape),
        local_tile=lambda x, shape, at: x[tuple(slice(n * i, n * i + n) for n, i in zip(shape, at))],
        autovec_copy=autovec_copy,
    )
    monkeypatch.setattr(copy, "cute", cute)
    monkeypatch.setattr(copy, "cutlass", SimpleNamespace(range_constexpr=range))


class Tensor(np.ndarray):
    element_type = SimpleNamespace(width=16)


@pytest.mark.parametrize("rows", [1, 15, 16, 63, 64])
def test_rows_out_moves_the_valid_rows_alone(rows: int, on_numpy: None):
    source = np.arange(64 * 64, dtype=np.float64).reshape(64, 64).view(Tensor)
    target = np.full((64, 64), -1.0)
    body = getattr(copy.rows_out, "__wrapped__", copy.rows_out)
    for tidx in range(128):
        body(source, target, rows, tidx, 128)
    assert (target[:, :rows] == source[:, :rows]).all()
    assert (target[:, rows:] == -1.0).all()


def test_a_kernel_with_a_clipped_store_compiles(cache_dir: Any):
    (kernel,) = inspect.resources(Jit(tiles.build, "sm_90a").object(tiles.Config(clipped=True)))
    assert kernel.stack_bytes == 0

"""What follows from a tile: bytes, swizzled layouts, fields; and that tiles load and store in a kernel."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutlass import BFloat16, Float32, Int32, cute
from tests._cute import tiles

from kernel_fun._cute import inspect
from kernel_fun._cute.compile import Jit
from kernel_fun._cute.tile import Tile, storage, vector

FORMS = {
    "K-major 16 bit": (Tile(BFloat16, 64, 128, 3), "((8,8),(64,2)):((64,512),(1,4096))", 49152),
    "MN-major 16 bit": (
        Tile(BFloat16, 128, 64, 2, rows_contiguous=True),
        "((64,2),(8,8)):((1,4096),(64,512))",
        32768,
    ),
    "K-major fp32": (Tile(Float32, 64, 128, 2), "((8,8),(32,4)):((32,256),(1,2048))", 65536),
    "spaced stages": (
        Tile(BFloat16, 64, 128, 2, pitch_bytes=32768),
        "((8,8),(64,2)):((64,512),(1,4096))",
        65536,
    ),
}


def traced(body: Any) -> list[Any]:
    """Results of a function that may only run while a kernel is traced."""
    found: list[Any] = []

    @cute.jit
    def host(stream: Int32):
        found.append(body())

    cute.compile(host, Int32(0), options="--gpu-arch sm_90a")
    return found


@pytest.mark.parametrize("form", FORMS)
def test_layout_and_bytes(form: str):
    tile, layout, smem_bytes = FORMS[form]
    assert tile.smem_bytes == smem_bytes
    assert tile.stage_bytes == tile.rows * tile.cols * tile.dtype.width // 8
    (found,) = traced(lambda: str(tile.layout()))
    assert found.startswith("S<3,4,3>")
    assert found.endswith(layout)


def test_storage_is_the_sum_of_its_fields():
    a, b = FORMS["K-major 16 bit"][0], FORMS["K-major fp32"][0]
    (found,) = traced(lambda: storage(small=vector(Float32, 5), a=a.field(), b=b.field()).size_in_bytes())
    assert found == 1024 + a.smem_bytes + b.smem_bytes


@pytest.mark.parametrize("config", [tiles.Config(), tiles.Config(io="float16", stages=1)], ids=str)
def test_a_kernel_loads_and_stores_tiles(config: tiles.Config, cache_dir: Any):
    content = Jit(tiles.build, "sm_90a").object(config)
    (kernel,) = inspect.resources(content)
    assert kernel.stack_bytes == 0
    assert b"product" in content

"""Chunk tables on the device are those of torch's operations, and both kernels are small."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from kernel_fun._common import device as devices
from kernel_fun._cute import inspect, packing
from kernel_fun._cute.varlen import chunk_table, sequence_chunks

ABSENT = not torch.cuda.is_available() or devices.of(torch.device("cuda")).arch != "sm90"


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_compiles_without_a_stack(index: str, cache_dir: object) -> None:
    kernels = inspect.resources(packing._compile.object(packing.Config(index)))
    assert {k.name.split("_cutlass_")[1].split("_kernel_fun")[0] for k in kernels} == {
        "first_chunks",
        "chunk_rows",
    }
    assert all(k.registers <= 32 and k.stack_bytes == 0 for k in kernels)


def test_an_index_of_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="`index`"):
        packing.Config("float32")


def test_token_indices_must_fit() -> None:
    with pytest.raises(ValueError, match="`tokens` must be below"):
        packing.chunk_tables(torch.tensor([0, 1]), 1 << 31)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.skipif(ABSENT, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[1, 0, 63, 64, 65, 15, 17], [0, 0, 0], [5], [0, 200, 0], [64] * 4, [3] * 1025, [0, 1, 70, 0] * 1100, []],
    ids=lambda x: f"{len(x)} sequences, {sum(x)} tokens",
)
def test_agrees_with_torch(lengths: list[int], dtype: torch.dtype) -> None:
    cu = torch.tensor([0, *lengths], dtype=dtype).cumsum(0).to("cuda", dtype)
    for tokens in (sum(lengths), sum(lengths) + 200):
        first, table = packing.chunk_tables(cu, tokens)
        if lengths:
            assert torch.equal(first, sequence_chunks(cu))
        assert torch.equal(table, chunk_table(cu, tokens))

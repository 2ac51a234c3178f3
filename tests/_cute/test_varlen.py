"""Chunk tables against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_fun._cute.varlen import chunk_bound, chunk_table, sequence_chunks

LENGTHS = [[1, 0, 63, 64, 65, 15, 17], [0, 0, 0], [5], [0, 200, 0], [64] * 4, []]


def by_loop(lengths: list[int]) -> list[list[int]]:
    rows, start = [], 0
    for n, length in enumerate(lengths):
        for chunk, c in enumerate(range(0, length, 64)):
            rows.append([start + c, min(64, length - c), n, chunk])
        start += length
    return rows


def check(lengths: list[int], extra: int, dtype: torch.dtype) -> None:
    boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0], dtype=dtype)
    tokens = sum(lengths) + extra
    rows, table = by_loop(lengths), chunk_table(boundaries, tokens)
    assert table.dtype == torch.int32
    assert table.shape == (chunk_bound(tokens, len(lengths)), 4)
    assert table[: len(rows)].tolist() == rows
    assert (table[len(rows) :, :2] == 0).all()
    if lengths:
        starts = sequence_chunks(boundaries).tolist()
        assert [e - s for s, e in zip(starts, starts[1:])] == [-(-length // 64) for length in lengths]
        assert starts[-1] == len(rows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("extra", [0, 9])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_table(lengths: list[int], extra: int, dtype: torch.dtype):
    check(lengths, extra, dtype)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(0, 70))
def test_table_of_any_packing(lengths: list[int], extra: int):
    check(lengths, extra, torch.int64)


def test_token_indices_must_fit():
    with pytest.raises(ValueError, match="`tokens` must be below"):
        chunk_table(torch.tensor([0, 1]), 1 << 31)

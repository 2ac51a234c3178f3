"""Chunk tables: which rows, in which order, and that loads and stores keep to them."""

from __future__ import annotations

import pytest
import torch

from kernel_fun.kda._kernels.eager import layout as module
from kernel_fun.kda._kernels.eager.layout import Layout

CPU = torch.device("cpu")


def packed(*lengths: int, BT: int = 64) -> Layout:
    bounds, start = [], 0
    for n in lengths:
        bounds.append((start, n))
        start += n
    return Layout(bounds, BT, CPU)


def numbers(index, NT: int) -> list[int]:
    return torch.arange(NT)[index].tolist()


@pytest.mark.parametrize(
    ("lengths", "regular", "full"),
    [((128, 64), True, True), ((128, 65), False, False), ((64, 1, 64), False, False)],
)
def test_regular_and_full(lengths, regular, full):
    lay = packed(*lengths)
    assert (lay.regular, lay.full) == (regular, full)


def test_full_but_not_regular():
    lay = Layout([(3, 64), (70, 64)], 64, CPU)
    assert lay.full
    assert not lay.regular


def test_rows_and_mask():
    lay = packed(3, 0, 5, BT=4)
    assert lay.rows.tolist() == [[0, 1, 2, 2], [3, 4, 5, 6], [7, 7, 7, 7]]
    assert lay.mask.tolist() == [[True] * 3 + [False], [True] * 4, [True] + [False] * 3]


@pytest.mark.parametrize("lengths", [(128, 64), (65, 0, 130, 1), (64,) * 5, (1,) * 9, ()])
@pytest.mark.parametrize("heads", [1, 3])
def test_store_returns_what_load_took(lengths, heads):
    lay = packed(*lengths)
    T = sum(lengths)
    x = torch.randn(1, T + 7, heads, 5) if not lay.regular else torch.randn(1, T, heads, 5)
    before = x.clone()
    out = lay.output(x, heads, 5, x.dtype)
    for chunks in lay.tiles(heads):
        tile = lay.load(x, chunks, torch.float64)
        assert tile.is_contiguous()
        lay.store(out, chunks, tile)
        tile.fill_(float("nan"))
    assert torch.equal(x, before)
    assert torch.equal(out[:, :T], x[:, :T])
    assert not out[:, T:].any()


def test_padding_is_zero_even_where_the_next_sequence_is_nan():
    lay = packed(3, 61)
    x = torch.randn(1, 64, 1, 2)
    x[:, 3:] = float("nan")
    tile = lay.load(x, slice(0, 1), torch.float32)
    assert torch.equal(tile[0, 0, :3], x[0, :3, 0])
    assert not tile[0, 0, 3:].any()


@pytest.mark.parametrize("lengths", [(130, 1, 64, 300, 0), (64,) * 7, (200,), (0, 0)])
@pytest.mark.parametrize("HV", [1, 2, 100])
def test_scan_visits_every_chunk_once_and_in_order(lengths, HV, monkeypatch):
    monkeypatch.setattr(module, "CHAINS", 4)
    monkeypatch.setattr(module, "TILE", 4)
    lay = packed(*lengths)
    first = {n: lay.first[n] for n in range(lay.N)}
    seen: dict[int, list[int]] = {n: [] for n in range(lay.N)}
    for group in lay.groups(HV):
        members = numbers(group.sequences, lay.N)
        assert group.n == len(members)
        for block in group.blocks:
            chunks = numbers(block.chunks, lay.NT)
            assert block.steps[0].lo == 0
            assert block.steps[-1].hi == len(chunks)
            for step in block.steps:
                assert numbers(step.chunks, lay.NT) == chunks[step.lo : step.hi]
                for n, c in zip(members, chunks[step.lo : step.hi]):
                    seen[n].append(c - first[n])
    assert seen == {n: list(range(-(-length // 64))) for n, length in enumerate(lengths)}

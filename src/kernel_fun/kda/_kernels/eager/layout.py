"""Chunks of a call: where their tokens lie, how to load and store a tile of them, in which order to scan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call

TILE = 32
"""Chunk-heads worked on at once: the operands of a tile stay in a core's cache."""
CHAINS = 64
"""Sequence-heads scanned side by side."""


Index: TypeAlias = "slice | Tensor"
"""Chunk numbers: a slice where they are consecutive, so that selecting them copies nothing."""


@dataclass(frozen=True)
class Step:
    """Chunk ``c`` of every sequence that has one."""

    chunks: Index
    lo: int
    """The chunks are ``lo:hi`` of the block's."""
    hi: int


@dataclass(frozen=True)
class Block:
    """Consecutive steps of a group whose operands are built together."""

    chunks: Index
    """Chunk numbers, step by step."""
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Group:
    """Sequences scanned side by side, longest first, so that those still running come first."""

    sequences: Index
    n: int
    blocks: tuple[Block, ...]


class Layout:
    """The chunk table of a call. Chunks are numbered in sequence order; none spans two sequences."""

    def __init__(self, bounds: list[tuple[int, int]], BT: int, device: torch.device) -> None:
        """``bounds``: first row and length of each sequence in the flattened tokens."""
        self.BT, self.N, self.device = BT, len(bounds), device
        starts: list[int] = []
        valid: list[int] = []
        self.first: list[int] = []
        for start, length in bounds:
            self.first.append(len(starts))
            starts.extend(range(start, start + length, BT))
            valid.extend([BT] * (length // BT) + ([length % BT] if length % BT else []))
        self.first.append(len(starts))
        self.NT = len(starts)
        self.covered = sum(valid)
        self.full = all(n == BT for n in valid)
        self.regular = self.full and all(s == c * BT for c, s in enumerate(starts))
        """Chunk c is rows c*BT to (c+1)*BT: tiles are views."""
        self._starts = torch.tensor(starts, dtype=torch.long, device=device)
        self._valid = torch.tensor(valid, dtype=torch.long, device=device)

    @cached_property
    def rows(self) -> Tensor:
        """Row of every token of every chunk ``[NT, BT]``; past a sequence's end, its last row again."""
        i = torch.arange(self.BT, device=self.device)
        return self._starts[:, None] + torch.minimum(i, self._valid[:, None] - 1)

    @cached_property
    def mask(self) -> Tensor:
        """Which tokens of every chunk exist, ``[NT, BT]``."""
        return torch.arange(self.BT, device=self.device) < self._valid[:, None]

    def tiles(self, HV: int) -> Iterator[slice]:
        """Chunk numbers, a tile's worth at a time."""
        n = max(1, TILE // HV)
        for lo in range(0, self.NT, n):
            yield slice(lo, min(lo + n, self.NT))

    def index(self, numbers: list[int]) -> Index:
        """Numbers as a slice where they are consecutive."""
        first = numbers[0] if numbers else 0
        if numbers == list(range(first, first + len(numbers))):
            return slice(first, first + len(numbers))
        return torch.tensor(numbers, dtype=torch.long, device=self.device)

    def groups(self, HV: int) -> Iterator[Group]:
        """The scan order. Which chunks share a block decides no value, only speed."""
        lengths = [e - f for f, e in zip(self.first, self.first[1:])]
        order = sorted(range(self.N), key=lambda n: -lengths[n])
        width = max(1, CHAINS // HV)
        for at in range(0, self.N, width):
            members = order[at : at + width]
            blocks = tuple(self._blocks(members, lengths, HV))
            yield Group(self.index(members), len(members), blocks)

    def _blocks(self, members: list[int], lengths: list[int], HV: int) -> Iterator[Block]:
        chunks: list[int] = []
        steps: list[Step] = []
        for c in range(max((lengths[n] for n in members), default=0)):
            live = [self.first[n] + c for n in members if lengths[n] > c]
            if chunks and (len(chunks) + len(live)) * HV > TILE:
                yield Block(self.index(chunks), tuple(steps))
                chunks, steps = [], []
            steps.append(Step(self.index(live), len(chunks), len(chunks) + len(live)))
            chunks.extend(live)
        if chunks:
            yield Block(self.index(chunks), tuple(steps))

    def load(self, x: Tensor, chunks: Index, dtype: torch.dtype) -> Tensor:
        """A fresh tile ``[n, heads, BT, D]`` of ``x [B, T, heads, D]``; rows past a sequence's end are 0."""
        flat = x.flatten(0, 1)
        rows = self._chunked(flat)[chunks] if self.regular else flat[self.rows[chunks]]
        rows = rows.transpose(1, 2)
        tile = torch.empty(rows.shape, dtype=dtype, device=x.device).copy_(rows)
        return tile if self.full else tile.masked_fill_(self.padding(chunks), 0.0)

    def _chunked(self, flat: Tensor) -> Tensor:
        """The covered rows of a regular call, a chunk each; rows after them belong to no sequence."""
        return flat[: self.covered].unflatten(0, (self.NT, self.BT))

    def padding(self, chunks: Index) -> Tensor:
        """Rows of a tile that lie past a sequence's end, ``[n, 1, BT, 1]``."""
        return ~self.mask[chunks][:, None, :, None]

    def store(self, out: Tensor, chunks: Index, tile: Tensor) -> None:
        """Write a tile ``[n, heads, BT, D]`` to ``out [B, T, heads, D]`` (contiguous), existing rows only."""
        flat = out.flatten(0, 1)
        rows = tile.transpose(1, 2)
        if self.regular:
            self._chunked(flat)[chunks] = rows.to(out.dtype)
        elif self.full:
            flat[self.rows[chunks]] = rows.to(out.dtype)
        else:
            mask = self.mask[chunks]
            flat[self.rows[chunks][mask]] = rows[mask].to(out.dtype)

    def output(self, like: Tensor, heads: int, D: int, dtype: torch.dtype) -> Tensor:
        """A tensor ``[B, T, heads, D]`` for :meth:`store`; rows no sequence covers are 0."""
        B, T = like.shape[:2]
        shape = (B, T, heads, D)
        fresh = torch.empty if self.covered == B * T else torch.zeros
        return fresh(shape, dtype=dtype, device=like.device)


def layout(call: Call) -> Layout:
    """The chunk table of a call. Packed boundaries are read on the host, once."""
    if "eager.bounds" not in call.memo:
        B, T = call.q.shape[:2]
        if call.cu_seqlens is None:
            bounds = [(b * T, T) for b in range(B)]
        else:
            cu = (call.cu_seqlens if call.cu_seqlens_cpu is None else call.cu_seqlens_cpu).tolist()
            bounds = [(a, max(0, b - a)) for a, b in zip(cu, cu[1:])]  # none where boundaries go back
        call.memo["eager.bounds"] = bounds
    return Layout(call.memo["eager.bounds"], call.BT, call.q.device)


def compute_dtype(call: Call) -> torch.dtype:
    """float64 if any input is float64, else float32."""
    return (
        torch.float64
        if any(t is not None and t.dtype == torch.float64 for t in call.tensors())
        else torch.float32
    )


def io_dtype(call: Call) -> torch.dtype:
    """What q, k and v promote to: the dtype of A and Aqk."""
    return torch.promote_types(torch.promote_types(call.q.dtype, call.k.dtype), call.v.dtype)

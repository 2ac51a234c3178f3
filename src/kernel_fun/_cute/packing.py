"""The tables of :mod:`varlen` in two small kernels, for they stand in front of every packed call.

Maths: a sequence of n tokens has c = ceil(n / BT) chunks; first[s] is the sum of c over the sequences before s.
Row r of the table is chunk r - first[s] of the last sequence s with first[s] <= r, which is never an empty one.

    kernel     grid           does
    first      1              each thread sums a run of sequences, the CTA scans the sums, each writes its run
    rows       rows / 256     each thread finds its row's sequence by bisection of first
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Int32, cute

from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.compile import Program, jit, symbol, tensor
from kernel_fun._cute.varlen import chunk_bound

if TYPE_CHECKING:
    from torch import Tensor, dtype

ARCH = "sm_90a"
BT = 64
SCANNERS = 1024
ROWS = 256


@dataclass(frozen=True)
class Config:
    """Static facts of one kernel: the compile key."""

    index: str
    """Dtype of the boundaries: int32 or int64."""

    def __post_init__(self) -> None:
        if self.index not in ("int32", "int64"):
            raise ValueError(f"`index` must be int32 or int64, got {self.index!r}")


class ChunkTablesSm90:
    """The kernels of one config."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def __call__(self, mCu: cute.Tensor, mFirst: cute.Tensor, mTable: cute.Tensor, stream: Any):
        self.first_chunks(mCu, mFirst).launch(grid=(1, 1, 1), block=(SCANNERS, 1, 1), stream=stream)
        rows = mTable.shape[0]
        self.chunk_rows(mCu, mFirst, mTable, rows).launch(
            grid=((rows + ROWS - 1) // ROWS, 1, 1), block=(ROWS, 1, 1), stream=stream
        )

    @cute.kernel
    def first_chunks(self, mCu: cute.Tensor, mFirst: cute.Tensor):
        sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout(SCANNERS))
        i = cute.arch.thread_idx()[0]
        N = mFirst.shape[0] - 1
        run = (N + SCANNERS - 1) // SCANNERS
        begin = cutlass.min(i * run, N)
        end = cutlass.min(begin + run, N)
        mine = Int32(0)
        for n in cutlass.range(begin, end):
            mine = mine + chunks(mCu, n)
        total = mine
        sums[i] = total
        cute.arch.sync_threads()
        for step in cutlass.range_constexpr(10):
            before = Int32(0)
            if i >= (1 << step):
                before = sums[i - (1 << step)]
            cute.arch.sync_threads()
            total = total + before
            sums[i] = total
            cute.arch.sync_threads()
        first = total - mine
        for n in cutlass.range(begin, end):
            mFirst[n] = first
            first = first + chunks(mCu, n)
        if i == SCANNERS - 1:
            mFirst[N] = total

    @cute.kernel
    def chunk_rows(self, mCu: cute.Tensor, mFirst: cute.Tensor, mTable: cute.Tensor, rows: Int32):
        r = cute.arch.block_idx()[0] * ROWS + cute.arch.thread_idx()[0]
        if r < rows:
            N = mFirst.shape[0] - 1
            low, high = Int32(0), Int32(N)  # the first s with first[s + 1] > r, or N
            while low < high:
                middle = (low + high) // 2
                if mFirst[middle + 1] > r:
                    high = middle
                else:
                    low = middle + 1
            token, valid, chunk = Int32(0), Int32(0), Int32(0)
            if low < N:
                chunk = r - mFirst[low]
                token = Int32(mCu[low]) + BT * chunk
                valid = cutlass.min(Int32(mCu[low + 1]) - token, Int32(BT))
            mTable[r, 0] = token
            mTable[r, 1] = valid
            mTable[r, 2] = low
            mTable[r, 3] = chunk


@cute.jit
def chunks(mCu: cute.Tensor, n: Int32):
    """Chunks of sequence n."""
    return (Int32(mCu[n + 1]) - Int32(mCu[n]) + (BT - 1)) // BT


@jit(arch=ARCH)
def _compile(config: Config) -> Program:
    """Boundaries, first chunks, table."""
    entries = symbol()
    return Program(
        ChunkTablesSm90(config),
        (
            tensor(config.index, entries, align=8 if config.index == "int64" else 4),
            tensor("int32", entries, align=4),
            tensor("int32", symbol(), 4),
        ),
    )


def chunk_tables(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """First chunk of each sequence and the chunk table, as :func:`varlen.sequence_chunks` and
    :func:`varlen.chunk_table` give them, in one launch on the current stream of a Hopper GPU.

    ``cu_seqlens`` ``[N + 1]`` int32 or int64 boundaries. Returns ``[N + 1]`` and ``[ceil(tokens / 64) + N, 4]``
    int32. ValueError where token indices do not fit 32 bits.
    """
    import torch

    if tokens >= 1 << 31:
        raise ValueError(f"`tokens` must be below 2^31, got {tokens}")
    N = cu_seqlens.shape[0] - 1
    first = cu_seqlens.new_empty(N + 1, dtype=torch.int32)
    table = cu_seqlens.new_empty((chunk_bound(tokens, N), 4), dtype=torch.int32)
    if N == 0:
        return first.zero_(), table.zero_()
    _compile(_config(cu_seqlens.dtype))(cu_seqlens.contiguous(), first, table)
    return first, table


@lru_cache(maxsize=8)
def _config(index: dtype) -> Config:
    return Config(str(index).removeprefix("torch."))

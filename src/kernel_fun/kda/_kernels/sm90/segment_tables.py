"""The tables of :func:`kernel_fun.kda.sequence_split.segment_tables` in two small kernels.

Maths: a sequence of n tokens has c = ceil(n / L) segments if n >= least, else one. first[s] is the sum of c over
the sequences before s; the chunks before s are counted beside it. Segment s is number s - first[n] of the last
sequence n with first[n] <= s: every sequence has at least one.

    kernel     grid             does
    sequences  1                each thread counts a run of sequences, the CTA scans the counts, each writes its run
    segments   (S + 1) / 256    each thread finds its segment's sequence by bisection of first
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Int32, cute

from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.compile import Program, jit, symbol, tensor
from kernel_fun.kda.sequence_split import Cut, Segments

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


class SegmentTablesSm90:
    """The kernels of one config."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self, mCu: cute.Tensor, mFirst: cute.Tensor, mBefore: cute.Tensor, mLast: cute.Tensor, mEnd: cute.Tensor,
        mBounds: cute.Tensor, mChunks: cute.Tensor, mAhead: cute.Tensor, mAheadChunks: cute.Tensor, mBack: cute.Tensor,
        mBackChunks: cute.Tensor, L: Int32, least: Int32, stream: Any,
    ):  # fmt: skip
        self.sequences(mCu, mFirst, mBefore, mLast, L, least).launch(
            grid=(1, 1, 1), block=(SCANNERS, 1, 1), stream=stream
        )
        S = mBounds.shape[0] - 1
        self.segments(
            mCu, mFirst, mBefore, mEnd, mBounds, mChunks, (mAhead, mAheadChunks), (mBack, mBackChunks), S, L
        ).launch(grid=((S + ROWS) // ROWS, 1, 1), block=(ROWS, 1, 1), stream=stream)

    @cute.kernel
    def sequences(
        self,
        mCu: cute.Tensor,
        mFirst: cute.Tensor,
        mBefore: cute.Tensor,
        mLast: cute.Tensor,
        L: Int32,
        least: Int32,
    ):
        smem = SmemAllocator()
        segments = smem.allocate_tensor(Int32, cute.make_layout(SCANNERS))
        chunks = smem.allocate_tensor(Int32, cute.make_layout(SCANNERS))
        i = cute.arch.thread_idx()[0]
        N = mLast.shape[0]
        run = (N + SCANNERS - 1) // SCANNERS
        begin = cutlass.min(i * run, N)
        end = cutlass.min(begin + run, N)
        own, own_chunks = Int32(0), Int32(0)
        for n in cutlass.range(begin, end):
            own = own + pieces(mCu, n, L, least)
            own_chunks = own_chunks + parts(length(mCu, n), Int32(BT))
        total, total_chunks = own, own_chunks
        segments[i] = total
        chunks[i] = total_chunks
        cute.arch.sync_threads()
        for step in cutlass.range_constexpr(10):
            before, before_chunks = Int32(0), Int32(0)
            if i >= (1 << step):
                before = segments[i - (1 << step)]
                before_chunks = chunks[i - (1 << step)]
            cute.arch.sync_threads()
            total = total + before
            total_chunks = total_chunks + before_chunks
            segments[i] = total
            chunks[i] = total_chunks
            cute.arch.sync_threads()
        first, chunk = total - own, total_chunks - own_chunks
        for n in cutlass.range(begin, end):
            mFirst[n] = first
            mBefore[n] = chunk
            first = first + pieces(mCu, n, L, least)
            chunk = chunk + parts(length(mCu, n), Int32(BT))
            mLast[n] = first - 1
        if i == SCANNERS - 1:
            mFirst[N] = total
            mBefore[N] = total_chunks

    @cute.kernel
    def segments(
        self, mCu: cute.Tensor, mFirst: cute.Tensor, mBefore: cute.Tensor, mEnd: cute.Tensor, mBounds: cute.Tensor,
        mChunks: cute.Tensor, ahead, back, S: Int32, L: Int32,
    ):  # fmt: skip
        s = cute.arch.block_idx()[0] * ROWS + cute.arch.thread_idx()[0]
        if s <= S:
            N = mFirst.shape[0] - 1
            low, high = Int32(0), Int32(N)  # the first n with first[n + 1] > s, or N
            while low < high:
                middle = (low + high) // 2
                if mFirst[middle + 1] > s:
                    high = middle
                else:
                    low = middle + 1
            D = S - N
            start, end = Int32(mCu[N]), Int32(mCu[N])
            chunk = mBefore[N]
            place, place_back = s - low, s - low  # among those that are summarised; below 0 if it is none
            if low < N:
                i = s - mFirst[low]
                start = Int32(mCu[low]) + i * L
                chunk = mBefore[low] + i * (L // BT)
                end = start + L
                place_back = place - 1
                if i == 0:
                    place_back = Int32(-1)
                if s + 1 == mFirst[low + 1]:
                    end = Int32(mCu[low + 1])
                    mEnd[low] = entry(place_back, D)
                    place = Int32(-1)
            mBounds[s] = start
            mChunks[s] = chunk
            if s < S:
                put(*ahead, place, D, start, end, chunk)
                put(*back, place_back, D, start, end, chunk)


@cute.jit
def entry(place: Int32, D: Int32):
    """Of a summarised segment; 2 D - 1 for none."""
    found = 2 * D - 1
    if place >= 0:
        found = 2 * (D - 1 - place)
    return found


@cute.jit
def put(
    mBounds: cute.Tensor, mChunks: cute.Tensor, place: Int32, D: Int32, start: Int32, end: Int32, chunk: Int32
):
    """The entry of a summarised segment, and where the gap after it begins."""
    if place >= 0:
        e = 2 * (D - 1 - place)
        mBounds[e] = start
        mBounds[e + 1] = end
        mChunks[e] = chunk
        mChunks[e + 1] = chunk


@cute.jit
def length(mCu: cute.Tensor, n: Int32):
    """Tokens of sequence n."""
    return Int32(mCu[n + 1]) - Int32(mCu[n])


@cute.jit
def parts(tokens: Int32, size: Int32):
    """ceil(tokens / size), for sums below 2^32."""
    return tokens // size + cutlass.min(tokens % size, Int32(1))


@cute.jit
def pieces(mCu: cute.Tensor, n: Int32, L: Int32, least: Int32):
    """Segments of sequence n."""
    tokens = length(mCu, n)
    found = Int32(1)
    if tokens >= least:
        found = parts(tokens, L)
    return found


@jit(arch=ARCH)
def _compile(config: Config) -> Program:
    """Boundaries of the sequences, then the tables of :func:`segment_tables`."""
    ends, N, bounds, entries = symbol(), symbol(), symbol(), symbol()
    table = lambda size: tensor("int32", size, align=4)
    return Program(
        SegmentTablesSm90(config),
        (
            tensor(config.index, ends, align=8 if config.index == "int64" else 4),
            table(ends), table(ends), table(N), table(N), table(bounds), table(bounds), table(entries), table(entries),
            table(entries), table(entries), Int32(1), Int32(1),
        ),
    )  # fmt: skip


def segment_tables(cu_seqlens: Tensor, S: int, cut: Cut) -> Segments:
    """As :func:`kernel_fun.kda.sequence_split.segment_tables`, in two launches on the current stream of a Hopper GPU.

    ``cu_seqlens`` ``[N + 1]`` int32 or int64, N >= 1, boundaries below 2^31; ``S`` at least as many segments as there
    are.
    """
    import torch

    N = cu_seqlens.shape[0] - 1
    D = S - N
    sizes = (N + 1, N + 1, N, N, S + 1, S + 1, 2 * D, 2 * D, 2 * D, 2 * D)
    made = cu_seqlens.new_zeros(sum(sizes), dtype=torch.int32).split(sizes)
    _compile(_config(cu_seqlens.dtype))(cu_seqlens.contiguous(), *made, cut.tokens, cut.least)
    first, _, last, end, *tables = made
    bounds, chunks, *entries = tables
    return Segments(bounds, chunks, first, last, *entries, end)


@lru_cache(maxsize=8)
def _config(index: dtype) -> Config:
    return Config(str(index).removeprefix("torch."))

"""The fold of :func:`kernel_fun.kda.sequence_split.fold`: states from segment to segment of each sequence.

    S       = M S + S_loc           forward, from the first segment
    dS      = M^T dS + dS_loc       reverse, from the last one, whose dS_loc began with what comes from later

fp32, products summed over j = 0, 1, ... in order, so that a result depends on nothing but its own sequence.

    grid       N HV V/16        threads 256: K rows of S, 16 K / 256 columns each
    smem       M of one segment, rows K + 4 words apart, and 16 columns of S
    loads      M and S_loc of the segment after the one that is multiplied, in registers
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.compile import Program, jit, symbol, tensor

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.sequence_split import Segments

ARCH = "sm_90a"
THREADS = 256
COLUMNS = 16
"""Of V, a CTA's."""
WIDTH = 4
"""Elements of 16 bytes."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Static facts of one kernel: the compile key."""

    K: int
    reverse: bool
    given: bool
    """Whether there are states before the first segments, or gradients after the last ones; else 0."""
    state_v_first: bool
    """Layout of what is given, of dS_loc and of the results; summaries are K-first."""

    def __post_init__(self) -> None:
        if self.K not in (64, 128):
            raise ValueError(f"`K` must be 64 or 128, got {self.K!r}")


class KdaSegmentStatesSm90:
    """The kernel of one config."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.own = COLUMNS * config.K // THREADS
        """Columns of a thread."""
        self.loads = config.K * config.K // THREADS // WIDTH
        """Of M, by a thread."""

    @cute.jit
    def __call__(
        self, mSummary: cute.Tensor, mFirst: cute.Tensor, mGiven, mLocal, mOut: cute.Tensor, stream: Any
    ):
        c = self.config
        order = [0, 1, 3, 2] if const_expr(c.state_v_first) else [0, 1, 2, 3]
        k_first = lambda m: cute.make_tensor(m.iterator, cute.select(m.layout, order))
        out = k_first(mOut)
        N, HV, V = mFirst.shape[0] - 1, mSummary.shape[1], mSummary.shape[3] - c.K
        self.kda_segment_states_sm90(
            mSummary,
            mFirst,
            k_first(mGiven) if const_expr(c.given) else None,
            k_first(mLocal) if const_expr(c.reverse) else mSummary,
            out,
            (V // COLUMNS, HV, N, V, mOut.shape[0], (mSummary.shape[0] + 1) // 2),
        ).launch(grid=(V // COLUMNS * HV * N, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kda_segment_states_sm90(
        self,
        mSummary: cute.Tensor,
        mFirst: cute.Tensor,
        mGiven,
        mLocal: cute.Tensor,
        mOut: cute.Tensor,
        sizes,
    ):
        c, K = self.config, self.config.K
        NV, HV, N, V, S, D = sizes
        smem = SmemAllocator()
        sM = smem.allocate_tensor(Float32, cute.make_layout((K, K), stride=(K + WIDTH, 1)), byte_alignment=16)
        sS = smem.allocate_tensor(Float32, cute.make_layout((COLUMNS, K), stride=(K, 1)), byte_alignment=16)
        t = cute.arch.thread_idx()[0]
        x = cute.arch.block_idx()[0]
        hv, n = x // NV % HV, x // NV // HV
        row = t % K
        own = t // K * self.own
        place = (row, x % NV * COLUMNS + own)
        last = D - 1 + n  # entry 2 (last - s) is that of segment s
        state = cute.make_rmem_tensor(self.own, Float32)
        local = cute.make_rmem_tensor(self.own, Float32)
        words = cute.make_rmem_tensor((WIDTH, self.loads), Float32)
        rM = cute.make_rmem_tensor(WIDTH, Float32)
        rS = cute.make_rmem_tensor(WIDTH, Float32)
        state.fill(0.0)
        if const_expr(c.given):
            self.get(mGiven, n, hv, place, state)
        begin, end = mFirst[n], mFirst[n + 1]
        at = end - 1 if const_expr(c.reverse) else begin
        self.put(mOut, at, hv, place, state)
        steps = end - begin - 1
        if const_expr(c.reverse):  # the dS_loc of the last segment has what comes from later
            if steps > 0:
                self.get(mLocal, 2 * (last + 1 - at), hv, place, state)
                self.put(mOut, at - 1, hv, place, state)
            at = at - 1
            steps = steps - 1
        if steps > 0:
            self.ask(mSummary, mLocal, last - at, V, hv, place, words, local)
        for i in cutlass.range(steps, unroll=1):
            following = at - i - 1 if const_expr(c.reverse) else at + i + 1
            cute.arch.sync_threads()
            for w in cutlass.range_constexpr(self.loads):
                cute.autovec_copy(words[None, w], self.part(sM, w, 0))
            for p in cutlass.range_constexpr(self.own):
                sS[own + p, row] = state[p]
                state[p] = local[p]
            cute.arch.sync_threads()
            if i + 1 < steps:
                self.ask(mSummary, mLocal, last - following, V, hv, place, words, local)
            for j in cutlass.range(K // WIDTH, unroll=2):
                if const_expr(c.reverse):
                    for u in cutlass.range_constexpr(WIDTH):
                        rM[u] = sM[j * WIDTH + u, row]
                else:
                    cute.autovec_copy(cute.local_tile(sM[row, None], (WIDTH,), (j,)), rM)
                for p in cutlass.range_constexpr(self.own):
                    cute.autovec_copy(cute.local_tile(sS[own + p, None], (WIDTH,), (j,)), rS)
                    for u in cutlass.range_constexpr(WIDTH):
                        state[p] = state[p] + rM[u] * rS[u]
            self.put(mOut, following, hv, place, state)
        if n == N - 1:
            state.fill(0.0)
            for s in cutlass.range(end, S, unroll=1):
                self.put(mOut, s, hv, place, state)

    @cute.jit
    def ask(
        self,
        mSummary: cute.Tensor,
        mLocal: cute.Tensor,
        back: Int32,
        V: Int32,
        hv: Int32,
        place,
        words,
        local,
    ):
        """M and this thread's elements of S_loc of a segment: entry 2 back, that of dS_loc one segment further on."""
        for w in cutlass.range_constexpr(self.loads):
            cute.autovec_copy(self.part(mSummary[2 * back, hv, None, None], w, V // WIDTH), words[None, w])
        self.get(mLocal, 2 * (back + int(self.config.reverse)), hv, place, local)

    def part(self, mM: cute.Tensor, w: int, before: Any) -> cute.Tensor:
        """The 16 bytes of this thread's load w, a row's by neighbouring threads, of M behind so many 16 bytes."""
        across = self.config.K // WIDTH
        t = cute.arch.thread_idx()[0]
        return cute.local_tile(
            mM[w * (THREADS // across) + t // across, None], (WIDTH,), (before + t % across,)
        )

    @cute.jit
    def get(self, mX: cute.Tensor, n: Int32, hv: Int32, place, x: cute.Tensor):
        row, column = place
        for p in cutlass.range_constexpr(self.own):
            x[p] = mX[n, hv, row, column + p]

    @cute.jit
    def put(self, mX: cute.Tensor, n: Int32, hv: Int32, place, x: cute.Tensor):
        row, column = place
        for p in cutlass.range_constexpr(self.own):
            mX[n, hv, row, column + p] = x[p]


@jit(arch=ARCH)
def _compile(config: Config) -> Program:
    """Arguments of :class:`KdaSegmentStatesSm90`; an absent operand is None."""
    c = config
    entries, N, N1, S, HV = (symbol() for _ in range(5))
    V, W = symbol(divisibility=COLUMNS), symbol(divisibility=COLUMNS)
    states = lambda count: tensor("float32", count, HV, *((V, c.K) if c.state_v_first else (c.K, V)), align=4)
    return Program(
        KdaSegmentStatesSm90(c),
        (
            tensor("float32", entries, HV, c.K, W),
            tensor("int32", N1, align=4),
            states(N) if c.given else None,
            states(entries) if c.reverse else None,
            states(S),
        ),
    )


def segment_states(
    summaries: Tensor, segments: Segments, given: Tensor | None, local: Tensor | None, v_first: bool
) -> Tensor:
    """As :func:`kernel_fun.kda.sequence_split.fold`, in one launch on the current stream of a Hopper GPU.

    All states fp32, K 64 or 128, V a multiple of 16.
    """
    HV, K, W = summaries.shape[1:]
    V = W - K
    shape = (segments.size, HV, *((V, K) if v_first else (K, V)))
    out = summaries.new_empty(shape)
    given = None if given is None else given.detach().contiguous()
    config = _config(K, local is not None, given is not None, v_first)
    _compile(config)(summaries, segments.first, given, local, out)
    return out


@lru_cache(maxsize=32)
def _config(K: int, reverse: bool, given: bool, state_v_first: bool) -> Config:
    return Config(K=K, reverse=reverse, given=given, state_v_first=state_v_first)

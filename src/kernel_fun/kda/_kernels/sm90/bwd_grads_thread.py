"""What a thread of the MATH role keeps of its place in bwd_grads, and what several phases do with it.

Plain methods, here and in the phases, are Python, traced inline, and run on a modelled warp as well; the others hold
branches of the kernel.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from kernel_fun._cute import pipe, sweep
from kernel_fun._cute.decay import LOG2E, exp2, magnitude
from kernel_fun._cute.pipe import WARPGROUP
from kernel_fun._cute.sweep import Lanes
from kernel_fun._cute.tile import Tile, words_of
from kernel_fun._cute.warp import as_float, select, unpack
from kernel_fun.kda._kernels.sm90.bwd_grads_config import (
    ADDRESSES,
    BLOCK_BYTES,
    BT,
    CHANNELS,
    EIGHTS,
    HALF_BYTES,
    MATH,
    V,
)

LEAST_BETA = 2.0**-40
"""A beta below it in magnitude is it where a product with beta is divided by beta again."""


class Thread:
    """Of a kernel with a config ``c``, dtypes ``io`` and ``g``, and tiles of shared memory."""

    c: Any
    io: Any
    g: Any
    row: Tile
    row_t: Tile
    state: Tile
    xx: Tile
    square: Tile
    square_t: Tile

    def lanes(self, st: Any) -> None:
        """What a thread keeps of its place: its lane, and bytes in shared memory."""
        at = {x: getattr(st, x).data_ptr().toint() for x in ADDRESSES}
        tid = pipe.thread_again()
        uniform = cute.arch.make_warp_uniform
        self.place_lane(at, tid, uniform(tid >> 7), uniform(tid >> 5), Lanes(tid & 31))
        self.tidx = tid & (WARPGROUP - 1)
        self.h_at = st.state.data_ptr().toint() + self.wg * HALF_BYTES + self.own_rows
        self.v_at = st.row.data_ptr().toint() + ((V * HALF_BYTES + self.own_rows) ^ (64 * self.wg))
        self.A_words = words_of(st.A, HALF_BYTES // 4)
        self.q_words, self.k_words = (words_of(x, HALF_BYTES // 2) for x in (st.q, st.k))
        self.g_words = words_of(st.g, self.g.width // 8 * HALF_BYTES // 4)
        self.row_words = words_of(st.row, 4 * self.c.stages * HALF_BYTES // 4)

    def again(self, st: Any) -> Thread:
        """The same with its place computed anew, so that none of it waits in registers."""
        other = copy(self)
        other.lanes(st)
        return other

    def place_lane(self, at: dict[str, Any], tid: Any, wg: Any, warp_index: Any, lane: Lanes) -> None:
        """``at``: addresses of the fields of :data:`ADDRESSES`."""
        self.tid, self.wg, self.warp, self.lane, self.at = tid, wg, warp_index, lane, at
        w = warp_index & 3
        self.first_row = 16 * w
        self.channel = 16 * warp_index + lane.r
        # 16 channels of the warp in a tile of 64 tokens, transposed on the way; and 16 rows in accumulator layout
        own = (wg * HALF_BYTES + lane.rows_first) ^ (32 * w)
        self.own_rows = w * BLOCK_BYTES + lane.units_first
        self.q_at, self.k_at, self.X_own = (at[x] + own for x in ("q", "k", "X"))
        self.X_at, self.Y_at = at["X"], at["Y"]
        self.exchange = at["X"] + 16 * sweep.CHANNEL_BYTES * warp_index + lane.exchange
        # of the gate: two channels, 16 tokens
        self.pair, self.quarter = tid & (BT - 1), tid >> 6
        self.walk = at["X"] + sweep.walk(self.pair, 2 * self.quarter)
        log = 5 if self.g.width == 16 else 4  # 2^log pairs in a row of 128 bytes
        unit, rest = (self.pair >> (log - 3)) & 7, self.pair & ((1 << (log - 3)) - 1)
        at_g = (self.pair >> log) * HALF_BYTES + unit * 16 + rest * (self.g.width // 4)
        self.g_at = at["g"] + self.quarter * BLOCK_BYTES + at_g

    def publish(self, barrier: int, threads: int) -> None:
        """What these threads stored is there for all of them, WGMMA and TMA included."""
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)

    @cute.jit
    def blank(self, words: cute.Tensor, at: Int32, valid: Int32, x: Int32):
        """Rows past the last token of a tile with rows of 128 bytes, ``at`` words from the first."""
        for t in cutlass.range(valid + self.warp, BT, MATH.warps, unroll=1):
            words[at + t * 32 + self.lane.lane] = x

    def factors(self) -> list[Any]:
        """w of the thread's fragments, eight after eight."""
        at = [sweep.of_fragment(self.exchange, n, row) for n in range(EIGHTS) for row in range(2)]
        return [x for address in at for x in sweep.load2(address)]

    def ends(self, n: int) -> tuple[list[Any], list[Any]]:
        """s and e of an eight by channel row."""
        x = [sweep.load2(self.Y_at + 8 * self.channel + 64 * row + 8 * CHANNELS * n) for row in range(2)]
        return [y[0] for y in x], [y[1] for y in x]

    def between(self) -> tuple[Any, Any, list[Any]]:
        """(s of the first eight, e of the last, t) by channel row."""
        ends = [self.ends(n) for n in range(EIGHTS)]
        t = [[ends[n][1][row] * ends[n + 1][0][row] for row in range(2)] for n in range(EIGHTS - 1)]
        return ends[0][0], ends[-1][1], t

    def of_tokens(self, name: str, n: int) -> tuple[Any, Any]:
        """fp32 values of the lane's two tokens of an eight."""
        return sweep.load2(self.at[name] + 32 * n + 8 * self.lane.c)


def put_word(address: Int32, x: Float32) -> None:
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, x])


def put_bits(address: Int32, x: Int32) -> None:
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, x])


def load_float(address: Int32) -> Float32:
    ptx = "ld.shared.f32 {$w0}, [{$r0}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[address])


def load_bits(mX: cute.Tensor, at: tuple[Any, ...]) -> Int32:
    """A value of global memory as it stands, without waiting for it."""
    address = (mX.iterator + mX.layout(at)).toint()
    kind = "b32 {$w0}, [{$r0}];" if mX.element_type.width == 32 else "u16 {$w0}, [{$r0}];"
    return cute.arch.inline_ptx("ld.global." + kind, write_only_types=[Int32], read_only_args=[address])


def of_bits(word: Int32, dtype: Any) -> Float32:
    """The low value of a word."""
    if dtype is Float32:
        return as_float(word)
    return unpack(word, dtype)[0]


def not_zero(beta: Float32) -> Float32:
    """beta, or the least one where it is smaller in magnitude."""
    least = Float32(LEAST_BETA)
    return select(magnitude(beta) < least, least, beta)


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x); 0 and 1 at the ends."""
    return cute.arch.rcp_approx(1.0 + exp2(x * -LOG2E))

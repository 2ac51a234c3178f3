"""The phases of bwd_grads, as its file names them: what the threads of the MATH role compute, and where they put it.

Plain methods are Python, traced inline, and run on a modelled warp as well; the others hold branches of the kernel.
"""

# sizes: four phases share one set of registers, and read in order
from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from enum import IntEnum
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kernel_fun._cute import pipe, sweep, wgmma
from kernel_fun._cute.decay import LOG2E, NO_DECAY, Gate, exp2, magnitude
from kernel_fun._cute.pipe import WARPGROUP, Role
from kernel_fun._cute.sweep import Lanes
from kernel_fun._cute.tile import Tile
from kernel_fun._cute.warp import load4, matrices, pack, select, unpack

BT = 64
EIGHTS = BT // sweep.EIGHT
CHANNELS = 128
"""Channels of an item; those past K are zeros."""
BV = 64
"""Values a turn of the ring."""
MATH = Role(0, 8, 240)
HALF_BYTES = BT * sweep.ROW_BYTES
"""64 channels, or 64 values, of 64 tokens."""
BLOCK_BYTES = 16 * sweep.ROW_BYTES
LOG1P = (
    0.9999432772835241,
    -0.4969777852044154,
    0.3063008299427745,
    -0.15742704909129315,
    0.04134722378502642,
)
"""P(e) = log1p(e) / e on [0, 1], lowest power first, relative error below 6e-5: for dA_log, a weighted sum of decays."""
LN2 = 0.6931471805599453
FLT_MAX = 3.4028234663852886e38
LEAST_LOG2 = -126.0
"""Below 2 to this, a decay is 0."""
LEAST_BETA = 2.0**-40
"""A beta below it in magnitude is it where a product with beta is divided by beta again."""
RMEM, SMEM = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
TOKEN_VECTORS = ("beta", "q_factor", "b_factor", "k_factor", "diagonal")
"""fp32 a token: beta; scale rstd, beta rstd, rstd of Q, B, K, the first two then -(dy . y) rstd^2 of the norms; dAqk_ii."""
ADDRESSES = ("q", "k", "g", "X", "Y", "A", *TOKEN_VECTORS, "base", "seen", "dvb_v")
DO, V_NEW, DV2, V = range(4)
"""Places of the [64, 64] tiles of a ring slot."""


class Barrier(IntEnum):
    """Named barriers of the MATH role."""

    MATH = 1
    HALF = 2


class Phases:
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

    def query_head(self, hv: Int32, G: Int32) -> Int32:
        return hv // G if self.c.shared else hv

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

    def again(self, st: Any) -> Phases:
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

    @cute.jit
    def read_head(self, mA_log, mDt_bias, hv: Int32, A_log: cute.Tensor, bias: cute.Tensor):
        """A_log of the head and its biases of the thread's two channels to registers, without waiting for them."""
        if cutlass.const_expr(self.c.has_A_log):
            A_log[0] = mA_log[hv]
        if cutlass.const_expr(self.c.has_dt_bias):
            if 2 * self.pair < self.c.K:
                for i in cutlass.range_constexpr(2):
                    bias[i] = mDt_bias[hv * self.c.K + 2 * self.pair + i]

    def gate(self, A_log: cute.Tensor, lower_bound: Float32) -> Gate:
        return Gate.of_head(self.c.gate, A_log[0] if self.c.has_A_log else None, lower_bound)

    def publish(self, barrier: int, threads: int) -> None:
        """What these threads stored is there for all of them, WGMMA and TMA included."""
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)

    def no_decay_word(self) -> Int32:
        x = Float32(NO_DECAY[self.c.gate])
        return bits(x) if self.g.width == 32 else pack(x, x, self.g)

    @cute.jit
    def blank(self, words: cute.Tensor, at: Int32, valid: Int32, x: Int32):
        """Rows past the last token of a tile with rows of 128 bytes, ``at`` words from the first."""
        for t in cutlass.range(valid + self.warp, BT, MATH.warps, unroll=1):
            words[at + t * 32 + self.lane.lane] = x

    @cute.jit
    def read_scalars(
        self, mBeta, mQ_rstd, mK_rstd, raw_beta, scalars, first: Int32, valid: Int32, hv: Int32, h: Int32
    ):
        """beta and the reciprocal norms of a token to registers, an item ahead."""
        scalars.fill(1.0)
        if self.tid < valid:
            raw_beta[0] = load_bits(mBeta, (first + self.tid, hv))
            if cutlass.const_expr(self.c.l2norm):
                scalars[0], scalars[1] = mQ_rstd[first + self.tid, h], mK_rstd[first + self.tid, h]

    @cute.jit
    def put_scalars(self, mBeta, raw_beta, scalars, valid: Int32, scale: Float32):
        """beta, activated, and the factors of a token to shared memory."""
        if self.tid < BT:
            beta = of_bits(raw_beta[0], mBeta.element_type)
            if cutlass.const_expr(self.c.beta_mode != "raw"):
                top = 2.0 if self.c.beta_mode == "sigmoid2" else 1.0
                beta = top * sigmoid(beta)
            beta = select(self.tid < valid, beta, Float32(0.0))
            q, k = scalars[0], scalars[1]
            for name, x in (
                ("beta", beta),
                ("q_factor", scale * q),
                ("b_factor", not_zero(beta) * k),
                ("k_factor", k),
            ):
                put_word(self.at[name] + 4 * self.tid, x)

    @cute.jit
    def products(
        self, st, ring, at, mDv, dq, dk, dw, square, states, seen, dvb_v, first: Int32, valid: Int32, hv: Int32,
        NV: Int32,
    ):  # fmt: skip
        """A: all that is contracted over values. ``square``: dAqk (warpgroup 0), dM (1). ``dw`` without its sign.

        states: s of the thread's two channels, over its own values. seen: bits of S of these channels.
        dvb_v: dvb . v of the thread's two tokens, over its own values. Returns the ring's cursor.
        """
        rs = product(self.io, BT, RMEM, K_MAJOR, K_MAJOR)
        ss = product(self.io, BT, SMEM, K_MAJOR, K_MAJOR)
        through = product(self.io, BV // 2, SMEM, MN_MAJOR, MN_MAJOR)
        thr, thr_ss, thr_through = (x.get_slice(self.tidx) for x in (rs, ss, through))
        sRow = self.row.view(st.row)
        sDv2 = cute.local_tile(self.row_t.view(st.row), (BV // 2, BT, 4 * self.c.stages), (self.wg, 0, 0))
        bRow = thr.make_fragment_B(thr.partition_B(sRow))
        aRow, bRow_ss = (
            thr_ss.make_fragment_A(thr_ss.partition_A(sRow)), thr_ss.make_fragment_B(thr_ss.partition_B(sRow)),
        )  # fmt: skip
        aA = thr_through.make_fragment_A(thr_through.partition_A(self.square_t.view(st.A)))
        bDv2 = thr_through.make_fragment_B(thr_through.partition_B(sDv2))
        wH, wDh = (cute.make_rmem_tensor(16, Int32) for _ in range(2))
        rH, rDh = (as_operand(thr, x, self.io) for x in (wH, wDh))
        acc_q, acc_k, acc_w, acc_s = (as_accumulator(thr, x, BT) for x in (dq, dk, dw, square))
        dvb = cute.make_rmem_tensor(16, Float32)
        acc_v = as_accumulator(thr_through, dvb, BV // 2)
        for x in (states, dvb_v):
            x.fill(0.0)
        seen.fill(0)
        tile = 2 * self.wg
        token_0 = self.first_row + self.lane.r
        beta = [load_float(self.at["beta"] + 4 * token_0 + 32 * w) for w in range(2)]
        wDv = cute.recast_tensor(mDv, Int32)
        place = self.wg * (BV // 4) + self.lane.c
        for n in cutlass.range(NV, unroll=1):
            ring.wait_full(at)
            s = at.index
            if valid < BT:
                for i in cutlass.range_constexpr(4):
                    at_row = (4 * s + i) * (HALF_BYTES // 4)
                    self.blank(self.row_words, at_row, valid, Int32(0))
                self.publish(Barrier.MATH, MATH.threads)
            do, v_new, dv2 = (bRow[None, None, None, 4 * s + i] for i in (DO, V_NEW, DV2))
            wgmma.fence()
            steps(
                ss, acc_s, aRow[None, None, None, 4 * s + DO + tile], bRow_ss[None, None, None, 4 * s + V_NEW + tile],
                n > 0,
            )  # fmt: skip
            steps(through, acc_v, aA[None, None, None, 0], bDv2[None, None, None, 4 * s + DV2], False)
            warpgroup.commit_group()
            for k in cutlass.range_constexpr(4):
                at_h = (self.h_at + 4 * HALF_BYTES * s) ^ (32 * k)
                h, dh = matrices(at_h), matrices(at_h + 2 * HALF_BYTES)
                for i in cutlass.range_constexpr(4):
                    wH[4 * k + i], wDh[4 * k + i] = h[i], dh[i]
            wgmma.fence()
            for a, acc, x in ((rH, acc_q, do), (rH, acc_w, dv2), (rDh, acc_k, v_new)):
                steps(rs, acc, a, x, n > 0)
            warpgroup.commit_group()
            for i in cutlass.range_constexpr(16):
                h, dh = unpack(wH[i], self.io), unpack(wDh[i], self.io)
                for p in cutlass.range_constexpr(2):
                    states[i % 2] = states[i % 2] + h[p] * dh[p]
                seen[i % 2] = seen[i % 2] | wH[i]
            warpgroup.wait_group(1)
            # dv = beta dvb of 32 values, dbeta += dvb . v
            dv = []
            for j in cutlass.range_constexpr(2):
                words = matrices((self.v_at + 4 * s * HALF_BYTES) ^ (32 * j))
                for i in cutlass.range_constexpr(4):
                    w, tile_n = i % 2, 2 * j + i // 2
                    x, y = dvb[4 * tile_n + 2 * w], dvb[4 * tile_n + 2 * w + 1]
                    v = unpack(words[i], self.io)
                    dvb_v[w] = dvb_v[w] + (x * v[0] + y * v[1])
                    dv.append(pack(x * beta[w], y * beta[w], self.io))
            for w in cutlass.range_constexpr(2):
                if token_0 + 8 * w < valid:
                    row_dv = wDv[first + token_0 + 8 * w, hv, None]
                    for i in cutlass.range_constexpr(4):
                        row_dv[n * (BV // 2) + place + 4 * i] = dv[2 * i + w]
            warpgroup.wait_group(0)
            ring.free(at)
            at.advance()
        return at

    def gate_inputs(self, bias: Any, n: Any) -> list[list[Any]]:
        """Raw gates of eight ``n`` of the thread's two, dt_bias added: for each of its channels, by token."""
        rows = []
        for i in range(sweep.EIGHT):
            at = self.at_gate(n, i)
            rows.append(sweep.load2(at) if self.g.width == 32 else unpack(sweep.load_word(at), self.g))
        return [[x[odd] + bias[odd] if self.c.has_dt_bias else x[odd] for x in rows] for odd in range(2)]

    @cute.jit
    def scan(self, gate: cutlass.Constexpr[Any], bias: cute.Tensor):
        """B: the gate's w, s, e to X and Y."""
        for n in cutlass.range(2, unroll=1):
            self.scan_eight(gate, bias, n)

    def scan_eight(self, gate: Gate, bias: Any, n: Any) -> None:
        """w, s, e of eight ``n`` of the thread's two, to X and Y."""
        ends = []
        for odd, x in enumerate(self.gate_inputs(bias, n)):
            w, s, e = sweep.eight([cutlass.max(gate.decay(y), Float32(sweep.LEAST_DECAY)) for y in x])
            for half in range(2):
                at = sweep.of_tokens(self.walk ^ (32 * n), odd, half)
                sweep.put4(at, w[4 * half : 4 * half + 4])
            ends += [s, e]
        sweep.put4(self.Y_at + 16 * self.pair + (2 * self.quarter + n) * (8 * CHANNELS), ends)

    @cute.jit
    def put_dvb_v(self, dvb_v: cute.Tensor):
        """dvb . v over a warpgroup's values to shared memory."""
        for w in cutlass.range_constexpr(2):
            x = sweep.sum_quad(dvb_v[w])
            if self.lane.c == 0:
                put_word(self.at["dvb_v"] + 4 * (self.wg * BT + self.first_row + self.lane.r + 8 * w), x)

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

    def eights(self, at: Int32) -> Iterator[list[Any]]:
        """q or k in fp32, by eights."""
        for b in range(BT // 16):
            words = sweep.matrices_transposed(at + BLOCK_BYTES * b)
            for n in range(2):
                yield sweep.unpack_values(words[2 * n : 2 * n + 2], self.io)

    def queries(self, w: list[Any]) -> list[list[Int32]]:
        """Words of Q by eights."""
        out = []
        for n, q in enumerate(self.eights(self.q_at)):
            factor = self.of_tokens("q_factor", n)
            x = [q[e] * (w[4 * n + e] * factor[e % 2]) for e in range(sweep.VALUES)]
            out.append(sweep.pack_values(x, BFloat16))
        return out

    def betas(self, w: list[Any], s: Any, t: list[Any]) -> list[list[Int32]]:
        """Words of B by eights; beta k^ E to shared memory."""
        out, E, kE = [], s, []
        for n, k in enumerate(self.eights(self.k_at)):
            if n % 2 == 0:
                cute.arch.sync_warp()
            factor = self.of_tokens("b_factor", n)
            x = [k[e] * (w[4 * n + e] * factor[e % 2]) for e in range(sweep.VALUES)]
            out.append(sweep.pack_values(x, BFloat16))
            kE += sweep.pack_values(sweep.scaled(x, E), self.io)
            if n % 2:
                at = self.X_own + 2 * HALF_BYTES + BLOCK_BYTES * (n // 2)
                sweep.put_matrices_transposed(at, kE)
                kE = []
            if n < EIGHTS - 1:
                E = [E[row] * t[n][row] for row in range(2)]
        return out

    @cute.jit
    def through_A(self, st, dq, dk, dw, square, w: cutlass.Constexpr[Any], between: cutlass.Constexpr[Any]):
        """B: dAqk, dAkk to shared memory; ``dw`` becomes rk without E. Returns the words of Q and B by eights."""
        io = self.io
        s, _, t = between
        words_w = cute.make_rmem_tensor(16, Int32)
        for b in cutlass.range_constexpr(4):
            x = sweep.pack_values([-dw[8 * b + e] for e in range(8)], io)
            for i in cutlass.range_constexpr(4):
                words_w[4 * b + i] = x[i]
            sweep.put_matrices_transposed(self.X_own + BLOCK_BYTES * b, x)
        B = self.betas(w, s, t)
        # without a branch, which would keep WGMMA from running ahead
        for n in cutlass.range_constexpr(EIGHTS):
            beta = [select(self.wg == 1, x, Float32(1.0)) for x in self.of_tokens("beta", n)]
            for e in cutlass.range_constexpr(4):
                square[4 * n + e] = square[4 * n + e] * beta[e % 2]
        self.publish(Barrier.MATH, MATH.threads)

        rs_n = product(io, BT, RMEM, K_MAJOR, MN_MAJOR)
        thr_n = rs_n.get_slice(self.tidx)
        bA_n = thr_n.make_fragment_B(thr_n.partition_B(self.square_t.view(st.A)))
        acc_w = as_accumulator(thr_n, dw, BT)
        acc_s = as_accumulator(thr_n, square, BT)
        wgmma.fence()
        steps(rs_n, acc_w, as_operand(thr_n, words_w, io), bA_n[None, None, None, 0], False)
        warpgroup.commit_group()
        if self.wg == 1:
            ss = product(io, BT, SMEM, K_MAJOR, K_MAJOR)
            thr_ss = ss.get_slice(self.tidx)
            sX = self.xx.view(st.X)
            aX = thr_ss.make_fragment_A(thr_ss.partition_A(sX))
            bX = thr_ss.make_fragment_B(thr_ss.partition_B(sX))
            steps(ss, acc_s, aX[None, None, None, 0], bX[None, None, None, 1])
            warpgroup.commit_group()
        warpgroup.wait_group(0)
        Q = self.queries(w)
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        if self.wg == 1:
            self.through_inverse(st, square)
        else:
            self.put_diagonal(square)
            self.put_square(square, self.X_at, self.X_at + sweep.REST_BYTES)
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        return [[*Q[n], *B[n]] for n in range(EIGHTS)]

    @cute.jit
    def through_inverse(self, st, square):
        """dAkk = -tril_-1(A^T tril_-1(square) A^T), warpgroup 1."""
        io = self.io
        words = cute.make_rmem_tensor(16, Int32)
        x = sweep.pack_values(self.lower(square), io)
        for i in cutlass.range_constexpr(16):
            words[i] = x[i]
        rs = product(io, BT, RMEM, K_MAJOR, K_MAJOR)
        thr = rs.get_slice(self.tidx)
        bA = thr.make_fragment_B(thr.partition_B(self.square.view(st.A)))
        acc = as_accumulator(thr, square, BT)
        wgmma.fence()
        steps(rs, acc, as_operand(thr, words, io), bA[None, None, None, 0], False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        # over dw, which is dead
        Z = self.X_at + 2 * HALF_BYTES
        for j in cutlass.range_constexpr(4):
            x = sweep.pack_values([square[8 * j + e] for e in range(8)], io)
            sweep.put_matrices((Z + self.own_rows) ^ (32 * j), x)
        self.publish(Barrier.HALF, WARPGROUP)
        ss = product(io, BT, SMEM, MN_MAJOR, MN_MAJOR)
        thr_ss = ss.get_slice(self.tidx)
        aA = thr_ss.make_fragment_A(thr_ss.partition_A(self.square_t.view(st.A)))
        sZ = Tile(io, BT, BT, 4, rows_contiguous=True).view(st.X)
        bZ = thr_ss.make_fragment_B(thr_ss.partition_B(sZ))
        wgmma.fence()
        steps(ss, acc, aA[None, None, None, 0], bZ[None, None, None, 2], False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for e in cutlass.range_constexpr(32):
            square[e] = -square[e]
        self.put_square(square, self.X_at + HALF_BYTES)

    def lower(self, square: Any) -> list[Any]:
        """The strictly lower triangle, in accumulator order."""
        row_less_column = self.first_row + self.lane.r - 2 * self.lane.c
        column_less_row = [8 * (i // 4) + i % 2 - 8 * (i // 2 % 2) for i in range(32)]
        return [select(row_less_column > column_less_row[i], square[i], Float32(0.0)) for i in range(32)]

    def put_square(self, square: Any, address: Int32, rest: Int32 | None = None) -> None:
        """The strictly lower triangle, rounded, to shared memory; what rounding left of it to ``rest``."""
        lower = self.lower(square)
        for j in range(4):
            x = lower[8 * j : 8 * j + 8]
            words = sweep.pack_values(x, BFloat16)
            sweep.put_matrices((address + self.own_rows) ^ (32 * j), words)
            if rest is not None:
                y = sweep.unpack_values(words, BFloat16)
                left = sweep.pack_values([x[e] - y[e] for e in range(8)], BFloat16)
                sweep.put_matrices((rest + self.own_rows) ^ (32 * j), left)

    @cute.jit
    def put_diagonal(self, square):
        """The diagonal to shared memory."""
        w, odd = self.first_row >> 4, (self.lane.r & 1) != 0
        for row in cutlass.range_constexpr(2):
            x = [select(odd, square[8 * i + 6 * row + 1], square[8 * i + 6 * row]) for i in range(4)]
            y = select(w < 2, select(w == 0, x[0], x[1]), select(w == 2, x[2], x[3]))
            if self.lane.r >> 1 == self.lane.c:
                put_word(self.at["diagonal"] + 4 * (self.first_row + self.lane.r + 8 * row), y)

    def sweeps(
        self, w: Any, QB: Any, between: Any, dq: Any, dk: Any, rk: Any
    ) -> tuple[list[list[Any]], list[Any]]:
        """C: dq, dk of the chunk, in place; ``rk`` becomes dg.

        Returns sums over the warp's channels of beta k^ rk, q^ dq and k^ (dk - beta rk), of two tokens of eight r in
        lane 4 r + c, and sum_t k^ (R dk) of the thread's two channels and 16 tokens.
        """
        s, e, t = between
        # half of w waits where Z and A were
        parked = [
            x + 16 * self.tid + 4096 * i for x in (self.X_at + 2 * HALF_BYTES, self.at["A"]) for i in range(2)
        ]
        for i in range(4):
            sweep.put4(parked[i], w[16 + 4 * i : 20 + 4 * i])
        w = w[:16]
        rows, columns = self.X_at + self.lane.rows, self.X_at + self.lane.columns
        K: list[list[Int32]] = []
        sums: list[list[tuple[int, list[Any]]]] = [[], [], []]
        k_dk: list[Any] = []
        words: Any = ()
        for n in range(EIGHTS):
            own = range(4 * n, 4 * n + 4)
            cute.arch.sync_warp()
            if n >= 4:
                w += load4(parked[n - 4])
            if n % 2 == 0:
                words = sweep.matrices_transposed(self.k_at + BLOCK_BYTES * (n // 2))
            k = sweep.unpack_values(words[n % 2 * 2 : n % 2 * 2 + 2], self.io)
            by_q, by_b, by_k = (self.of_tokens(x, n) for x in ("q_factor", "b_factor", "k_factor"))
            v = [cute.arch.rcp_approx(w[i]) * by_k[i % 2] for i in own]
            K.append(sweep.pack_values([k[i] * v[i] for i in range(4)], BFloat16))
            k = sweep.unpack_values(K[n], BFloat16)
            against = [
                k[2 * row] * dk[own[2 * row]] + k[2 * row + 1] * dk[own[2 * row + 1]] for row in range(2)
            ]
            k_dk = against if n == 0 else [k_dk[row] * t[n - 1][row] + against[row] for row in range(2)]
            before, here, after = (self.ends(i) if 0 <= i < EIGHTS else None for i in (n - 1, n, n + 1))
            near = (before[1] if before else None, here[0])
            Pq, Pk = sweep.queries(rows, n, [dq[i] for i in own], [rk[i] for i in own], K, s, t, near)
            near = (after[0] if after else None, here[1])
            Pc = sweep.keys(columns, n, [dk[i] for i in own], QB, e, t, near)
            qb, diagonal = sweep.unpack_values(QB[n], BFloat16), self.of_tokens("diagonal", n)
            Pq = [Pq[i] + diagonal[i % 2] * k[i] for i in range(4)]
            Pc = [Pc[i] + diagonal[i % 2] * qb[i] for i in range(4)]
            terms = [[qb[4 + i] * Pk[i] for i in range(4)], [qb[i] * Pq[i] for i in range(4)]]
            terms.append([k[i] * Pc[i] for i in range(4)])
            for i in range(4):
                at = own[i]
                dq[at] = Pq[i] * (w[at] * by_q[i % 2])
                dk[at] = Pk[i] * (w[at] * by_b[i % 2]) + Pc[i] * v[i]
                rk[at] = terms[1][i] + (terms[0][i] - terms[2][i])
            for kind in range(3):
                sweep.fold(
                    sums[kind], [terms[kind][p] + terms[kind][2 + p] for p in range(2)], self.lane.lane
                )
        return [x[0][1] for x in sums], [k_dk[row] * e[row] for row in range(2)]

    def of_states(self, states: Any, k_dk: list[Any], between: Any) -> list[Any]:
        """What every dl of a channel gets from the states: total s + sum_t k^ (R dk), by channel row."""
        s, e, t = between
        out = []
        for row in range(2):
            total = s[row] * e[row]
            for x in t:
                total = total * x[row]
            out.append(sweep.sum_quad(states[row] * total + k_dk[row]))
        return out

    @cute.jit
    def put_states(self, states, seen, between: cutlass.Constexpr[Any], k_dk: cutlass.Constexpr[Any]):
        """That, and whether S has anything of a channel, to shared memory."""
        x = self.of_states(states, k_dk, between)
        for row in cutlass.range_constexpr(2):
            some = seen[row]
            for i in cutlass.range_constexpr(2):
                some = some | cute.arch.shuffle_sync_bfly(some, offset=1 << i)
            if self.lane.c == 0:
                put_word(self.at["base"] + 4 * self.channel + 32 * row, x[row])
                y = select(some == 0, Float32(0.0), Float32(1.0))
                put_word(self.at["seen"] + 4 * self.channel + 32 * row, y)

    @cute.jit
    def finish(
        self, st, out_qk, at_out_qk, A_log, lower_bound: Float32, bias, dq, dk, dg,
        sums: cutlass.Constexpr[Any], mBeta, mQ_rstd, mDq, mDk, mDg, mDbeta, mDA, mDbias, chunk: Int32, hv: Int32,
        first: Int32, valid: Int32, h: Int32,
    ):  # fmt: skip
        """D: sums over channels and tokens, the derivatives of gate, norm and beta, stores."""
        c = self.c
        normal = c.l2norm and not c.shared
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        self.put_sums(sums[: 3 if normal else 1], dg)
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        self.sum_warps(mBeta, mQ_rstd, mDbeta, first, valid, hv, h)
        self.put_quarter_sums()
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        if cutlass.const_expr(c.shared):
            self.store_shares(dq, mDq, first, valid, hv)
            self.store_shares(dk, mDk, first, valid, hv)
        else:
            self.put_rows(dq, self.q_at, "q_factor")
            self.put_rows(dk, self.k_at, "b_factor")
        if valid == BT:
            out_qk.publish(at_out_qk)
        carry = cute.make_rmem_tensor(2, Float32)
        base, seen = (sweep.load2(self.at[name] + 8 * self.pair) for name in ("base", "seen"))
        for odd in cutlass.range_constexpr(2):
            carry[odd] = base[odd]
        for i in cutlass.range_constexpr(1, 4):
            later = sweep.load2(self.at["Y"] + 6144 + 512 * i + 8 * self.pair)
            for odd in cutlass.range_constexpr(2):
                carry[odd] = carry[odd] + select(self.quarter < i, later[odd], Float32(0.0))
        out = cute.make_rmem_tensor(3, Float32)
        out.fill(0.0)
        gate = self.gate(A_log, lower_bound)
        for n in cutlass.range(2, unroll=1):
            self.gate_eight(gate, lower_bound, bias, carry, seen, out, 1 - n)
        if cutlass.const_expr(mDA is not None):
            dA = out[0]
            for i in cutlass.range_constexpr(5):
                dA = dA + cute.arch.shuffle_sync_bfly(dA, offset=1 << i)
            sDA = st.dA.get_tensor(cute.make_layout(MATH.warps))
            if self.lane.lane == 0:
                sDA[self.warp] = dA
        if cutlass.const_expr(mDbias is not None):
            sweep.put2(self.at["Y"] + 512 * self.quarter + 8 * self.pair, [out[1], out[2]])
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        if valid < BT:
            self.store_rows(self.at["g"], mDg, first, valid, hv)
            if cutlass.const_expr(not c.shared):
                self.store_rows(self.at["q"], mDq, first, valid, h)
                self.store_rows(self.at["k"], mDk, first, valid, h)
            out_qk.publish(at_out_qk)
        if cutlass.const_expr(mDbias is not None):
            if self.tid < c.K:
                parts = [load_float(self.at["Y"] + 512 * i + 4 * self.tid) for i in range(4)]
                mDbias[chunk, hv, self.tid] = (parts[0] + parts[1]) + (parts[2] + parts[3])
        if cutlass.const_expr(mDA is not None):
            if self.tid == CHANNELS:
                dA = sDA[0]
                for i in cutlass.range_constexpr(1, MATH.warps):
                    dA = dA + sDA[i]
                mDA[chunk, hv] = dA

    def put_sums(self, sums: list[list[Any]], dg: Any) -> None:
        """Sums over the warp's channels to its row in Y, dg to X."""
        for kind, x in enumerate(sums):
            sweep.put2(self.Y_at + 2048 * kind + 256 * self.warp + 32 * self.lane.r + 8 * self.lane.c, x)
        for n in range(EIGHTS):
            for row in range(2):
                sweep.put2(
                    sweep.of_fragment(self.exchange, n, row), [dg[4 * n + 2 * row + p] for p in range(2)]
                )

    @cute.jit
    def sum_warps(self, mBeta, mQ_rstd, mDbeta, first: Int32, valid: Int32, hv: Int32, h: Int32):
        """dbeta to global, and -(dy . y) rstd^2 of the norms to shared memory."""
        c = self.c
        normal = cutlass.const_expr(c.l2norm and not c.shared)
        t, kind = self.tid & (BT - 1), self.tid >> 6
        if kind < (3 if normal else 1):
            x = self.sum_of_warps(t, kind)
            if kind == 0:
                if t < valid:
                    x = x * cute.arch.rcp_approx(not_zero(load_float(self.at["beta"] + 4 * t)))
                    dvb_v = [load_float(self.at["dvb_v"] + 4 * (t + BT * i)) for i in range(2)]
                    x = x + (dvb_v[0] + dvb_v[1])
                    if cutlass.const_expr(c.beta_mode != "raw"):
                        top = 2.0 if c.beta_mode == "sigmoid2" else 1.0
                        beta = mBeta[first + t, hv].to(Float32)
                        x = x * (top * sigmoid(beta) * sigmoid(-beta))
                    mDbeta[first + t, hv] = x.to(mDbeta.element_type)
            elif kind == 1:
                if cutlass.const_expr(normal):
                    if t < valid:
                        rstd = mQ_rstd[first + t, h]
                        put_word(self.at["q_factor"] + 4 * t, -x * rstd * rstd)
            else:
                rstd = load_float(self.at["k_factor"] + 4 * t)
                put_word(self.at["b_factor"] + 4 * t, -(x + self.sum_of_warps(t, 0)) * rstd * rstd)

    def sum_of_warps(self, t: Any, kind: Any) -> Any:
        """Over the warps, of sums over their channels."""
        x = [load_float(self.at["Y"] + 4 * t + 2048 * kind + 256 * i) for i in range(MATH.warps)]
        return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))

    def put_quarter_sums(self) -> None:
        """dg over the thread's 16 tokens, past the sums over warps in Y."""
        out = []
        for odd in range(2):
            at = [sweep.of_tokens(self.walk ^ (32 * n), odd, half) for n in range(2) for half in range(2)]
            x = [y for address in at for y in load4(address)]
            while len(x) > 1:
                x = [x[i] + x[i + 1] for i in range(0, len(x), 2)]
            out += x
        sweep.put2(self.Y_at + 6144 + 512 * self.quarter + 8 * self.pair, out)

    def put_rows(self, dx: Any, at: Int32, dot: str) -> None:
        """dq or dk, rounded, over q or k; with l2norm less what the norm takes."""
        for b in range(BT // 16):
            words = sweep.matrices_transposed(at + BLOCK_BYTES * b)
            out = []
            for n in (2 * b, 2 * b + 1):
                y = [dx[4 * n + i] for i in range(4)]
                if self.c.l2norm:
                    x, by = (
                        sweep.unpack_values(words[n % 2 * 2 : n % 2 * 2 + 2], self.io),
                        self.of_tokens(dot, n),
                    )
                    y = [y[i] + by[i % 2] * x[i] for i in range(4)]
                out += sweep.pack_values(y, self.io)
            sweep.put_matrices_transposed(at + BLOCK_BYTES * b, out)

    def gate_eight(
        self, gate: Gate, lower_bound: Any, bias: Any, carry: Any, seen: Any, out: Any, n: Any
    ) -> None:
        """dg of eight ``n`` of the thread's two, over g; ``carry``: dl of the token after it."""
        dx = []
        for odd, x in enumerate(self.gate_inputs(bias, n)):
            at = self.walk ^ (32 * n)
            dl = [y for half in range(2) for y in load4(sweep.of_tokens(at, odd, half))]
            of_channel: list[Any] = [None] * sweep.EIGHT
            for i in range(sweep.EIGHT - 1, -1, -1):
                carry[odd] = carry[odd] + dl[i]
                y = carry[odd]
                if i == 0:
                    y = select(2 * self.quarter + n == 0, y * seen[odd], y)
                of_channel[i], dA = derivative(gate, x[i], y, lower_bound)
                out[1 + odd] = out[1 + odd] + of_channel[i]
                if dA is not None:
                    out[0] = out[0] + dA
            dx.append(of_channel)
        for i in range(sweep.EIGHT):
            at, pair = self.at_gate(n, i), (dx[0][i], dx[1][i])
            if self.g.width == 32:
                sweep.put2(at, pair)
            else:
                put_bits(at, pack(*pair, self.g))

    def at_gate(self, n: Any, i: int) -> Any:
        """Address of token i of eight ``n`` of the thread's two."""
        return ((self.g_at + sweep.EIGHT_BYTES * n) ^ (16 * i)) + sweep.ROW_BYTES * i

    @cute.jit
    def store_rows(self, tile: Int32, mX: cute.Tensor, first: Int32, valid: Int32, head: Int32):
        """Valid rows of a tile to global memory, 16 bytes a thread and turn."""
        width = 128 // mX.element_type.width
        across = CHANNELS // width
        down = MATH.threads // across
        unit, i = self.tid & (across - 1), self.tid >> (across.bit_length() - 1)
        words = cute.make_rmem_tensor(4, Int32)
        values = cute.make_tensor(
            cute.recast_ptr(words.iterator, dtype=mX.element_type), cute.make_layout(width)
        )
        at = tile + (unit >> 3) * HALF_BYTES + Lanes.unit(i, unit & 7)
        for n in cutlass.range(BT // down, unroll=1):
            t = i + down * n
            if t < valid and unit < self.c.K // width:
                x = sweep.load_words(at + n * (down * sweep.ROW_BYTES))
                for e in cutlass.range_constexpr(4):
                    words[e] = x[e]
                cute.autovec_copy(values, cute.local_tile(mX[first + t, head, None], (width,), (unit,)))

    @cute.jit
    def store_shares(self, x: cute.Tensor, mX: cute.Tensor, first: Int32, valid: Int32, hv: Int32):
        """fp32 values of the thread to global memory."""
        for n in cutlass.range_constexpr(EIGHTS):
            for e in cutlass.range_constexpr(4):
                t = 8 * n + 2 * self.lane.c + e % 2
                channel = self.channel + 8 * (e // 2)
                if t < valid and channel < self.c.K:
                    mX[first + t, hv, channel] = x[4 * n + e]


def words_of(field: Any, n: int) -> cute.Tensor:
    """A storage field as plain words."""
    return cute.make_tensor(cute.recast_ptr(field.data_ptr(), dtype=Int32), cute.make_layout(n))


def product(io: Any, n: int, source: Any, a_major: Any, b_major: Any) -> cute.TiledMma:
    """(64, n, k) product of one warpgroup."""
    op = warpgroup.MmaF16BF16Op(io, Float32, (wgmma.M, n, 16), source, a_major, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def as_accumulator(thr: Any, x: cute.Tensor, n: int) -> cute.Tensor:
    """Plain registers with the modes of a (64, n) accumulator."""
    return cute.make_tensor(
        x.iterator, cute.make_rmem_tensor(thr.partition_shape_C((wgmma.M, n)), Float32).layout
    )


def as_operand(thr: Any, words: cute.Tensor, io: Any, k: int = BT) -> cute.Tensor:
    """Packed words in the order of an accumulator with the modes of a (64, k) A operand."""
    like = cute.make_rmem_tensor(thr.partition_shape_A((wgmma.M, k)), io)
    return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=io), like.layout)


@cute.jit
def steps(tiled: cute.TiledMma, acc: cute.Tensor, tA: cute.Tensor, tB: cute.Tensor, accumulate: Any = True):
    """acc (+)= A B^T; issued, not committed."""
    atom = cute.make_mma_atom(tiled.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(tA.shape[2])):
        cute.gemm(atom, acc, tA[None, None, k], tB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)


def put_word(address: Int32, x: Float32) -> None:
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, x])


def put_bits(address: Int32, x: Int32) -> None:
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, x])


def load_float(address: Int32) -> Float32:
    ptx = "ld.shared.f32 {$w0}, [{$r0}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[address])


def bits(x: Float32) -> Int32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def load_bits(mX: cute.Tensor, at: tuple[Any, ...]) -> Int32:
    """A value of global memory as it stands, without waiting for it."""
    address = (mX.iterator + mX.layout(at)).toint()
    kind = "b32 {$w0}, [{$r0}];" if mX.element_type.width == 32 else "u16 {$w0}, [{$r0}];"
    return cute.arch.inline_ptx("ld.global." + kind, write_only_types=[Int32], read_only_args=[address])


def of_bits(word: Int32, dtype: Any) -> Float32:
    """The low value of a word."""
    if dtype is Float32:
        return cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word]
        )
    return unpack(word, dtype)[0]


def not_zero(beta: Float32) -> Float32:
    """beta, or the least one where it is smaller in magnitude."""
    least = Float32(LEAST_BETA)
    return select(magnitude(beta) < least, least, beta)


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + e^-x); 0 and 1 at the ends."""
    return cute.arch.rcp_approx(1.0 + exp2(x * -LOG2E))


def derivative(gate: Gate, x: Float32, dl: Float32, lower_bound: Any) -> tuple[Any, Any]:
    """Gradient of the raw gate and its share of dA_log, from that of the natural-log decay; x with its bias.

    A token whose decay is 0 has none. What may be infinite is cut to a finite number, so that times 0 it is 0.
    """
    if gate.kind == "log":
        return select(x < LEAST_LOG2 * LN2, Float32(0.0), dl), None
    if gate.kind == "softplus":
        # l = -A softplus(x), dl/dx = -A sigmoid(x), A = exp(A_log); e = exp(-|x|)
        e = exp2(magnitude(x) * -LOG2E)
        P = Float32(LOG1P[-1])
        for c in LOG1P[-2::-1]:
            P = P * e + c
        softplus = e * P + cutlass.min(cutlass.max(x, Float32(0.0)), Float32(FLT_MAX))
        dl = select(softplus > gate.inverse * -LEAST_LOG2, Float32(0.0), dl * (gate.rate * -LN2))
        return dl * (select(x < 0.0, e, Float32(1.0)) * cute.arch.rcp_approx(1.0 + e)), dl * softplus
    # l = lower_bound sigmoid(z), z = exp(A_log) x = -LN2 y; e = exp(-|z|)
    y = cutlass.max(cutlass.min(x * gate.rate, Float32(FLT_MAX)), Float32(-FLT_MAX))
    e = exp2(-magnitude(y))
    p = cute.arch.rcp_approx(1.0 + e)
    log2_a = gate.bound * select(y > 0.0, e * p, p)
    dz = select(log2_a < LEAST_LOG2, Float32(0.0), dl * lower_bound) * (e * p * p)
    return dz * (gate.rate * -LN2), dz * (y * -LN2)

"""bwd_grads on Hopper: every gradient of a chunk from the states on both its sides, an item per value head.

Maths, per chunk of 64 tokens (i, j, t), channels c, values v; q^, k^ are q, k times their rstd, S = h, dS = dh:

A   dAqk = do v_new^T,  dM = dv2 v^T                  [64, 64] fp32 accumulators, io operands, 64 values a turn
    dq^T = S do^T,  dw^T = -S dv2^T,  dk^T = dS v_new^T     [K, 64] fp32; S and dS are read once
    dvb  = A^T dv2,  dv = io(beta dvb),  dbeta = dvb . v    [64, V]
    s    = sum_v S dS                                       [K] fp32
B   a = exp(gate(g)), E, R = product of a up to a token, after it      fp32, products only
    dq = scale E dq,  dk = R dk
    dM  += io(dw) io(k^ E)^T                          [64, 64]
    Z    = io(tril_-1(dM beta_j)) A^T
    dAkk = -tril_-1(A^T io(Z))                        rounded to io, as scale tril_-1(dAqk) is
    rk^T = io(dw^T) A                                 [K, 64] fp32
C   dq += sweeps,  rk = E rk + sweeps,  dk += sweeps + beta rk         (kernel_fun._cute.sweep)
    dg = q^ (scale E dq) + beta k^ (E rk) - k^ (R dk) + sweeps,   dbeta += rk . k^
D   dl_t = sum_{i >= t} dg_i + total s + sum_t k^ (R dk);  0 where a = 0
    dg, dA_log, d dt_bias by the gate's derivative; dq, dk = rstd (dy - (dy . y) y); dbeta by its sigmoid's

Rows past the last token: q = k = v = do = v_new = dv2 = A = beta = 0 and no decay, by selection; not stored.

Modes in global memory: q, k, g, A, v, do, v_new, dv2 (tokens, D, heads); h, dh (K, V, HV, chunks).

    tiles      64 tokens, 128 channels (K = 64 is padded with zeros), 64 values a turn
    grid       a CTA an SM, items in turn, value heads of a chunk adjacent
    role       warps    registers   does
    MATH       0-7      240         A..D; a warpgroup owns 64 channels, a warp 16, tokens on the other axis
    LOAD       8-11     24          ring, A, then q k g of the items, a warp each
    pipe       stages   tx          holds
    ring       2        64 KB       h, dh, do, v_new, dv2, v of 64 values
    one        1        8 KB        A; then parked sums, until D
    raw        1        48 KB       q, k, g; then dq, dk, dg on their way out
    smem       X    dw, k^ E (B); dAqk, dAkk and parked decays (C)
               Y    Z (B); parked decays (C); sums over warps (D)
"""

# sizes: four phases share one set of registers, and read in order
from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from kernel_fun._common import device
from kernel_fun._cute import pipe, sweep, wgmma
from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.compile import DTYPES, Program, jit, symbol, tensor
from kernel_fun._cute.decay import GATES, LOG1P, LOG2E, NO_DECAY, Gate, exp2, magnitude
from kernel_fun._cute.pipe import WARPGROUP, Pipe, Role
from kernel_fun._cute.sweep import Block, Lanes, Wide, row, token
from kernel_fun._cute.tile import SMEM_BYTES, Tile, storage, tma_parts, vector
from kernel_fun._cute.varlen import FIRST, VALID
from kernel_fun._cute.warp import load4, matrices, pack, select, unpack
from kernel_fun.kda._kernels.sm90.bwd_grads_reduce import bwd_grads_reduce

if TYPE_CHECKING:
    from torch import Tensor

ARCH = "sm_90a"
BT = 64
BC = sweep.BLOCK
BLOCKS = BT // BC
CHANNELS = 128
"""Channels of an item; those past K are zeros."""
BV = 64
"""Values a turn of the ring."""
STAGES = 2
MATH = Role(0, 8, 240)
LOAD = Role(8, 4, 24)
THREADS = MATH.threads + LOAD.threads
HALF_BYTES = BT * sweep.ROW_BYTES
"""64 channels, or 64 values, of 64 tokens."""
BETA_MODES = ("raw", "sigmoid", "sigmoid2")
LN2 = 0.6931471805599453
FLT_MAX = 3.4028234663852886e38
LEAST_LOG2 = -126.0
"""Below 2 to this, a decay is 0."""
RMEM, SMEM = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
ADDRESSES = ("q", "k", "g", "A", "X", "Y", "beta", "q_rstd", "k_rstd", "diagonal")
DO, V_NEW, DV2, V = range(4)
"""Places of the [64, 64] tiles of a ring slot."""


class Barrier(IntEnum):
    """Named barriers of the MATH role."""

    MATH = 1
    HALF = 2


@dataclass(frozen=True)
class Config:
    """Static facts of one kernel: the compile key. Dtypes by torch name.

    ``shared``: a query head has several value heads; dq and dk are then their fp32 shares, not yet normalised.
    """

    io: str
    g: str
    beta: str
    K: int
    gate: str
    beta_mode: str
    l2norm: bool
    has_A_log: bool
    has_dt_bias: bool
    packed: bool
    shared: bool = False

    def __post_init__(self) -> None:
        half = ("bfloat16", "float16")
        for name, given, allowed in (
            ("io", self.io, half),
            ("g", self.g, half),
            ("beta", self.beta, (*half, "float32")),
            ("K", self.K, (64, 128)),
            ("gate", self.gate, GATES),
            ("beta_mode", self.beta_mode, BETA_MODES),
        ):
            if given not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(map(str, allowed))}, got {given}")
        if self.gate == "log" and (self.has_A_log or self.has_dt_bias):
            raise ValueError("`A_log` and `dt_bias` must be None with gate 'log', which has no parameters")
        if pipe.register_budget(THREADS, (MATH, LOAD)) < 0:
            raise ValueError("MATH and LOAD must not take more registers than a CTA gets at entry")
        if self.smem_bytes > SMEM_BYTES:
            raise ValueError(f"{self} needs {self.smem_bytes} bytes of shared memory, more than {SMEM_BYTES}")

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the storage."""
        ring = STAGES * 2 * (2 * CHANNELS * BV + 4 * BT * BV)
        tiles = 2 * (3 + 2) * BT * CHANNELS + 2 * 2 * BT * BT
        return ring + tiles + 4 * (6 * BT + MATH.warps) + 8 * (2 * STAGES + 4)


class KdaBwdGradsSm90:
    """The kernel of one config."""

    def __init__(self, config: Config) -> None:
        self.c = config
        self.io, self.g = (getattr(cutlass, DTYPES[x]) for x in (config.io, config.g))
        self.state = Tile(self.io, CHANNELS, BV, 2 * STAGES)
        self.row = Tile(self.io, BT, BV, 4 * STAGES)
        self.row_t = Tile(self.io, BV, BT, 4 * STAGES, rows_contiguous=True)
        self.x = Tile(self.io, BT, CHANNELS)
        self.xx = Tile(self.io, BT, CHANNELS, 2)
        self.raw_g = Tile(self.g, BT, CHANNELS)
        self.square = Tile(self.io, BT, BT)
        self.square_t = Tile(self.io, BT, BT, rows_contiguous=True)
        slot = 2 * self.state.stage_bytes + 4 * self.row.stage_bytes
        self.ring = Pipe(STAGES, LOAD, (MATH,), tx_bytes=slot)
        self.raw = Pipe(1, LOAD, (MATH,), tx_bytes=2 * self.x.stage_bytes + self.raw_g.stage_bytes)
        self.one = Pipe(1, LOAD, (MATH,), tx_bytes=self.square.stage_bytes)

    def storage(self) -> Any:
        return storage(
            state=self.state.field(),
            row=self.row.field(),
            q=self.x.field(),
            k=self.x.field(),
            g=self.raw_g.field(),
            X=self.xx.field(),
            Y=self.square.field(),
            A=self.square.field(),
            beta=vector(Float32, BT),
            q_rstd=vector(Float32, BT),
            k_rstd=vector(Float32, BT),
            diagonal=vector(Float32, BT),
            dvb_v=vector(Float32, 2 * BT),
            dA=vector(Float32, MATH.warps),
            ring=self.ring.field(),
            raw=self.raw.field(),
            one=self.one.field(),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mA: cute.Tensor,
        mQ_rstd: cute.Tensor | None,
        mK_rstd: cute.Tensor | None,
        mH: cute.Tensor,
        mV_new: cute.Tensor,
        mDh: cute.Tensor,
        mDv2: cute.Tensor,
        mDo: cute.Tensor,
        mA_log: cute.Tensor | None,
        mDt_bias: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mDq: cute.Tensor,
        mDk: cute.Tensor,
        mDv: cute.Tensor,
        mDg: cute.Tensor,
        mDbeta: cute.Tensor,
        mDA: cute.Tensor | None,
        mDbias: cute.Tensor | None,
        T: Int32,
        ctas: Int32,
        scale: Float32,
        lower_bound: Float32,
        stream: Any,
    ):
        self.Storage = self.storage()
        self.kda_bwd_grads_sm90(
            *self.x.loader(modes([0, 2, 1], mQ)),
            *self.x.loader(modes([0, 2, 1], mK)),
            *self.raw_g.loader(modes([0, 2, 1], mG)),
            *self.square.loader(modes([0, 2, 1], mA)),
            *self.state.loader(modes([2, 3, 1, 0], mH)),
            *self.state.loader(modes([2, 3, 1, 0], mDh)),
            *self.row.loader(modes([0, 2, 1], mDo)),
            *self.row.loader(modes([0, 2, 1], mV_new)),
            *self.row.loader(modes([0, 2, 1], mDv2)),
            *self.row.loader(modes([0, 2, 1], mV)),
            mBeta, mQ_rstd, mK_rstd, mA_log, mDt_bias, mTable, mDq, mDk, mDv, mDg, mDbeta, mDA, mDbias,
            T, mH.shape[0] * mH.shape[1], mH.shape[1], mH.shape[1] // mQ.shape[1], mV.shape[2] // BV, scale, lower_bound,
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kda_bwd_grads_sm90(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_g: cute.CopyAtom,
        mG: cute.Tensor,
        tma_A: cute.CopyAtom,
        mA: cute.Tensor,
        tma_h: cute.CopyAtom,
        mH: cute.Tensor,
        tma_dh: cute.CopyAtom,
        mDh: cute.Tensor,
        tma_do: cute.CopyAtom,
        mDo: cute.Tensor,
        tma_v_new: cute.CopyAtom,
        mV_new: cute.Tensor,
        tma_dv2: cute.CopyAtom,
        mDv2: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        mBeta: cute.Tensor,
        mQ_rstd: cute.Tensor | None,
        mK_rstd: cute.Tensor | None,
        mA_log: cute.Tensor | None,
        mDt_bias: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mDq: cute.Tensor,
        mDk: cute.Tensor,
        mDv: cute.Tensor,
        mDg: cute.Tensor,
        mDbeta: cute.Tensor,
        mDA: cute.Tensor | None,
        mDbias: cute.Tensor | None,
        T: Int32,
        items: Int32,
        HV: Int32,
        G: Int32,
        NV: Int32,
        scale: Float32,
        lower_bound: Float32,
    ):
        st = SmemAllocator().allocate(self.Storage)
        ring, raw, one = self.ring.bind(st.ring), self.raw.bind(st.raw), self.one.bind(st.one)
        pipe.start()
        warp_index = pipe.index_of_warp()
        if warp_index < MATH.warps:
            pipe.take_registers(MATH, pipe.registers_at_entry(THREADS))
            self.math(
                st, ring, raw, one, mBeta, mQ_rstd, mK_rstd, mA_log, mDt_bias, mTable, mDq, mDk, mDv, mDg, mDbeta,
                mDA, mDbias, T, items, HV, G, NV, scale, lower_bound,
            )  # fmt: skip
        else:
            pipe.take_registers(LOAD, pipe.registers_at_entry(THREADS))
            if warp_index == LOAD.first_warp:
                states = ((tma_h, mH, 0), (tma_dh, mDh, 1))
                rows = ((tma_do, mDo, DO), (tma_v_new, mV_new, V_NEW), (tma_dv2, mDv2, DV2), (tma_v, mV, V))
                self.load_ring(st, ring, states, rows, mTable, T, items, HV, NV)
            elif warp_index == LOAD.first_warp + 1:
                of = ((tma_A, mA, self.square, st.A, 1),)
                self.load_tiles(one, of, mTable, T, items, HV, G)
            elif warp_index == LOAD.first_warp + 2:
                of = (
                    (tma_q, mQ, self.x, st.q, G),
                    (tma_k, mK, self.x, st.k, G),
                    (tma_g, mG, self.raw_g, st.g, 1),
                )
                self.load_tiles(raw, of, mTable, T, items, HV, G)

    @cute.jit
    def place(self, item: Int32, mTable: cute.Tensor | None, T: Int32, HV: Int32):
        """(chunk, value head, first token, tokens) of an item."""
        chunk, hv = item // HV, item % HV
        if cutlass.const_expr(self.c.packed):
            first, valid = mTable[chunk, FIRST], mTable[chunk, VALID]
        else:
            NT = (T + (BT - 1)) // BT
            first, valid = chunk // NT * T + chunk % NT * BT, cutlass.min(T - chunk % NT * BT, BT)
        return chunk, hv, first, valid

    @cute.jit
    def load_ring(self, st, ring, states, rows, mTable, T: Int32, items: Int32, HV: Int32, NV: Int32):
        """LOAD: the states and the rows of 64 values, all turns of all items."""
        at = ring.write_cursor()
        grid = cute.arch.grid_dim()[0]
        for item in cutlass.range(cute.arch.block_idx()[0], items, grid, unroll=1):
            chunk, hv, first, valid = self.place(item, mTable, T, HV)
            if valid > 0:
                for n in cutlass.range(NV, unroll=1):
                    ring.wait_empty(at)
                    barrier = ring.expect(at)
                    for tma, mX, i in states:
                        gX = cute.local_tile(mX[None, None, hv, chunk], self.state.shape, (0, None))
                        sX, gX = tma_parts(tma, gX, self.state.view(st.state))
                        cute.copy(tma, gX[None, n], sX[None, 2 * at.index + i], tma_bar_ptr=barrier)
                    for tma, mX, i in rows:
                        gX = cute.local_tile(
                            cute.domain_offset((first, 0), mX[None, None, hv]), self.row.shape, (0, None)
                        )
                        sX, gX = tma_parts(tma, gX, self.row.view(st.row))
                        cute.copy(tma, gX[None, n], sX[None, 4 * at.index + i], tma_bar_ptr=barrier)
                    at.advance()

    @cute.jit
    def load_tiles(self, to, of, mTable, T: Int32, items: Int32, HV: Int32, G: Int32):
        """LOAD: tiles that an item needs once."""
        at = to.write_cursor()
        grid = cute.arch.grid_dim()[0]
        for item in cutlass.range(cute.arch.block_idx()[0], items, grid, unroll=1):
            _, hv, first, valid = self.place(item, mTable, T, HV)
            if valid > 0:
                to.wait_empty(at)
                barrier = to.expect(at)
                for tma, mX, tile, field, group in of:
                    head = hv if cutlass.const_expr(isinstance(group, int)) else hv // group
                    gX = cute.local_tile(
                        cute.domain_offset((first, 0), mX[None, None, head]), tile.shape, (0, None)
                    )
                    sX, gX = tma_parts(tma, gX, tile.view(field))
                    cute.copy(tma, gX[None, 0], sX[None, 0], tma_bar_ptr=barrier)
                at.advance()

    @cute.jit
    def math(
        self, st, ring, raw, one, mBeta, mQ_rstd, mK_rstd, mA_log, mDt_bias, mTable, mDq, mDk, mDv, mDg, mDbeta,
        mDA, mDbias, T: Int32, items: Int32, HV: Int32, G: Int32, NV: Int32, scale: Float32, lower_bound: Float32,
    ):  # fmt: skip
        """MATH: the phases of one item after another."""
        c = self.c
        self.lanes(st)
        at_ring, at_raw, at_one = ring.read_cursor(), raw.read_cursor(), one.read_cursor()
        dq, dk, dw, square = (cute.make_rmem_tensor(32, Float32) for _ in range(4))
        sums = cute.make_rmem_tensor(2, Float32)
        bias = cute.make_rmem_tensor(2, Float32)
        bias.fill(0.0)
        grid = cute.arch.grid_dim()[0]
        for item in cutlass.range(cute.arch.block_idx()[0], items, grid, unroll=1):
            chunk, hv, first, valid = self.place(item, mTable, T, HV)
            if valid > 0:
                self.read_scalars(st, mBeta, mQ_rstd, mK_rstd, first, valid, hv, hv // G)
                if cutlass.const_expr(c.has_dt_bias):
                    for w in cutlass.range_constexpr(2):
                        channel = self.channel + 8 * w
                        if channel < c.K:
                            bias[w] = mDt_bias[hv * c.K + channel]
                A_log = Float32(mA_log[hv]) if cutlass.const_expr(c.has_A_log) else None
                gate = Gate.of_head(c.gate, A_log, lower_bound)

                one.wait_full(at_one)
                if valid < BT:
                    self.blank(self.A_words, Int32(0), valid, Int32(0))
                self.publish(Barrier.MATH, MATH.threads)
                at_ring = self.products(
                    st, ring, at_ring, mDv, dq, dk, dw, square, sums, first, valid, hv, NV
                )
                raw.wait_full(at_raw)
                if valid < BT:
                    no_decay = self.no_decay_word()
                    for half in cutlass.range_constexpr(2):
                        for words, x in (
                            (self.q_words, Int32(0)),
                            (self.k_words, Int32(0)),
                            (self.g_words, no_decay),
                        ):
                            self.blank(words, Int32(half * (HALF_BYTES // 4)), valid, x)
                    self.publish(Barrier.MATH, MATH.threads)
                self.through_A(st, gate, bias, dq, dk, dw, square, scale)
                dbeta = self.sweeps(gate, bias, dq, dk, dw, sums)
                cute.arch.fence_view_async_shared()
                one.free(at_one)
                at_one.advance()
                self.finish(
                    st, raw, at_raw, gate, lower_bound, bias, dq, dk, dw, sums, dbeta, mBeta, mDq, mDk, mDg,
                    mDbeta, mDA, mDbias, chunk, first, valid, hv, hv // G,
                )  # fmt: skip
                at_raw.advance()

    def lanes(self, st: Any) -> None:
        """What a thread keeps of its place: its lane, and bytes in shared memory."""
        at = {x: getattr(st, x).data_ptr().toint() for x in ADDRESSES}
        tid = cute.arch.thread_idx()[0]
        uniform = cute.arch.make_warp_uniform
        self.place_lane(at, tid, uniform(tid // WARPGROUP), uniform(tid // 32), Lanes(tid % 32))
        self.tidx = tid % WARPGROUP
        self.v_at = st.row.data_ptr().toint() + ((V * HALF_BYTES + self.own_rows) ^ (64 * self.wg))
        self.A_words = words_of(st.A, HALF_BYTES // 4)
        self.q_words, self.k_words, self.g_words = (words_of(x, HALF_BYTES // 2) for x in (st.q, st.k, st.g))
        self.row_words = words_of(st.row, 4 * STAGES * HALF_BYTES // 4)

    def place_lane(self, at: dict[str, Any], tid: Any, wg: Any, warp_index: Any, lane: Lanes) -> None:
        """``at``: addresses of the fields of :data:`ADDRESSES`."""
        self.tid, self.wg, self.warp, self.lane = tid, wg, warp_index, lane
        w = warp_index % 4
        self.first_row = BC * w
        self.channel = 16 * warp_index + lane.r
        # 16 channels of the warp in a tile of 64 tokens, transposed on the way; and 16 rows in accumulator layout
        self.own = (wg * HALF_BYTES + lane.rows_first) ^ (32 * w)
        self.own_rows = w * sweep.BLOCK_BYTES + lane.units_first
        self.q_at, self.k_at, self.g_at = (at[x] + self.own for x in ("q", "k", "g"))
        self.X_at, self.Y_at = at["X"], at["Y"]
        self.beta_at, self.diagonal_at = at["beta"], at["diagonal"]
        self.q_rstd_at, self.k_rstd_at = at["q_rstd"], at["k_rstd"]
        # sixteen decays of a thread for each half of the chunk, 4 KB a four of all threads: X past dAqk and dAkk, Y, A
        self.parked = self.X_at + 2 * HALF_BYTES + 16 * tid

    def publish(self, barrier: int, threads: int) -> None:
        """What these threads stored is there for all of them, WGMMA and TMA included."""
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)

    def no_decay_word(self) -> Int32:
        x = Float32(NO_DECAY[self.c.gate])
        return pack(x, x, self.g)

    @cute.jit
    def blank(self, words: cute.Tensor, at: Int32, valid: Int32, x: Int32):
        """Rows past the last token of a tile with rows of 128 bytes, ``at`` words from the first."""
        for t in cutlass.range(valid + self.warp, BT, MATH.warps, unroll=1):
            words[at + t * 32 + self.lane.lane] = x

    @cute.jit
    def read_scalars(self, st, mBeta, mQ_rstd, mK_rstd, first: Int32, valid: Int32, hv: Int32, h: Int32):
        """beta, activated, and the reciprocal norms to shared memory."""
        c = self.c
        if self.tid < BT:
            beta, q, k = Float32(0.0), Float32(1.0), Float32(1.0)
            if self.tid < valid:
                beta = mBeta[first + self.tid, hv].to(Float32)
                if cutlass.const_expr(c.beta_mode != "raw"):
                    top = 2.0 if c.beta_mode == "sigmoid2" else 1.0
                    beta = top * sigmoid(beta)
                if cutlass.const_expr(c.l2norm):
                    q, k = mQ_rstd[first + self.tid, h], mK_rstd[first + self.tid, h]
            for field, x in ((st.beta, beta), (st.q_rstd, q), (st.k_rstd, k)):
                field.get_tensor(cute.make_layout(BT))[self.tid] = x

    @cute.jit
    def products(
        self, st, ring, at, mDv, dq, dk, dw, square, sums, first: Int32, valid: Int32, hv: Int32, NV: Int32
    ):
        """A: all that is contracted over values. ``square``: dAqk (warpgroup 0), dM (1). ``dw`` without its sign.

        sums: s of the thread's two channels, over its own values. Returns the ring's cursor.
        """
        rs = product(self.io, BT, RMEM, K_MAJOR, K_MAJOR)
        ss = product(self.io, BT, SMEM, K_MAJOR, K_MAJOR)
        through = product(self.io, BV // 2, SMEM, MN_MAJOR, MN_MAJOR)
        thr, thr_ss, thr_through = (x.get_slice(self.tidx) for x in (rs, ss, through))
        sRow, sState = self.row.view(st.row), self.state.view(st.state)
        sDv2 = cute.local_tile(self.row_t.view(st.row), (BV // 2, BT, 4 * STAGES), (self.wg, 0, 0))
        bRow = thr.make_fragment_B(thr.partition_B(sRow))
        aRow, bRow_ss = (
            thr_ss.make_fragment_A(thr_ss.partition_A(sRow)), thr_ss.make_fragment_B(thr_ss.partition_B(sRow)),
        )  # fmt: skip
        aA = thr_through.make_fragment_A(thr_through.partition_A(self.square_t.view(st.A)))
        bDv2 = thr_through.make_fragment_B(thr_through.partition_B(sDv2))
        shape = thr.partition_shape_A((wgmma.M, 32))
        rH, rDh = ([thr.make_fragment_A(shape) for _ in range(2)] for _ in range(2))
        load = cute.make_tiled_copy_A(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.io), rs
        ).get_slice(self.tidx)
        tHsH = load.partition_S(cute.local_tile(sState, (wgmma.M, BV, 2 * STAGES), (self.wg, 0, 0)))
        acc_q, acc_k, acc_w, acc_s = (as_accumulator(thr, x, BT) for x in (dq, dk, dw, square))
        dvb = cute.make_rmem_tensor(16, Float32)
        acc_v = as_accumulator(thr_through, dvb, BV // 2)
        dvb_v = cute.make_rmem_tensor(2, Float32)
        for x in (dq, dk, dw, square, sums, dvb_v):
            x.fill(0.0)
        tile = 2 * self.wg
        sBeta = st.beta.get_tensor(cute.make_layout(BT))
        token_0 = self.first_row + self.lane.r
        beta = [sBeta[token_0 + 8 * w] for w in range(2)]
        wDv = cute.recast_tensor(mDv, Int32)
        rows_dv = [wDv[first + token_0 + 8 * w, hv, None] for w in range(2)]
        exists = [token_0 + 8 * w < valid for w in range(2)]
        place = self.wg * (BV // 4) + self.lane.c
        for n in cutlass.range(NV, unroll=1):
            ring.wait_full(at)
            s = at.index
            if valid < BT:
                for i in cutlass.range_constexpr(4):
                    at_row = (4 * s + i) * (HALF_BYTES // 4)
                    self.blank(self.row_words, at_row, valid, Int32(0))
                self.publish(Barrier.MATH, MATH.threads)
            for j in cutlass.range_constexpr(2):
                for k in cutlass.range_constexpr(2):
                    cute.copy(load, tHsH[None, None, 2 * j + k, 2 * s], load.retile(rH[j])[None, None, k])
                    cute.copy(
                        load, tHsH[None, None, 2 * j + k, 2 * s + 1], load.retile(rDh[j])[None, None, k]
                    )
                for k in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(8):
                        x, y = rH[j][None, 0, k][e].to(Float32), rDh[j][None, 0, k][e].to(Float32)
                        sums[e // 2 % 2] = sums[e // 2 % 2] + x * y
                wgmma.fence()
                steps(
                    ss,
                    acc_s,
                    aRow[None, None, None, 4 * s + DO + tile],
                    bRow_ss[None, None, None, 4 * s + V_NEW + tile],
                    2 * j,
                    2 * j,
                    2,
                )
                if cutlass.const_expr(j == 0):
                    steps(
                        through,
                        acc_v,
                        aA[None, None, None, 0],
                        bDv2[None, None, None, 4 * s + DV2],
                        0,
                        0,
                        4,
                        zero=True,
                    )
                steps(rs, acc_q, rH[j], bRow[None, None, None, 4 * s + DO], 0, 2 * j, 2)
                steps(rs, acc_w, rH[j], bRow[None, None, None, 4 * s + DV2], 0, 2 * j, 2)
                steps(rs, acc_k, rDh[j], bRow[None, None, None, 4 * s + V_NEW], 0, 2 * j, 2)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
            # dv = beta dvb of 32 values, dbeta += dvb . v
            for j in cutlass.range_constexpr(2):
                words = matrices((self.v_at + 4 * s * HALF_BYTES) ^ (32 * j))
                for i in cutlass.range_constexpr(4):
                    w, tile_n = i % 2, 2 * j + i // 2
                    x, y = dvb[4 * tile_n + 2 * w], dvb[4 * tile_n + 2 * w + 1]
                    v = unpack(words[i], self.io)
                    dvb_v[w] = dvb_v[w] + (x * v[0] + y * v[1])
                    row_dv, at_dv = rows_dv[w], n * (BV // 2) + place + 4 * tile_n
                    dv = pack(x * beta[w], y * beta[w], self.io)
                    if exists[w]:
                        row_dv[at_dv] = dv
            warpgroup.wait_group(0)
            ring.free(at)
            at.advance()
        sDvb = st.dvb_v.get_tensor(cute.make_layout(2 * BT))
        for w in cutlass.range_constexpr(2):
            x = sweep.sum_quad(dvb_v[w])
            if self.lane.c == 0:
                sDvb[self.wg * BT + token_0 + 8 * w] = x
        return at

    @cute.jit
    def through_A(self, st, gate: cutlass.Constexpr[Any], bias, dq, dk, dw, square, scale: Float32):
        """B: scale E dq, R dk; dM, Z, dAkk; ``dw`` becomes rk without E."""
        io = self.io
        words_w = cute.make_rmem_tensor(16, Int32)
        for b in cutlass.range_constexpr(BLOCKS):
            w = sweep.pack_values([-dw[8 * b + e] for e in range(8)], io)
            for i in cutlass.range_constexpr(4):
                words_w[4 * b + i] = w[i]
            sweep.put_matrices_transposed(self.X_at + self.own + sweep.BLOCK_BYTES * b, w)
        self.decay_states(gate, bias, dq, dk, scale)
        self.publish(Barrier.MATH, MATH.threads)

        rs_n = product(io, BT, RMEM, K_MAJOR, MN_MAJOR)
        thr_n = rs_n.get_slice(self.tidx)
        bA_n = thr_n.make_fragment_B(thr_n.partition_B(self.square_t.view(st.A)))
        acc_w = as_accumulator(thr_n, dw, BT)
        acc_s = as_accumulator(thr_n, square, BT)
        wgmma.fence()
        steps(rs_n, acc_w, as_operand(thr_n, words_w, io), bA_n[None, None, None, 0], 0, 0, 4, zero=True)
        warpgroup.commit_group()
        if self.wg == 1:
            ss = product(io, BT, SMEM, K_MAJOR, K_MAJOR)
            thr_ss = ss.get_slice(self.tidx)
            sX = self.xx.view(st.X)
            aX = thr_ss.make_fragment_A(thr_ss.partition_A(sX))
            bX = thr_ss.make_fragment_B(thr_ss.partition_B(sX))
            steps(ss, acc_s, aX[None, None, None, 0], bX[None, None, None, 1], 0, 0, CHANNELS // 16)
            warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        if self.wg == 1:
            self.through_inverse(st, square)
        else:
            self.put_square(square, self.X_at, scale, True)
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)

    @cute.jit
    def through_inverse(self, st, square):
        """dAkk = -tril_-1(A^T tril_-1(dM beta_j) A^T), warpgroup 1."""
        io = self.io
        words = cute.make_rmem_tensor(16, Int32)
        for n in cutlass.range_constexpr(8):
            beta = sweep.load2(self.beta_at + 32 * n + 8 * self.lane.c)
            for w in cutlass.range_constexpr(2):
                i, j = self.first_row + self.lane.r + 8 * w, 8 * n + 2 * self.lane.c
                x, y = (square[4 * n + 2 * w + p] * beta[p] for p in range(2))
                words[2 * n + w] = pack(
                    select(i > j, x, Float32(0.0)), select(i > j + 1, y, Float32(0.0)), io
                )
        rs = product(io, BT, RMEM, K_MAJOR, K_MAJOR)
        thr = rs.get_slice(self.tidx)
        bA = thr.make_fragment_B(thr.partition_B(self.square.view(st.A)))
        acc = as_accumulator(thr, square, BT)
        wgmma.fence()
        steps(rs, acc, as_operand(thr, words, io), bA[None, None, None, 0], 0, 0, 4, zero=True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for j in cutlass.range_constexpr(4):
            sweep.put_matrices(
                (self.Y_at + self.own_rows) ^ (32 * j),
                sweep.pack_values([square[8 * j + e] for e in range(8)], io),
            )
        self.publish(Barrier.HALF, WARPGROUP)
        ss = product(io, BT, SMEM, MN_MAJOR, MN_MAJOR)
        thr_ss = ss.get_slice(self.tidx)
        aA = thr_ss.make_fragment_A(thr_ss.partition_A(self.square_t.view(st.A)))
        bZ = thr_ss.make_fragment_B(thr_ss.partition_B(self.square_t.view(st.Y)))
        wgmma.fence()
        steps(ss, acc, aA[None, None, None, 0], bZ[None, None, None, 0], 0, 0, 4, zero=True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        self.put_square(square, self.X_at + HALF_BYTES, Float32(-1.0), False)

    @cute.jit
    def put_square(self, square, address: Int32, factor: Float32, with_diagonal: cutlass.Constexpr[bool]):
        """factor times the strictly lower triangle, rounded, to shared memory; the diagonal in fp32 beside it."""
        for j in cutlass.range_constexpr(4):
            x = []
            for e in cutlass.range_constexpr(8):
                row_i = self.first_row + self.lane.r + 8 * row(e)
                column = 16 * j + 8 * (e // 4) + 2 * self.lane.c + e % 2
                y = square[8 * j + e] * factor
                x.append(select(row_i > column, y, Float32(0.0)))
                if cutlass.const_expr(with_diagonal):
                    if row_i == column:
                        put_word(self.diagonal_at + 4 * row_i, y)
            sweep.put_matrices((address + self.own_rows) ^ (32 * j), sweep.pack_values(x, self.io))

    @cute.jit
    def decay_states(self, gate: cutlass.Constexpr[Any], bias, dq, dk, scale: Float32):
        """dq, dk from those against the states as they stand to scale E dq, R dk; k^ E to shared memory."""
        D, E = cute.make_rmem_tensor(2 * BLOCKS, Float32), cute.make_rmem_tensor(4, Float32)
        E.fill(1.0)
        for b in cutlass.range(BLOCKS, unroll=1):
            self.decay_block(gate, bias, dq, dk, D, E, b, scale)
            for x, n, size in ((dq, 8, 32), (dk, 8, 32), (D, 2, 2 * BLOCKS)):
                sweep.rotate(x, n, size)
        self.decays_after(dk, D)

    def decay_block(self, gate: Gate, bias, dq, dk, D, before, b, scale: Float32) -> None:
        """Block b, first of its arrays. ``before``: product of the blocks before it, by channel row."""
        f, r, D_b = sweep.factors(self.decays(gate, bias, b), self.lane)
        k = self.normalised(self.k_at, self.k_rstd_at, b)
        E = [f[e] * before[row(e)] for e in range(8)]
        for e in range(8):
            dq[e] = dq[e] * (E[e] * scale)
            dk[e] = sweep.times(dk[e], r[e])
        at = self.X_at + 2 * HALF_BYTES + self.own + sweep.BLOCK_BYTES * b
        sweep.put_matrices_transposed(at, sweep.pack_values([k[e] * E[e] for e in range(8)], self.io))
        for w in range(2):
            D[w] = D_b[w]
            before[w] = before[w] * D_b[w]

    def decays_after(self, dk, D) -> None:
        """dk of each block times the products of the blocks after it."""
        after = [D[2 * BLOCKS - 2 + w] for w in range(2)]
        for b in range(BLOCKS - 2, -1, -1):
            for e in range(8):
                dk[8 * b + e] = dk[8 * b + e] * after[row(e)]
            after = [after[w] * D[2 * b + w] for w in range(2)]

    def decays(self, gate: Gate, bias: cute.Tensor, b: Any) -> list[Any]:
        """a of a block."""
        return [gate.decay(x) for x in self.gate_inputs(bias, b)]

    def gate_inputs(self, bias: cute.Tensor, b: Any) -> list[Any]:
        """Raw gates of a block, dt_bias added."""
        g = sweep.unpack_values(sweep.matrices_transposed(self.g_at + sweep.BLOCK_BYTES * b), self.g)
        return [x + bias[row(e)] for e, x in enumerate(g)] if self.c.has_dt_bias else g

    def normalised(self, at: Int32, rstd_at: Int32, b: Any) -> list[Any]:
        """q^ or k^ of a block."""
        x = sweep.unpack_values(sweep.matrices_transposed(at + sweep.BLOCK_BYTES * b), self.io)
        if not self.c.l2norm:
            return x
        r = self.of_tokens(rstd_at, b)
        return [x[e] * r[token(e)] for e in range(8)]

    def of_tokens(self, at: Int32, b: Any) -> list[Any]:
        """fp32 values of the lane's four tokens of a block."""
        return [y for t in range(2) for y in sweep.load2(at + 4 * (BC * b + 8 * t) + 8 * self.lane.c)]

    @cute.jit
    def sweeps(self, gate: cutlass.Constexpr[Any], bias, dq, dk, rk, sums):
        """C: dq, dk of the chunk, in place; ``rk`` becomes dg. Returns dbeta of the thread's 16 tokens.

        sums: s becomes what every dl of the thread's two channels gets from the states.
        """
        dbeta = cute.make_rmem_tensor(16, Float32)
        k_dk, before = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        k_dk.fill(0.0)
        before.fill(1.0)
        for p in cutlass.range(2, unroll=1):
            self.pair(gate, bias, dq, dk, rk, dbeta, before, k_dk, p)
            for x, size in ((dq, 32), (dk, 32), (rk, 32), (dbeta, 16)):
                sweep.rotate(x, size // 2, size)
        self.level_32(dq, dk, rk, dbeta)
        for w in cutlass.range_constexpr(2):
            sums[w] = sweep.sum_quad(sums[w] * before[w] + k_dk[w])
        return dbeta

    def pair(self, gate: Gate, bias, dq, dk, rk, dbeta, before, k_dk, p) -> None:
        """Levels 1 to 16 of blocks 2 p and 2 p + 1, first of their arrays."""
        lane, io = self.lane, self.io
        dA = (self.X_at, self.X_at + HALF_BYTES)
        blocks: list[Block] = []
        for j in range(2):
            b = 2 * p + j
            q, k = (
                self.normalised(self.q_at, self.q_rstd_at, b),
                self.normalised(self.k_at, self.k_rstd_at, b),
            )
            beta, on_diagonal = self.of_tokens(self.beta_at, b), self.of_tokens(self.diagonal_at, b)
            dg, dq_b, dk_b = [], [], []
            for e in range(8):
                x, y, d = dq[8 * j + e], dk[8 * j + e], on_diagonal[token(e)]
                term = k[e] * y
                k_dk[row(e)] = k_dk[row(e)] + term
                dg.append(q[e] * x - term)
                dq_b.append(x + d * k[e])
                dk_b.append(y + d * q[e])
            block = Block(q, k, beta, self.decays(gate, bias, b), dq_b, dk_b, dg, lane, io)
            block.sweep(*dA, b)
            for t in range(4):
                dbeta[4 * j + t] = Float32(0.0)
            for e in range(8):
                at, t = 8 * j + e, token(e)
                x = rk[at] * (before[row(e)] * block.f[e])
                rk[at] = block.dg[e] + k[e] * (beta[t] * x)
                x = sweep.add(block.rk[e], x)
                dq[at], dk[at] = block.dq[e], block.dk[e] + beta[t] * x
                dbeta[4 * j + t] = dbeta[4 * j + t] + x * k[e]
            for w in range(2):
                before[w] = before[w] * block.D[w]
            blocks.append(block)
        left, right = blocks
        K = sweep.pack_values([left.k[e] * left.r[e] for e in range(8)], io)
        Q = sweep.pack_values([right.q[e] * right.f[e] for e in range(8)], io)
        B = right.operand_B(right.f, range(8))
        wide = Wide(io)
        wide.right(2 * p + 1, right.f, Q, B, [(2 * p, K)], *dA, lane)
        self.merge_right(wide, 1, dq, dk, rk, dbeta, right.k, right.beta)
        wide = Wide(io)
        wide.left(2 * p, left.r, K, [(2 * p + 1, (Q, B))], *dA, lane)
        self.merge_left(wide, 0, dk, rk)
        # level 32 takes r of the first pair and f of the second
        first = p == 0
        for j, factors in enumerate((
            [select(first, left.r[e] * right.D[row(e)], left.f[e]) for e in range(8)],
            [select(first, right.r[e], right.f[e] * left.D[row(e)]) for e in range(8)],
        )):  # fmt: skip
            for i in range(2):
                sweep.put4(self.parked + (p * 16384 + 4096 * (2 * j + i)), factors[4 * i : 4 * i + 4])

    def unpark(self, b: int) -> list[Any]:
        """Factors of level 32 of block b."""
        return [y for i in range(2) for y in load4(self.parked + 4096 * (2 * b + i))]

    def level_32(self, dq, dk, dg, dbeta) -> None:
        """Blocks 0, 1 are left, 2, 3 right."""
        lane, io = self.lane, self.io
        dA = (self.X_at, self.X_at + HALF_BYTES)
        K, QB = [], []
        for b in (0, 1):
            k, r = self.normalised(self.k_at, self.k_rstd_at, b), self.unpark(b)
            K.append((b, sweep.pack_values([k[e] * r[e] for e in range(8)], io)))
        for b in (2, 3):
            q, k = (
                self.normalised(self.q_at, self.q_rstd_at, b),
                self.normalised(self.k_at, self.k_rstd_at, b),
            )
            beta, f = self.of_tokens(self.beta_at, b), self.unpark(b)
            Q = sweep.pack_values([q[e] * f[e] for e in range(8)], io)
            B = sweep.pack_values([k[e] * (beta[token(e)] * f[e]) for e in range(8)], io)
            QB.append((b, (Q, B)))
            wide = Wide(io)
            wide.right(b, f, Q, B, K, *dA, lane)
            self.merge_right(wide, b, dq, dk, dg, dbeta, k, beta)
        for b in (0, 1):
            wide = Wide(io)
            wide.left(b, self.unpark(b), K[b][1], QB, *dA, lane)
            self.merge_left(wide, b, dk, dg)

    def merge_right(self, wide: Wide, b: int, dq, dk, dg, dbeta, k, beta) -> None:
        """Add what a wide level brings to a block on its right."""
        for e in range(8):
            at, t = 8 * b + e, token(e)
            dq[at] = dq[at] + wide.dq[e]
            dk[at] = dk[at] + beta[t] * wide.rk[e]
            dg[at] = dg[at] + wide.dg[e]
            dbeta[4 * b + t] = dbeta[4 * b + t] + wide.rk[e] * k[e]

    def merge_left(self, wide: Wide, b: int, dk, dg) -> None:
        """Add what a wide level brings to a block on its left."""
        for e in range(8):
            at = 8 * b + e
            dk[at] = dk[at] + wide.dk[e]
            dg[at] = dg[at] + wide.dg[e]

    @cute.jit
    def finish(
        self, st, raw, at_raw, gate: cutlass.Constexpr[Any], lower_bound: Float32, bias, dq, dk, dg, sums,
        dbeta, mBeta, mDq, mDk, mDg, mDbeta, mDA, mDbias, chunk: Int32, first: Int32, valid: Int32, hv: Int32,
        h: Int32,
    ):  # fmt: skip
        """D: sums over channels and tokens, the derivatives of gate, norm and beta, stores."""
        c, lane = self.c, self.lane
        normal = cutlass.const_expr(c.l2norm and not c.shared)
        sDvb = st.dvb_v.get_tensor(cute.make_layout(2 * BT))
        sDA = st.dA.get_tensor(cute.make_layout(MATH.warps))
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        # over the warp's channels, by token: dbeta, and dy . y of the norms
        self.put_token_sums(0, [dbeta[i] for i in range(16)])
        if cutlass.const_expr(normal):
            self.put_token_sums(1, self.dots(dq, self.q_at, self.q_rstd_at))
            self.put_token_sums(2, self.dots(dk, self.k_at, self.k_rstd_at))
        parts = self.gate_backward(gate, lower_bound, bias, dg, sums)
        if cutlass.const_expr(mDA is not None):
            dA = parts[0]
            for i in cutlass.range_constexpr(5):
                dA = dA + cute.arch.shuffle_sync_bfly(dA, offset=1 << i)
            if lane.lane == 0:
                sDA[self.warp] = dA
        if cutlass.const_expr(mDbias is not None):
            for w in cutlass.range_constexpr(2):
                x = sweep.sum_quad(parts[1 + w])
                if lane.c == 0 and self.channel + 8 * w < c.K:
                    mDbias[chunk, hv, self.channel + 8 * w] = x
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        # over the warps
        sY = cute.make_tensor(cute.recast_ptr(st.Y.data_ptr(), dtype=Float32), cute.make_layout((BT, 8, 3)))
        t, kind, x = self.tid % BT, self.tid // BT, Float32(0.0)
        if kind < (3 if normal else 1):
            x = sY[t, 0, kind]
            for i in cutlass.range_constexpr(1, 8):
                x = x + sY[t, i, kind]
            if kind > 0:
                sY[t, 0, kind] = x
            elif t < valid:
                x = x + (sDvb[t] + sDvb[BT + t])
                if cutlass.const_expr(c.beta_mode != "raw"):
                    top = 2.0 if c.beta_mode == "sigmoid2" else 1.0
                    beta = mBeta[first + t, hv].to(Float32)
                    x = x * (top * sigmoid(beta) * sigmoid(-beta))
                mDbeta[first + t, hv] = x.to(mDbeta.element_type)
        elif self.tid == 3 * BT:
            if cutlass.const_expr(mDA is not None):
                x = sDA[0]
                for i in cutlass.range_constexpr(1, MATH.warps):
                    x = x + sDA[i]
                mDA[chunk, hv] = x
        if cutlass.const_expr(normal):
            cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
            self.norm_backward(dq, self.q_at, self.q_rstd_at, 1)
            self.norm_backward(dk, self.k_at, self.k_rstd_at, 2)
        if cutlass.const_expr(c.shared):
            self.store_shares(dq, mDq, first, valid, hv)
            self.store_shares(dk, mDk, first, valid, hv)
        else:
            for b in cutlass.range_constexpr(BLOCKS):
                for x, at in ((dq, self.q_at), (dk, self.k_at)):
                    words = sweep.pack_values([x[8 * b + e] for e in range(8)], self.io)
                    sweep.put_matrices_transposed(at + sweep.BLOCK_BYTES * b, words)
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        if cutlass.const_expr(not c.shared):
            self.store_rows(st.q, mDq, first, valid, h)
            self.store_rows(st.k, mDk, first, valid, h)
        self.store_rows(st.g, mDg, first, valid, hv)
        cute.arch.fence_view_async_shared()
        raw.free(at_raw)

    def put_token_sums(self, kind: int, x: list[Any]) -> None:
        """Sums over the warp's channels of values of 16 tokens a lane, to the warp's row in Y."""
        lane = self.lane
        y = sweep.sum_rows(x, lane.lane)
        n = lane.r % 2 * 4 + lane.r // 2 % 2 * 2 + lane.r // 4
        sweep.put2(self.Y_at + 4 * ((8 * kind + self.warp) * BT + 8 * n + 2 * lane.c), y)

    def dots(self, dy: cute.Tensor, at: Int32, rstd_at: Int32) -> list[Any]:
        """dy . y over the thread's two channels, by token."""
        out: list[Any] = [None] * 16
        for b in range(BLOCKS):
            y = self.normalised(at, rstd_at, b)
            for e in range(8):
                out[4 * b + token(e)] = sweep.fma(out[4 * b + token(e)], dy[8 * b + e], y[e])
        return out

    def norm_backward(self, dy: cute.Tensor, at: Int32, rstd_at: Int32, kind: int) -> None:
        """dy becomes rstd (dy - (dy . y) y)."""
        for b in range(BLOCKS):
            y, r = self.normalised(at, rstd_at, b), self.of_tokens(rstd_at, b)
            dot = self.of_tokens(self.Y_at + 4 * 8 * BT * kind, b)
            for e in range(8):
                t = token(e)
                dy[8 * b + e] = r[t] * (dy[8 * b + e] - dot[t] * y[e])

    @cute.jit
    def gate_backward(self, gate: cutlass.Constexpr[Any], lower_bound: Float32, bias, dg, sums):
        """dg from its shares, over g in shared memory. Returns dA_log and d dt_bias of the thread: (of 1, of 2 channels)."""
        out = cute.make_rmem_tensor(3, Float32)
        out.fill(0.0)
        for i in cutlass.range(BLOCKS, unroll=1):
            self.gate_block(gate, lower_bound, bias, dg, sums, out, BLOCKS - 1 - i)
            sweep.rotate(dg, 24, 32)
        return out

    def gate_block(self, gate: Gate, lower_bound, bias, dg, carry, out, b) -> None:
        """Block b, last of its array."""
        dl: list[Any] = [None] * 8
        for w in range(2):
            shares = [(dg[24 + 4 * n + 2 * w], dg[24 + 4 * n + 2 * w + 1]) for n in range(2)]
            sums, carry[w] = sweep.suffix_sums(shares, carry[w], self.lane)
            for n, pair in enumerate(sums):
                dl[4 * n + 2 * w], dl[4 * n + 2 * w + 1] = pair
        dx = []
        for e, x in enumerate(self.gate_inputs(bias, b)):
            y, dA = derivative(gate, x, dl[e], lower_bound)
            dx.append(y)
            out[1 + row(e)] = out[1 + row(e)] + y
            if dA is not None:
                out[0] = out[0] + dA
        sweep.put_matrices_transposed(self.g_at + sweep.BLOCK_BYTES * b, sweep.pack_values(dx, self.g))

    @cute.jit
    def store_rows(self, field, mX: cute.Tensor, first: Int32, valid: Int32, head: Int32):
        """A tile of 64 tokens to global memory, 16 bytes a thread and turn."""
        unit, i = self.tid % 16, self.tid // 16
        words = cute.make_rmem_tensor(4, Int32)
        values = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=mX.element_type), cute.make_layout(8))
        at = field.data_ptr().toint() + unit // 8 * HALF_BYTES + Lanes.unit(i, unit % 8)
        for n in cutlass.range_constexpr(BLOCKS):
            t = i + BC * n
            if t < valid and unit < self.c.K // 8:
                x = sweep.load_words(at + n * sweep.BLOCK_BYTES)
                for e in cutlass.range_constexpr(4):
                    words[e] = x[e]
                cute.autovec_copy(values, cute.local_tile(mX[first + t, head, None], (8,), (unit,)))

    @cute.jit
    def store_shares(self, x: cute.Tensor, mX: cute.Tensor, first: Int32, valid: Int32, hv: Int32):
        """fp32 values of the thread to global memory."""
        for b in cutlass.range_constexpr(BLOCKS):
            for e in cutlass.range_constexpr(8):
                t = BC * b + 8 * (e // 4) + 2 * self.lane.c + e % 2
                channel = self.channel + 8 * row(e)
                if t < valid and channel < self.c.K:
                    mX[first + t, hv, channel] = x[8 * b + e]


def modes(order: list[int], mX: cute.Tensor) -> cute.Tensor:
    """A tensor with its modes in another order."""
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, order))


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


def as_operand(thr: Any, words: cute.Tensor, io: Any) -> cute.Tensor:
    """Packed words in the order of an accumulator with the modes of a (64, 64) A operand."""
    like = cute.make_rmem_tensor(thr.partition_shape_A((wgmma.M, BT)), io)
    return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=io), like.layout)


@cute.jit
def steps(
    tiled: cute.TiledMma,
    acc: cute.Tensor,
    tA: cute.Tensor,
    tB: cute.Tensor,
    a: cutlass.Constexpr[int],
    b: cutlass.Constexpr[int],
    n: cutlass.Constexpr[int],
    zero: cutlass.Constexpr[bool] = False,
):
    """acc (+)= A B^T over n steps of 16, from step a of A and b of B; issued, not committed."""
    atom = cute.make_mma_atom(tiled.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    for k in cutlass.range_constexpr(n):
        cute.gemm(atom, acc, tA[None, None, a + k], tB[None, None, b + k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)


def put_word(address: Int32, x: Float32) -> None:
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, x])


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
        # l = -exp(A_log) softplus(x), dl/dx = -exp(A_log) sigmoid(x); t = exp(A_log - |x|), e = exp(-|x|)
        t = exp2(cutlass.min(magnitude(x) * -LOG2E + gate.log_rate, Float32(-LEAST_LOG2)))
        e = t * gate.inverse
        P = Float32(LOG1P[-1])
        for c in LOG1P[-2::-1]:
            P = P * e + c
        minus_log2_a = cutlass.min(t * P + cutlass.max(x, Float32(0.0)) * gate.rate, Float32(FLT_MAX))
        dl = select(minus_log2_a > -LEAST_LOG2, Float32(0.0), dl * -LN2)
        return dl * (select(x < 0.0, t, gate.rate) * cute.arch.rcp_approx(1.0 + e)), dl * minus_log2_a
    # l = lower_bound sigmoid(z), z = exp(A_log) x = -LN2 y; e = exp(-|z|)
    y = cutlass.max(cutlass.min(x * gate.rate, Float32(FLT_MAX)), Float32(-FLT_MAX))
    e = exp2(-magnitude(y))
    p = cute.arch.rcp_approx(1.0 + e)
    log2_a = gate.bound * select(y > 0.0, e * p, p)
    dz = select(log2_a < LEAST_LOG2, Float32(0.0), dl * lower_bound) * (e * p * p)
    return dz * (gate.rate * -LN2), dz * (y * -LN2)


@jit(arch=ARCH)
def _compile(config: Config) -> Program:
    """Arguments of :class:`KdaBwdGradsSm90`; tokens B T, heads H and HV, V, chunks NT are run-time sizes."""
    c, f32 = config, "float32"
    tokens, H, HV, NT, V_ = symbol(), symbol(), symbol(), symbol(), symbol()
    K = c.K if c.K == CHANNELS else symbol()
    rstd = tensor(f32, tokens, H, align=4) if c.l2norm else None
    beta = tensor(c.beta, tokens, HV, align=2 if c.beta != f32 else 4)
    x = lambda: tensor(c.io, tokens, H, K)
    out = (lambda: tensor(f32, tokens, HV, K)) if c.shared else x
    state = lambda: tensor(c.io, NT, HV, K, V_)
    rows = lambda: tensor(c.io, tokens, HV, V_)
    return Program(
        KdaBwdGradsSm90(c),
        (
            x(),
            x(),
            rows(),
            tensor(c.g, tokens, HV, K),
            beta,
            tensor(c.io, tokens, HV, BT),
            rstd,
            rstd,
            state(),
            rows(),
            state(),
            rows(),
            rows(),
            tensor(f32, HV, align=4) if c.has_A_log else None,
            tensor(f32, symbol(), align=4) if c.has_dt_bias else None,
            tensor("int32", NT, 4) if c.packed else None,
            out(),
            out(),
            rows(),
            tensor(c.g, tokens, HV, K),
            beta,
            tensor(f32, NT, HV, align=4) if c.has_A_log else None,
            tensor(f32, NT, HV, K, align=4) if c.has_dt_bias else None,
            Int32(1),
            Int32(1),
            Float32(1.0),
            Float32(0.0),
        ),
    )


def bwd_grads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    q_rstd: Tensor | None,
    k_rstd: Tensor | None,
    h: Tensor,
    v_new: Tensor,
    dh: Tensor,
    dv2: Tensor,
    do: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: Tensor | None,
    *,
    scale: float,
    gate: str,
    lower_bound: float | None,
    beta_mode: str,
    l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(dq, dk, dv, dg, dbeta, dA_partial, dbias_partial) of a batch, or of packed sequences laid out by ``table``.

    ``q``, ``k`` [B, T, H, K] bf16 or fp16 (io); ``v``, ``do`` [B, T, HV, V] io; ``g`` [B, T, HV, K] bf16 or fp16; ``beta``
    [B, T, HV] bf16, fp16 or fp32; HV a multiple of H; K 64 or 128; V a multiple of 64. ``A`` [B, T, HV, 64] io,
    ``q_rstd``, ``k_rstd`` [B, T, H] fp32 (None without ``l2norm``) of fwd_intra. ``h`` (at a chunk's start) and ``dh``
    (gradient of the state at its end) [NT, HV, K, V] io; ``v_new``, ``dv2`` [B, T, HV, V] io. ``A_log`` [HV], ``dt_bias``
    [HV K] fp32 or None. ``gate``: "log", "softplus" or "bounded" (by ``lower_bound`` <= 0). ``beta_mode``: "raw",
    "sigmoid" or "sigmoid2". ``table``: chunk table of :func:`kernel_fun._cute.varlen.chunk_table`; None: every row of
    the batch is one sequence. NT = B ceil(T / 64), or the rows of ``table``.

    Gradients have the shape and dtype of their inputs; rows outside every chunk are 0. dA_partial [NT, HV] and
    dbias_partial [NT, HV, K] fp32 are sums over one chunk each, None where the parameter is; 0 for chunks without tokens.
    Runs on the current stream. ValueError or TypeError for anything outside this.
    """
    import torch

    B, T, H, K = q.shape
    HV, V_ = v.shape[2:]
    NT = B * -(-T // BT) if table is None else table.shape[0]
    io = q.dtype
    for name, x, shape, dtype in (
        ("k", k, (B, T, H, K), io),
        ("v", v, (B, T, HV, V_), io),
        ("g", g, (B, T, HV, K), None),
        ("beta", beta, (B, T, HV), None),
        ("A", A, (B, T, HV, BT), io),
        ("q_rstd", q_rstd, (B, T, H), torch.float32),
        ("k_rstd", k_rstd, (B, T, H), torch.float32),
        ("h", h, (NT, HV, K, V_), io),
        ("v_new", v_new, (B, T, HV, V_), io),
        ("dh", dh, (NT, HV, K, V_), io),
        ("dv2", dv2, (B, T, HV, V_), io),
        ("do", do, (B, T, HV, V_), io),
        ("A_log", A_log, (HV,), torch.float32),
        ("dt_bias", dt_bias, (HV * K,), torch.float32),
        ("table", table, (NT, 4), torch.int32),
    ):
        if x is None:
            continue
        if tuple(x.shape) != shape:
            raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(x.shape)}")
        if dtype is not None and x.dtype != dtype:
            raise TypeError(f"`{name}` must be {dtype}, got {x.dtype}")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias), ("table", table)):
        if x is not None and not x.is_contiguous():
            raise ValueError(f"`{name}` must be contiguous, got strides {list(x.stride())}")
    if l2norm != (q_rstd is not None) or l2norm != (k_rstd is not None):
        raise ValueError("`q_rstd` and `k_rstd` must be given with l2norm and be None without it")
    if HV % H:
        raise ValueError(f"`v` must have a multiple of {H} heads, got {HV}")
    if V_ % BV:
        raise ValueError(f"`v` must have a multiple of {BV} values, got {V_}")
    if gate == "bounded" and (lower_bound is None or not lower_bound <= 0.0):
        raise ValueError(f"`lower_bound` must be a number <= 0 with gate 'bounded', got {lower_bound}")
    tokens = B * T
    if tokens >= 1 << 31:
        raise ValueError(f"`q` must have fewer than 2^31 tokens, got {tokens}")
    config = Config(
        io=_name(q),
        g=_name(g),
        beta=_name(beta),
        K=K,
        gate=gate,
        beta_mode=beta_mode,
        l2norm=l2norm,
        has_A_log=A_log is not None,
        has_dt_bias=dt_bias is not None,
        packed=table is not None,
        shared=HV > H,
    )
    f32 = torch.float32
    fresh = q.new_empty if table is None else q.new_zeros
    empty = lambda x: fresh(x.shape, dtype=x.dtype)
    if config.shared:
        dq, dk = (fresh((B, T, HV, K), dtype=f32) for _ in range(2))
    else:
        dq, dk = empty(q), empty(k)
    dv, dg, dbeta = empty(v), empty(g), empty(beta)
    dA = fresh((NT, HV), dtype=f32) if config.has_A_log else None
    dbias = fresh((NT, HV, K), dtype=f32) if config.has_dt_bias else None
    if NT * HV * tokens:
        flat = lambda x: None if x is None else x.view(tokens, *x.shape[2:])
        ctas = min(NT * HV, device.of(q.device).sms)
        _compile(config)(
            *(_tma_operand(x, tokens) for x in (q, k, v, g)),
            beta.reshape(tokens, HV).contiguous(),
            _tma_operand(A, tokens),
            *(None if x is None else x.reshape(tokens, H).contiguous() for x in (q_rstd, k_rstd)),
            h.contiguous(),
            _tma_operand(v_new, tokens),
            dh.contiguous(),
            *(_tma_operand(x, tokens) for x in (dv2, do)),
            A_log,
            dt_bias,
            table,
            *map(flat, (dq, dk, dv, dg, dbeta)),
            dA,
            dbias,
            T,
            ctas,
            scale,
            lower_bound or 0.0,
        )
    if config.shared:
        dq, dk = bwd_grads_reduce(dq, q, q_rstd), bwd_grads_reduce(dk, k, k_rstd)
    return dq, dk, dv, dg, dbeta, dA, dbias


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _tma_operand(x: Tensor, tokens: int) -> Tensor:
    """[B, T, heads, D] as [tokens, heads, D] that TMA can address.

    Copied where its tokens are not equally spaced or its base or strides are not multiples of 16 bytes.
    """
    flat = x.reshape(tokens, *x.shape[2:])
    heads, D = flat.shape[1:]
    step = 16 // x.element_size()
    strides = (
        heads * D if tokens == 1 else flat.stride(0),
        D if heads == 1 else flat.stride(1),
        flat.stride(2),
    )
    if strides[2] == 1 and strides[0] % step == 0 and strides[1] % step == 0 and flat.data_ptr() % 16 == 0:
        return flat.as_strided(flat.shape, strides)
    return flat.new_empty(flat.shape).copy_(flat)

"""bwd_grads on Hopper: every gradient of a chunk from the states on both its sides, an item per value head.

Maths, per chunk of 64 tokens (i, j, t), channels c, values v; q^, k^ are q, k times their rstd, S = h, dS = dh:

A   dAqk = tril(do v_new^T),  dM = dv2 v^T            [64, 64] fp32 accumulators, io operands, 64 values a turn
    dq^T = S do^T,  dw^T = -S dv2^T,  dk^T = dS v_new^T     [K, 64] fp32; S and dS are read once
    dvb  = A^T dv2,  dv = io(beta dvb),  dbeta = dvb . v    [64, V]
    s    = sum_v S dS                                       [K] fp32
B   a = exp(gate(g)) and its products w, s, e by eights of tokens, fp32 (kernel_fun._cute.sweep); E: product of a up
    to a token
    D    = tril_-1(dM beta_j + io(dw) io(beta k^ E)^T)      [64, 64]
    Z    = io(D) A^T,  dAkk = -tril_-1(A^T io(Z)),  rk^T = io(dw^T) A
C   Q = scale q^ w, B = beta k^ w, K = k^ / w, dAkk: rounded to bf16; dAqk: a sum of two bf16 numbers; dAqk_ii in fp32
    dq, dk, dg = sweeps from dq, rk, dk;  dbeta += rk . k^
D   dl_t = sum_{i >= t} dg_i + total s + sum_t k^ (R dk), R: product of a after a token;  0 where a = 0
    dg, dA_log, d dt_bias by the gate's derivative; dq, dk = rstd (dy - (dy . y) y); dbeta by its sigmoid's

Rows past the last token: q = k = v = do = v_new = dv2 = A = beta = 0 and no decay, by selection; not stored. Before the
first token of a chunk with S = 0, dl is 0.

Modes in global memory: q, k, g, A, v, do, v_new, dv2 (tokens, D, heads); h, dh (K, V, HV, chunks).

    tiles      64 tokens, 128 channels (K = 64 is padded with zeros), 64 values a turn
    grid       a CTA an SM, items in turn, value heads of a chunk adjacent
    role       warps    registers   does
    MATH       0-7      240         A..D; a warpgroup owns 64 channels, a warp 16, tokens on the other axis;
                                    the gate: a thread owns two channels of 16 tokens
    LOAD       8-11     24          ring, A, then q k g of the items, a warp each
    pipe       stages   tx          holds
    ring       2        64 KB       h, dh, do, v_new, dv2, v of 64 values; one stage where g is fp32
    one        1        8 KB        A
    raw        1        48 KB       q, k, g (16 KB more where g is fp32); then dq, dk on their way out
    smem       X    w on its way from the gate's threads (B); dw, beta k^ E (B); dAqk, dAkk, Z, then half of w, and the rest
                    of dAqk (C); dg (D)
               A    another half of w, once it is dead (C)
               Y    s, e (B); sums over warps (D)

On one H200, 132 SMs: 14.9 us an item at V = 128 (HBM 7.8), 18.7 at 256 (12.4); about 5500 instructions a thread at
V = 128, issued in 40 % of the clocks of two warps a scheduler. At 256 the ring starves: B to D take 11 us, in which
it can take no more than two of an item's four turns.
"""

# sizes: two signatures name every tensor, and the roles that move them read beside the plan
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, cute

from kernel_fun._common import device
from kernel_fun._cute import pipe
from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.compile import DTYPES, Program, jit, symbol, tensor
from kernel_fun._cute.decay import GATES
from kernel_fun._cute.pipe import Pipe, Role
from kernel_fun._cute.tile import SMEM_BYTES, Tile, storage, tma_parts, vector
from kernel_fun._cute.varlen import FIRST, VALID
from kernel_fun.kda._kernels.sm90.bwd_grads_phases import (
    BT,
    BV,
    CHANNELS,
    DO,
    DV2,
    HALF_BYTES,
    MATH,
    TOKEN_VECTORS,
    V_NEW,
    Barrier,
    Phases,
    V,
)
from kernel_fun.kda._kernels.sm90.bwd_grads_reduce import bwd_grads_reduce
from kernel_fun.kda._kernels.sm90.chunk_inputs import facts_of, name_of
from kernel_fun.kda._kernels.sm90.rows import (
    Rows,
    flat,
    flattened,
    is_contiguous,
    packed_rows,
    tma_rows,
    uninitialised,
    zeros,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda._kernels.sm90.chunk_inputs import Facts

ARCH = "sm_90a"
LOAD = Role(8, 4, 24)
STORE = Role(11, 1)
"""The last warp of LOAD."""
THREADS = MATH.threads + LOAD.threads
BETA_MODES = ("raw", "sigmoid", "sigmoid2")


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
            ("g", self.g, (*half, "float32")),
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
    def stages(self) -> int:
        """Slots of the ring."""
        return 1 if self.g == "float32" else 2

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the storage."""
        ring = self.stages * 2 * (2 * CHANNELS * BV + 4 * BT * BV)
        g = (4 if self.g == "float32" else 2) * BT * CHANNELS
        tiles = 2 * (2 + 2) * BT * CHANNELS + g + 2 * 2 * BT * BT
        vectors = (len(TOKEN_VECTORS) + 2) * BT + 2 * CHANNELS + 128 // 4
        return ring + tiles + 4 * vectors + 8 * (2 * self.stages + 8)


class KdaBwdGradsSm90(Phases):
    """The kernel of one config."""

    def __init__(self, config: Config) -> None:
        self.c = config
        self.io, self.g = (getattr(cutlass, DTYPES[x]) for x in (config.io, config.g))
        self.state = Tile(self.io, CHANNELS, BV, 2 * config.stages)
        self.row = Tile(self.io, BT, BV, 4 * config.stages)
        self.row_t = Tile(self.io, BV, BT, 4 * config.stages, rows_contiguous=True)
        self.x = Tile(self.io, BT, CHANNELS)
        self.xx = Tile(self.io, BT, CHANNELS, 2)
        self.raw_g = Tile(self.g, BT, CHANNELS)
        self.square = Tile(self.io, BT, BT)
        self.square_t = Tile(self.io, BT, BT, rows_contiguous=True)
        slot = 2 * self.state.stage_bytes + 4 * self.row.stage_bytes
        self.ring = Pipe(config.stages, LOAD, (MATH,), tx_bytes=slot)
        self.qk = Pipe(1, LOAD, (STORE,), tx_bytes=2 * self.x.stage_bytes)
        self.gates = Pipe(1, LOAD, (STORE,), tx_bytes=self.raw_g.stage_bytes)
        self.out = Pipe(1, MATH)
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
            **{name: vector(Float32, BT) for name in TOKEN_VECTORS},
            base=vector(Float32, CHANNELS),
            seen=vector(Float32, CHANNELS),
            dvb_v=vector(Float32, 2 * BT),
            dA=vector(Float32, MATH.warps),
            ring=self.ring.field(),
            qk=self.qk.field(),
            gates=self.gates.field(),
            one=self.one.field(),
            out_qk=self.out.field(),
            out_g=self.out.field(),
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
        mQ, mK, mV, mG, mBeta, mA, mV_new, mDv2, mDo, mDq, mDk, mDv, mDg, mDbeta = [
            without_batch(x)
            for x in (mQ, mK, mV, mG, mBeta, mA, mV_new, mDv2, mDo, mDq, mDk, mDv, mDg, mDbeta)
        ]
        if cutlass.const_expr(self.c.l2norm):
            mQ_rstd, mK_rstd = without_batch(mQ_rstd), without_batch(mK_rstd)
        tma_dq, cDq, tma_dk, cDk = (None,) * 4
        if cutlass.const_expr(not self.c.shared):
            tma_dq, cDq = self.x.storer(modes([0, 2, 1], mDq))
            tma_dk, cDk = self.x.storer(modes([0, 2, 1], mDk))
        tma_dg, cDg = self.raw_g.storer(modes([0, 2, 1], mDg))
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
            tma_dq, cDq, tma_dk, cDk, tma_dg, cDg,
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
        tma_dq: cute.CopyAtom | None,
        cDq: cute.Tensor | None,
        tma_dk: cute.CopyAtom | None,
        cDk: cute.Tensor | None,
        tma_dg: cute.CopyAtom,
        cDg: cute.Tensor,
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
        ring, qk, gates, one = (getattr(self, x).bind(getattr(st, x)) for x in ("ring", "qk", "gates", "one"))
        out_qk, out_g = self.out.bind(st.out_qk), self.out.bind(st.out_g)
        pipe.start()
        warp_index = pipe.index_of_warp()
        if warp_index < MATH.warps:
            pipe.take_registers(MATH, pipe.registers_at_entry(THREADS))
            self.math(
                st, ring, qk, gates, one, out_qk, out_g, mBeta, mQ_rstd, mK_rstd, mA_log, mDt_bias, mTable, mDq, mDk, mDv, mDg, mDbeta,
                mDA, mDbias, T, items, HV, G, NV, scale, lower_bound,
            )  # fmt: skip
        else:
            pipe.take_registers(LOAD, pipe.registers_at_entry(THREADS))
            if warp_index == LOAD.first_warp:
                states = ((tma_h, mH, 0), (tma_dh, mDh, 1))
                rows = ((tma_do, mDo, DO), (tma_v_new, mV_new, V_NEW), (tma_dv2, mDv2, DV2), (tma_v, mV, V))
                self.load_ring(st, ring, states, rows, mTable, T, items, HV, NV)
            elif warp_index == LOAD.first_warp + 1:
                of_A, of_g = ((tma_A, mA, self.square, st.A),), ((tma_g, mG, self.raw_g, st.g),)
                self.load_tiles(one, of_A, gates, of_g, mTable, T, items, HV, Int32(1))
            elif warp_index == LOAD.first_warp + 2:
                of = (tma_q, mQ, self.x, st.q), (tma_k, mK, self.x, st.k)
                self.load_tiles(qk, of, qk, (), mTable, T, items, HV, G)
            elif warp_index == STORE.first_warp:
                of = ()
                if cutlass.const_expr(not self.c.shared):
                    of = (tma_dq, cDq, self.x, st.q), (tma_dk, cDk, self.x, st.k)
                of_g = ((tma_dg, cDg, self.raw_g, st.g),)
                self.store_tiles(out_qk, qk, of, out_g, gates, of_g, mTable, T, items, HV)

    @cute.jit
    def load_tiles(self, to, of, then, of_then, mTable, T: Int32, items: Int32, HV: Int32, G: Int32):
        """LOAD: tiles that an item needs once, of one pipe and, if there is one, of another; G value heads share one."""
        at, at_then = to.write_cursor(), then.write_cursor()
        grid = cute.arch.grid_dim()[0]
        for item in cutlass.range(cute.arch.block_idx()[0], items, grid, unroll=1):
            _, hv, first, valid = self.place(item, mTable, T, HV)
            if valid > 0:
                self.load_into(to, at, of, first, hv // G)
                at.advance()
                if cutlass.const_expr(len(of_then) > 0):
                    self.load_into(then, at_then, of_then, first, hv // G)
                    at_then.advance()

    def load_into(self, to: Any, at: Any, of: Any, first: Int32, head: Int32) -> None:
        to.wait_empty(at)
        barrier = to.expect(at)
        for tma, mX, tile, field in of:
            sX, gX = self.parts(tma, mX, tile, field, first, head)
            cute.copy(tma, gX[None, 0], sX[None, 0], tma_bar_ptr=barrier)

    @cute.jit
    def store_tiles(self, out_qk, qk, of_qk, out_g, gates, of_g, mTable, T: Int32, items: Int32, HV: Int32):
        """STORE: gradients of whole chunks; then their tiles are free."""
        at_out_qk, at_out_g, at_qk, at_g = (x.read_cursor() for x in (out_qk, out_g, qk, gates))
        grid = cute.arch.grid_dim()[0]
        for item in cutlass.range(cute.arch.block_idx()[0], items, grid, unroll=1):
            _, hv, first, valid = self.place(item, mTable, T, HV)
            if valid > 0:
                out_qk.wait_full(at_out_qk)
                if valid == BT:
                    self.store_from(of_qk, first, hv)
                qk.free(at_qk)
                out_g.wait_full(at_out_g)
                if valid == BT:
                    self.store_from(of_g, first, hv)
                gates.free(at_g)
                at_out_qk.advance()
                at_out_g.advance()
                at_qk.advance()
                at_g.advance()
        cute.arch.cp_async_bulk_wait_group(0)

    def store_from(self, of: Any, first: Int32, head: Int32) -> None:
        for tma, mX, tile, field in of:
            sX, gX = self.parts(tma, mX, tile, field, first, head)
            cute.copy(tma, sX[None, 0], gX[None, 0])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def parts(self, tma: Any, mX: Any, tile: Tile, field: Any, first: Int32, head: Int32) -> Any:
        """A tile in shared memory and the chunk of a head that it is of, as TMA sees them."""
        gX = cute.local_tile(cute.domain_offset((first, 0), mX[None, None, head]), tile.shape, (0, None))
        return tma_parts(tma, gX, tile.view(field))

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
    def math(
        self, st, ring, qk, gates, one, out_qk, out_g, mBeta, mQ_rstd, mK_rstd, mA_log, mDt_bias, mTable, mDq, mDk, mDv, mDg, mDbeta,
        mDA, mDbias, T: Int32, items: Int32, HV: Int32, G: Int32, NV: Int32, scale: Float32, lower_bound: Float32,
    ):  # fmt: skip
        """MATH: the phases of one item after another."""
        self.lanes(st)
        at_ring, at_qk, at_g, at_one = (x.read_cursor() for x in (ring, qk, gates, one))
        at_out_qk, at_out_g = out_qk.write_cursor(), out_g.write_cursor()
        dq, dk, dw, square = (cute.make_rmem_tensor(32, Float32) for _ in range(4))
        states, dvb_v = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        seen, bias = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Float32)
        A_log = cute.make_rmem_tensor(1, Float32)
        for x in (bias, A_log):
            x.fill(0.0)
        scalars = cute.make_rmem_tensor(2, Float32)
        raw_beta = cute.make_rmem_tensor(1, Int32)
        raw_beta.fill(0)
        grid, item_0 = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        chunk, hv, first, valid = self.place(item_0, mTable, T, HV)
        self.read_scalars(
            mBeta, mQ_rstd, mK_rstd, raw_beta, scalars, first, valid, hv, self.query_head(hv, G)
        )
        for item in cutlass.range(item_0, items, grid, unroll=1):
            following = cutlass.min(item + grid, items - 1)
            if valid > 0:
                self.put_scalars(mBeta, raw_beta, scalars, valid, scale)
                self.again(st).read_head(mA_log, mDt_bias, hv, A_log, bias)
                one.wait_full(at_one)
                if valid < BT:
                    self.blank(self.A_words, Int32(0), valid, Int32(0))
                self.publish(Barrier.MATH, MATH.threads)
                at_ring = self.again(st).products(
                    st, ring, at_ring, mDv, dq, dk, dw, square, states, seen, dvb_v, first, valid, hv, NV
                )
                qk.wait_full(at_qk)
                gates.wait_full(at_g)
                if valid < BT:
                    for words, halves, x in (
                        (self.q_words, 2, Int32(0)),
                        (self.k_words, 2, Int32(0)),
                        (self.g_words, self.g.width // 8, self.no_decay_word()),
                    ):
                        for half in cutlass.range_constexpr(halves):
                            self.blank(words, Int32(half * (HALF_BYTES // 4)), valid, x)
                    self.publish(Barrier.MATH, MATH.threads)
                self.again(st).scan(self.gate(A_log, lower_bound), bias)
                cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
                there = self.again(st)
                w, between = there.factors(), there.between()
                there.put_dvb_v(dvb_v)
                cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
                QB = there.through_A(st, dq, dk, dw, square, w, between)
                here = self.again(st)
                sums, k_dk = here.sweeps(w, QB, between, dq, dk, dw)
                cute.arch.fence_view_async_shared()  # TMA writes A where w waited
                one.free(at_one)
                at_one.advance()
                here.put_states(states, seen, between, k_dk)
                last = self.again(st)
                now = chunk, hv, first, valid
                chunk, hv, first, valid = self.place(following, mTable, T, HV)
                last.read_scalars(
                    mBeta, mQ_rstd, mK_rstd, raw_beta, scalars, first, valid, hv, self.query_head(hv, G)
                )
                last.read_head(mA_log, mDt_bias, now[1], A_log, bias)
                last.finish(
                    st, out_qk, at_out_qk, A_log, lower_bound, bias, dq, dk, dw, sums, mBeta, mQ_rstd, mDq, mDk, mDg, mDbeta, mDA, mDbias,
                    *now, self.query_head(now[1], G),
                )  # fmt: skip
                out_g.publish(at_out_g)
                at_qk.advance()
                at_g.advance()
                at_out_qk.advance()
                at_out_g.advance()
            else:
                chunk, hv, first, valid = self.place(following, mTable, T, HV)
                self.read_scalars(
                    mBeta, mQ_rstd, mK_rstd, raw_beta, scalars, first, valid, hv, self.query_head(hv, G)
                )


def without_batch(mX: cute.Tensor) -> cute.Tensor:
    """[1, tokens, ...] seen as [tokens, ...]."""
    return modes(list(range(1, cute.rank(mX))), mX)


def modes(order: list[int], mX: cute.Tensor) -> cute.Tensor:
    """A tensor with its modes in another order."""
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, order))


@jit(arch=ARCH)
def _compile(config: Config) -> Program:
    """Arguments of :class:`KdaBwdGradsSm90`; tokens B T, heads H and HV, V, chunks NT are run-time sizes."""
    c, f32 = config, "float32"
    tokens, H, HV, NT, V_ = symbol(), symbol(), symbol(), symbol(), symbol()
    K = c.K if c.K == CHANNELS else symbol()
    rstd = tensor(f32, 1, tokens, H, align=4) if c.l2norm else None
    beta = tensor(c.beta, 1, tokens, HV, align=2 if c.beta != f32 else 4)
    x = lambda: tensor(c.io, 1, tokens, H, K)
    out = (lambda: tensor(f32, 1, tokens, HV, K)) if c.shared else x
    state = lambda: tensor(c.io, NT, HV, K, V_)
    rows = lambda: tensor(c.io, 1, tokens, HV, V_)
    return Program(
        KdaBwdGradsSm90(c),
        (
            x(),
            x(),
            rows(),
            tensor(c.g, 1, tokens, HV, K),
            beta,
            tensor(c.io, 1, tokens, HV, BT),
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
            tensor(c.g, 1, tokens, HV, K),
            beta,
            tensor(f32, NT, HV, align=4) if c.has_A_log else None,
            tensor(f32, NT, HV, K, align=4) if c.has_dt_bias else None,
            Int32(1),
            Int32(1),
            Float32(1.0),
            Float32(0.0),
        ),
    )


@dataclass(frozen=True)
class Plan:
    """What a call's shapes, strides, dtypes and flags decide: the kernel, its rows, the sizes of its results."""

    config: Config
    inputs: tuple[Rows, Rows, Rows, Rows, Rows, Rows]
    """Of q, k, v, g, beta and A."""
    norms: tuple[Rows | None, Rows | None]
    """Of q_rstd and k_rstd."""
    upstream: tuple[Rows, Rows, Rows]
    """Of v_new, dv2 and do."""
    shares: tuple[int, ...]
    """[B, T, HV, K], of what the value heads of a query head give to dq and dk."""
    chunks: tuple[int, int, int]
    """NT, HV, K."""
    scalars: tuple[int, int, float, float]
    """T, CTAs, scale and lower bound, the last arguments of the kernel."""
    runs: bool


@lru_cache(maxsize=512)
def prepare(
    facts: tuple[Facts | None, ...], at: Any, *, scale: float, gate: str, lower_bound: float | None, beta_mode: str,
    l2norm: bool,
) -> Plan:  # fmt: skip
    """Everything about a launch but addresses. ValueError or TypeError names the argument that does not fit."""
    import torch

    q, k, v, g, beta, A, q_rstd, k_rstd, h, v_new, dh, dv2, do, A_log, dt_bias, table = facts
    B, T, H, K = q[0]
    HV, V_ = v[0][2:]
    NT = B * -(-T // BT) if table is None else table[0][0]
    io, f32 = q[2], torch.float32
    for name, x, shape, dtype in (
        ("k", k, (B, T, H, K), io),
        ("v", v, (B, T, HV, V_), io),
        ("g", g, (B, T, HV, K), None),
        ("beta", beta, (B, T, HV), None),
        ("A", A, (B, T, HV, BT), io),
        ("q_rstd", q_rstd, (B, T, H), f32),
        ("k_rstd", k_rstd, (B, T, H), f32),
        ("h", h, (NT, HV, K, V_), io),
        ("v_new", v_new, (B, T, HV, V_), io),
        ("dh", dh, (NT, HV, K, V_), io),
        ("dv2", dv2, (B, T, HV, V_), io),
        ("do", do, (B, T, HV, V_), io),
        ("A_log", A_log, (HV,), f32),
        ("dt_bias", dt_bias, (HV * K,), f32),
        ("table", table, (NT, 4), torch.int32),
    ):
        if x is None:
            continue
        if tuple(x[0]) != shape:
            raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(x[0])}")
        if dtype is not None and x[2] != dtype:
            raise TypeError(f"`{name}` must be {dtype}, got {x[2]}")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias), ("table", table)):
        if x is not None and not is_contiguous(x):
            raise ValueError(f"`{name}` must be contiguous, got strides {list(x[1])}")
    if l2norm != (q_rstd is not None) or l2norm != (k_rstd is not None):
        raise ValueError("`q_rstd` and `k_rstd` must be given with l2norm and be None without it")
    if HV % H:
        raise ValueError(f"`v` must have a multiple of {H} heads, got {HV}")
    if V_ % BV:
        raise ValueError(f"`v` must have a multiple of {BV} values, got {V_}")
    if gate == "bounded" and (lower_bound is None or not lower_bound <= 0.0):
        raise ValueError(f"`lower_bound` must be a number <= 0 with gate 'bounded', got {lower_bound}")
    if B * T >= 1 << 31:
        raise ValueError(f"`q` must have fewer than 2^31 tokens, got {B * T}")
    config = Config(
        io=name_of(io),
        g=name_of(g[2]),
        beta=name_of(beta[2]),
        K=K,
        gate=gate,
        beta_mode=beta_mode,
        l2norm=l2norm,
        has_A_log=A_log is not None,
        has_dt_bias=dt_bias is not None,
        packed=table is not None,
        shared=HV > H,
    )
    return Plan(
        config,
        inputs=(tma_rows(q), tma_rows(k), tma_rows(v), tma_rows(g), packed_rows(beta), tma_rows(A)),
        norms=(
            None if q_rstd is None else packed_rows(q_rstd),
            None if k_rstd is None else packed_rows(k_rstd),
        ),
        upstream=(tma_rows(v_new), tma_rows(dv2), tma_rows(do)),
        shares=(B, T, HV, K),
        chunks=(NT, HV, K),
        scalars=(T, min(NT * HV, device.of(at).sms), scale, lower_bound or 0.0),
        runs=NT * HV * B * T > 0,
    )


def launch(
    plan: Plan,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See :func:`bwd_grads`; on tensors whose facts are those that the plan was prepared from."""
    import torch

    c, f32 = plan.config, torch.float32
    like, fresh = (uninitialised, q.new_empty) if table is None else (zeros, q.new_zeros)
    if c.shared:
        dq, dk = fresh(plan.shares, dtype=f32), fresh(plan.shares, dtype=f32)
    else:
        dq, dk = like(q), like(k)
    dv, dg, dbeta = like(v), like(g), like(beta)
    dA = fresh(plan.chunks[:2], dtype=f32) if c.has_A_log else None
    dbias = fresh(plan.chunks, dtype=f32) if c.has_dt_bias else None
    if plan.runs:
        q_norms, k_norms = plan.norms
        _compile(c)(
            *map(flattened, (q, k, v, g, beta, A), plan.inputs),
            None if q_rstd is None else flattened(q_rstd, q_norms),
            None if k_rstd is None else flattened(k_rstd, k_norms),
            h.contiguous(),
            flattened(v_new, plan.upstream[0]),
            dh.contiguous(),
            flattened(dv2, plan.upstream[1]),
            flattened(do, plan.upstream[2]),
            A_log,
            dt_bias,
            table,
            *[flat(x) for x in (dq, dk, dv, dg, dbeta)],
            dA,
            dbias,
            *plan.scalars,
        )
    if c.shared:
        dq, dk = bwd_grads_reduce(dq, q, q_rstd), bwd_grads_reduce(dk, k, k_rstd)
    return dq, dk, dv, dg, dbeta, dA, dbias


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
    given = q, k, v, g, beta, A, q_rstd, k_rstd, h, v_new, dh, dv2, do, A_log, dt_bias, table
    plan = prepare(
        facts_of(*given), q.device, scale=scale, gate=gate, lower_bound=lower_bound, beta_mode=beta_mode,
        l2norm=l2norm,
    )  # fmt: skip
    return launch(plan, *given)

"""fwd_state on Hopper: the recurrence over chunks, and the output.

One CTA walks the chunks of one sequence and value head for BV columns of V, with the transposed state S^T [V, K] in
fp32 registers. Per chunk of BT = 64 tokens, a = 2^(log2 decay) [BT, K], one exponential per token and channel:

    E[t] = a[0] ... a[t]      R[t] = a[t+1] ... a[63]                  fp32, products only: exact for a gate of -inf
    qE = io(scale q^ E)       kE = io(-beta k^ E)    kR = io(k^ R)     [BT, K], written over q, g, k in shared memory
    t  = beta v + kE S                                                 [BT, V], fp32 accumulator preset to beta v
    v_new = io(A io(t))                                                A [BT, BT] io
    o  = io(qE S + Aqk v_new)                                          io(S) is the operand, and what h keeps
    S  = total S + kR^T v_new                                          fp32

q^, k^ are q, k times their rstd. Everything runs transposed, so that the state and then t, v_new are the register A
operand of WGMMA, 64 rows of V a warpgroup. Rows past the end of a sequence: a = 1 and q = k = v = A = beta = 0, by
selection; their o and v_new are not stored.

Modes in global memory: q, k, g, A, Aqk (T, D, heads, B); v, o, v_new (V, T, heads, B); h (V, K, heads, NT).

    grid       (V/BV, HV, N) flattened, V tiles adjacent; BV = 128, or 64 for few chains; 1 CTA an SM
    role       warps            does
    BUILD      K/16             gate, decays, qE, kE, kR in place: 2 channels of 16 tokens a thread
    STATE      BV/16            t, v_new, o, S; stores o, v_new, h; its first warp issues the loads
    pipe       stages   writer -> readers          holds
    raw        3 (2)    TMA -> BUILD, STATE        q, k, g of a chunk; freed by STATE. 2 with fp32 g or kept states
    built      as raw   BUILD -> STATE             the same slots once they hold qE, kR, kE; beta
    row        2        TMA -> STATE               v, A, Aqk, total; freed by STATE
    K, BV      threads  registers BUILD/STATE      smem KiB, 16-bit g, l2norm
    128, 128   512      64 / 192                   227
    128, 64    384      128 / 240                  203
    64, 128    384      88 / 208                   155
    64, 64     256      as at entry                131
"""

# sizes: a role reads top to bottom; the builder moves to operands.py once both forms have run on a GPU
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from kernel_fun._cute import copy, pipe, wgmma
from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.compile import DTYPES, Program, jit, symbol, tensor
from kernel_fun._cute.decay import GATES, LOG2E, Gate
from kernel_fun._cute.pipe import WARPGROUP, Pipe, Role
from kernel_fun._cute.tile import SMEM_BYTES, Tile, dims_first, storage, tma_parts, tokens_first, vector
from kernel_fun._cute.warp import pack, select, unpack

if TYPE_CHECKING:
    from torch import Tensor

BT = 64
ROWS = wgmma.M
"""Columns of V a STATE warpgroup owns: the rows of its products."""
SPAN = 16
"""Tokens of a chunk that a BUILD warp turns into operands, for 64 channels."""
REGISTERS = {(128, 128): (64, 192), (128, 64): (128, 240), (64, 128): (88, 208), (64, 64): (0, 0)}
"""(K, BV) -> registers of a BUILD and of a STATE thread; 0 = as at entry."""
FEW_CTAS = 100
"""Below this many CTAs of BV = 128 the V tile is 64."""
BETAS = ("raw", "sigmoid", "sigmoid2")


class Barrier(IntEnum):
    """First of the named barriers of each role; a warpgroup adds its index."""

    BUILD = 1
    STATE = 3


@dataclass(frozen=True)
class Config:
    """Static facts of one compiled kernel.

    ``io``, ``g``, ``beta``: torch dtype names. ``index``: dtype of cu_seqlens, empty for a dense batch.
    """

    io: str
    g: str
    beta: str
    K: int
    BV: int
    gate: str
    beta_mode: str
    l2norm: bool = False
    has_A_log: bool = True
    has_dt_bias: bool = True
    has_h0: bool = False
    state_v_first: bool = False
    want_ht: bool = False
    want_h: bool = False
    want_v_new: bool = False
    index: str = ""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("io", ("bfloat16", "float16")),
            ("g", (self.io, "float32")),
            ("beta", (self.io, "float32")),
            ("K", (64, 128)),
            ("BV", (64, 128)),
            ("gate", GATES),
            ("beta_mode", BETAS),
            ("index", ("", "int32", "int64")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {allowed}, got {getattr(self, name)!r}")
        if self.smem_bytes > SMEM_BYTES:
            raise ValueError(f"{self} needs {self.smem_bytes} bytes of shared memory, more than {SMEM_BYTES}")
        if pipe.register_budget(self.threads, (self.build, self.state)) < 0:
            raise ValueError(f"{self} takes more registers than an SM has")

    @property
    def is_packed(self) -> bool:
        return bool(self.index)

    @property
    def wide_g(self) -> bool:
        return self.g == "float32"

    @property
    def builders(self) -> int:
        """BUILD warpgroups, 64 channels each."""
        return self.K // 64

    @property
    def batch(self) -> int:
        """Tokens a BUILD thread holds as operands at once: as many as its registers leave room for."""
        return 4 if self.BV == 64 else 1 if self.io == "float16" else 2

    @property
    def holders(self) -> int:
        """STATE warpgroups, 64 columns of V each."""
        return self.BV // ROWS

    @property
    def build(self) -> Role:
        return Role(0, 4 * self.builders, REGISTERS[self.K, self.BV][0])

    @property
    def state(self) -> Role:
        return Role(4 * self.builders, 4 * self.holders, REGISTERS[self.K, self.BV][1])

    @property
    def threads(self) -> int:
        return self.build.threads + self.state.threads

    @property
    def raw_stages(self) -> int:
        return 2 if self.wide_g or self.want_h or self.want_v_new else 3

    @property
    def row_stages(self) -> int:
        return 2

    @property
    def smem_bytes(self) -> int:
        """Size of the storage. Tiles are whole KiB; the small fields before and after them are rounded up to it."""
        io = 2
        raw = BT * self.K * (io + io + (4 if self.wide_g else io))
        row = self.BV * BT * io + 2 * BT * BT * io
        out = self.BV * BT * io * (1 + self.want_v_new) + self.BV * self.K * io * self.want_h
        barriers = 8 * (3 * self.raw_stages + 2 * self.row_stages)
        before = round_up(barriers, 128) + 4 * BT * self.raw_stages
        before = round_up(before, 128) + 4 * self.K * self.row_stages
        after = 4 * 2 * SPAN * self.build.warps * self.l2norm
        tiles = raw * self.raw_stages + row * self.row_stages + out
        return round_up(before, 1024) + tiles + round_up(after, 1024)


class KdaFwdStateSm90:
    """The kernel of one config. E and R are views of the slots of g and k once BUILD has written kE and kR there."""

    def __init__(self, config: Config) -> None:
        self.config = c = config
        self.io, self.g, self.beta = (getattr(cutlass, DTYPES[name]) for name in (c.io, c.g, c.beta))
        raw, row = c.raw_stages, c.row_stages
        self.Q = Tile(self.io, BT, c.K, raw)
        self.G = Tile(self.g, BT, c.K, raw)
        self.E = Tile(self.io, BT, c.K, raw, pitch_bytes=self.G.stage_bytes)
        self.R = Tile(self.io, c.K, BT, raw, rows_contiguous=True)
        self.A = Tile(self.io, BT, BT, row)
        self.V = Tile(self.io, c.BV, BT, row, rows_contiguous=True)
        self.O = Tile(self.io, ROWS, BT, c.holders, rows_contiguous=True)
        self.H = Tile(self.io, ROWS, c.K, c.holders, rows_contiguous=True)
        self.raw = Pipe(raw, c.state, (c.state,), tx_bytes=2 * self.Q.stage_bytes + self.G.stage_bytes)
        self.built = Pipe(raw, c.build)
        self.row = Pipe(
            row, c.state, (c.state,), tx_bytes=self.V.stage_bytes + 2 * self.A.stage_bytes + 4 * c.K
        )

    def storage(self) -> Any:
        c = self.config
        optional = {}
        if c.l2norm:
            optional["rstd"] = vector(Float32, 2 * SPAN * c.build.warps)
        tiles = {}
        if c.want_v_new:
            tiles["v_new"] = self.O.field()
        if c.want_h:
            tiles["h"] = self.H.field()
        fields = storage(
            raw=self.raw.field(),
            built=self.built.field(),
            row=self.row.field(),
            beta=vector(Float32, BT * c.raw_stages),
            total=vector(Float32, c.K * c.row_stages),
            q=self.Q.field(),
            k=self.Q.field(),
            g=self.G.field(),
            v=self.V.field(),
            A=self.A.field(),
            Aqk=self.A.field(),
            o=self.O.field(),
            **tiles,
            **optional,
        )
        assert fields.size_in_bytes() == c.smem_bytes
        return fields

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mA: cute.Tensor,
        mAqk: cute.Tensor,
        mQr,
        mKr,
        mTotal: cute.Tensor,
        mH0,
        mALog,
        mBias,
        mCu,
        mFirst,
        mO: cute.Tensor,
        mHt,
        mH,
        mVn,
        scale: Float32,
        lower_bound: Float32,
        stream,
    ):
        c = self.config
        self.Storage = self.storage()
        N = mCu.shape[0] - 1 if const_expr(c.is_packed) else mV.shape[0]
        HV, NV = mV.shape[2], mV.shape[3] // c.BV
        states = [0, 1, 3, 2] if const_expr(not c.state_v_first) else [0, 1, 2, 3]
        vk = lambda m: cute.make_tensor(m.iterator, cute.select(m.layout, states))
        out = [*self.O.storer(dims_first(mO)), dims_first(mO)]
        if const_expr(c.want_v_new):
            out += [*self.O.storer(dims_first(mVn)), dims_first(mVn)]
        else:
            out += [None, None, None]
        if const_expr(c.want_h):
            out += [*self.H.storer(cute.make_tensor(mH.iterator, cute.select(mH.layout, [3, 2, 1, 0])))]
        else:
            out += [None, None]
        self.kda_fwd_state_sm90(
            *self.Q.loader(tokens_first(mQ)),
            *self.Q.loader(tokens_first(mK)),
            *self.G.loader(tokens_first(mG)),
            *self.V.loader(dims_first(mV)),
            *self.A.loader(tokens_first(mA)),
            *self.A.loader(tokens_first(mAqk)),
            *out,
            mBeta,
            mQr,
            mKr,
            mTotal,
            vk(mH0) if const_expr(c.has_h0) else None,
            vk(mHt) if const_expr(c.want_ht) else None,
            mALog,
            mBias,
            mCu,
            mFirst,
            scale,
            lower_bound,
            mV.shape[1],
            NV,
            HV,
            HV // mQ.shape[2],
        ).launch(grid=(NV * HV * N, 1, 1), block=(c.threads, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kda_fwd_state_sm90(
        self,
        tmaQ: cute.CopyAtom,
        mQ: cute.Tensor,
        tmaK: cute.CopyAtom,
        mK: cute.Tensor,
        tmaG: cute.CopyAtom,
        mG: cute.Tensor,
        tmaV: cute.CopyAtom,
        mV: cute.Tensor,
        tmaA: cute.CopyAtom,
        mA: cute.Tensor,
        tmaAqk: cute.CopyAtom,
        mAqk: cute.Tensor,
        tmaO: cute.CopyAtom,
        mO: cute.Tensor,
        rowsO: cute.Tensor,
        tmaVn,
        mVn,
        rowsVn,
        tmaH,
        mH,
        mBeta: cute.Tensor,
        mQr,
        mKr,
        mTotal: cute.Tensor,
        mH0,
        mHt,
        mALog,
        mBias,
        mCu,
        mFirst,
        scale: Float32,
        lower_bound: Float32,
        T: Int32,
        NV: Int32,
        HV: Int32,
        G: Int32,
    ):
        c = self.config
        st = SmemAllocator().allocate(self.Storage)
        raw, built, row = self.raw.bind(st.raw), self.built.bind(st.built), self.row.bind(st.row)
        pipe.start()

        x = cute.arch.block_idx()[0]
        vt, hv, n = x % NV, x // NV % HV, x // NV // HV
        if const_expr(c.is_packed):
            b, start = Int32(0), Int32(mCu[n])
            length, first = Int32(mCu[n + 1]) - start, Int32(mFirst[n])
        else:
            b, start, length = n, Int32(0), T
            first = n * ((T + BT - 1) // BT)
        NT = (length + BT - 1) // BT
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        entry = pipe.registers_at_entry(c.threads)
        if warpgroup < c.builders:
            pipe.take_registers(c.build, entry)
            scalars = (mBeta, mQr, mKr, b * T + start, HV, hv, mQ.shape[2], hv // G)
            A_log = mALog[hv] if const_expr(c.has_A_log) else None
            gate = Gate.of_head(c.gate, A_log, lower_bound)
            self.build(
                st, raw, built, row, scalars, gate, mBias[hv, None] if const_expr(c.has_dt_bias) else None,
                scale, warpgroup, pipe.index_of_warp() % 4, length, NT,
            )  # fmt: skip
        else:
            pipe.take_registers(c.state, entry)
            half = warpgroup - c.builders
            tokens = lambda m, head: cute.domain_offset((start, 0), m[None, None, head, b])
            parts = lambda tma, m, head, tile, field: tma_parts(
                tma, cute.local_tile(tokens(m, head), tile.shape, (None, 0)), tile.view(field)
            )
            gV = cute.local_tile(
                cute.domain_offset((0, start), mV[None, None, hv, b]), self.V.shape, (vt, None)
            )
            raws = (
                (tmaG, *parts(tmaG, mG, hv, self.G, st.g)),
                (tmaK, *parts(tmaK, mK, hv // G, self.Q, st.k)),
                (tmaQ, *parts(tmaQ, mQ, hv // G, self.Q, st.q)),
            )
            rows = (
                (tmaV, *tma_parts(tmaV, gV, self.V.view(st.v))),
                (tmaA, *parts(tmaA, mA, hv, self.A, st.A)),
                (tmaAqk, *parts(tmaAqk, mAqk, hv, self.A, st.Aqk)),
            )
            gTotal = cute.domain_offset((first, 0), mTotal[None, hv, None])
            tile = vt * c.holders + half
            cols = lambda m: cute.local_tile(
                cute.domain_offset((0, start), m[None, None, hv, b]), (ROWS, BT), (tile, None)
            )
            state = lambda m: cute.local_tile(m[n, hv, None, None], (ROWS, c.K), (tile, 0))
            out = (tmaO, cols(mO), self.O.view(st.o), cols(rowsO) if const_expr(c.is_packed) else None)
            new = kept = None
            if const_expr(c.want_v_new):
                new = (
                    tmaVn,
                    cols(mVn),
                    self.O.view(st.v_new),
                    cols(rowsVn) if const_expr(c.is_packed) else None,
                )
            if const_expr(c.want_h):
                gH = cute.local_tile(
                    cute.domain_offset((0, 0, first), mH[None, None, hv, None]), (ROWS, c.K), (tile, 0, None)
                )
                kept = (tmaH, gH, self.H.view(st.h), None)
            self.hold(
                st, raw, built, row, raws, rows, gTotal, out, new, kept,
                state(mH0) if const_expr(c.has_h0) else None,
                state(mHt) if const_expr(c.want_ht) else None, half, length, NT,
            )  # fmt: skip

    @cute.jit
    def build(
        self, st, raw, built, row, scalars, gate: Gate, gBias, scale: Float32, half: Int32, part: Int32,
        length: Int32, NT: Int32,
    ):  # fmt: skip
        """BUILD: one pair of channels over 16 tokens of a chunk a thread; warp ``part`` of warpgroup ``half``."""
        c = self.config
        bias = cute.make_rmem_tensor(2, Float32)
        bias.fill(0.0)
        if const_expr(c.has_dt_bias):
            cute.autovec_copy(cute.local_tile(gBias, (2,), (half * 32 + cute.arch.lane_idx(),)), bias)
        rstd, beta = Float32(0.0), self.beta(0.0)
        if NT > 0:
            rstd, beta = self.row_scalars(scalars, Int32(0), length)
        at_raw, at_row = raw.read_cursor(), row.read_cursor()
        for n in cutlass.range(NT, unroll=1):
            raw.wait_full(at_raw)
            thread, slot, left = pipe.thread_again(), at_raw.index, length - n * BT
            a = cute.make_rmem_tensor((SPAN, 2), Float32)
            self.decays(st, thread, slot, a, bias, gate)
            if left < BT:
                self.past_end(st, thread, slot, row, at_row, a, half, part, left)
            self.share(st, thread, slot, a, rstd, self.activated(beta.to(Float32)), scale, left)
            self.meet(half)
            E, R = self.around(st, thread, slot, a, part)
            self.meet(half)
            self.sweep(st, thread, slot, a, E, R, scale)
            built.publish(at_raw)
            # loaded for the chunk after, with no branch: a branch here would wait for the values
            rstd, beta = self.row_scalars(scalars, (n + 1) * BT, length)
            at_raw.advance()
            at_row.advance()

    def row_scalars(self, scalars, token: Int32, length: Int32) -> tuple[Any, Any]:
        """A lane's row of the chunk at ``token``: q_rstd (lanes 0-15) or k_rstd, and beta, raw. The last row past the end."""
        mBeta, mQr, mKr, first, HV, hv, H, head = scalars
        thread = pipe.thread_again()
        t = token + thread // 32 % 4 * SPAN + thread % SPAN
        here = Int64(first + cutlass.min(t, length - 1))
        rstd, beta = Float32(0.0), flat(mBeta.iterator.toint(), self.beta)[here * HV + hv]
        if const_expr(self.config.l2norm):
            is_q = thread % 32 < SPAN
            address = Int64(cutlass.select_(is_q, mQr.iterator.toint(), mKr.iterator.toint()))
            rstd = flat(address, Float32)[here * H + head]
        return rstd, beta

    def decays(self, st, thread: Int32, slot: Int32, a: cute.Tensor, bias: cute.Tensor, gate: Gate) -> None:
        """a = 2^(log2 decay) of this thread's tokens and channels."""
        for t, raw in enumerate(self.gates(st, thread, slot)):
            for e in range(2):
                a[t, e] = gate.decay(raw[e] + bias[e] if self.config.has_dt_bias else raw[e])

    def gates(self, st, thread: Int32, slot: Int32) -> Iterator[Any]:
        """This thread's raw gates: per token, the two channels. Fp32 ones are read a few at a time."""
        if self.config.wide_g:
            wG, own = self.G.words(st.g, Int64, slot), wide_word(thread)
            for first in range(0, SPAN, 4):
                words = [wG[(own ^ (2 * (t % 8))) + 16 * t] for t in range(first, first + 4)]
                yield from map(halves, words)
        else:
            wG, own = self.G.words(st.g, Int32, slot), word(thread)
            words = [wG[row(own, t)] for t in range(SPAN)]
            yield from (unpack(w, self.io) for w in words)

    def exchanged(self, thread: Int32) -> tuple[Any, Any]:
        """Two fp32 words of g that this thread alone has read: its first row's, or its first two rows'."""
        if self.config.wide_g:
            own = 2 * wide_word(thread)
            return own, own + 1
        own = word(thread)
        return row(own, 0), row(own, 1)

    @cute.jit
    def past_end(
        self, st, thread: Int32, slot: Int32, ring, at, a: cute.Tensor, half: Int32, part: Int32, left: Int32,
    ):  # fmt: skip
        """Rows past the end of a sequence: a = 1, q = k = 0; in a packing, where TMA brought the next one's, v = A = 0."""
        c = self.config
        wQ, wK, own = self.Q.words(st.q, Int32, slot), self.Q.words(st.k, Int32, slot), word(thread)
        for t in cutlass.range_constexpr(SPAN):
            if part * SPAN + t >= left:
                a[t, 0] = Float32(1.0)
                a[t, 1] = Float32(1.0)
                wQ[row(own, t)] = Int32(0)
                wK[row(own, t)] = Int32(0)
        if const_expr(c.is_packed):
            ring.wait_full(at)
            wV, wA = self.V.words(st.v, Int32, at.index), self.A.words(st.A, Int32, at.index)
            for t in cutlass.range_constexpr(SPAN):
                if part * SPAN + t >= left:
                    mine = (part * SPAN + t) * 32 + thread % 32
                    for u in cutlass.range_constexpr(c.holders):
                        if half == u % c.builders:
                            wV[u * (BT * 32) + mine] = Int32(0)
                    if half == 0:
                        wA[mine] = Int32(0)

    def share(
        self, st, thread: Int32, slot: Int32, a: cute.Tensor, rstd: Float32, beta: Float32, scale: Float32,
        left: Int32,
    ) -> None:  # fmt: skip
        """The product of this thread's decays to its warpgroup; row scalars to its warp, beta to STATE as well."""
        c = self.config
        lane, warp = thread % 32, thread // 32
        wD, at = self.G.words(st.g, Float32, slot), self.exchanged(thread)
        for e in range(2):
            D = a[0, e]
            for t in range(1, SPAN):
                D = D * a[t, e]
            wD[at[e]] = D
        r = warp % 4 * SPAN + lane % SPAN  # two lanes a row write the same
        sBeta = st.beta.get_tensor(cute.make_layout((BT, c.raw_stages)))
        sBeta[r, slot] = select(r < left, beta, Float32(0.0))
        if c.l2norm:
            sRstd = st.rstd.get_tensor(cute.make_layout((2 * SPAN, c.build.warps)))
            sRstd[lane, warp] = rstd * select(lane < SPAN, scale, Float32(-1.0))

    def around(
        self, st, thread: Int32, slot: Int32, a: cute.Tensor, part: Int32
    ) -> tuple[list[Any], list[Any]]:
        """E before this thread's rows and minus R after them, from the products of the other parts."""
        wD, at = self.G.words(st.g, Float32, slot), self.exchanged(thread)
        one = Float32(1.0)
        E, R = [one, one], [Float32(-1.0), Float32(-1.0)]
        for u in range(BT // SPAN):
            for e in range(2):
                D = wD[at[e] + (u - part) * (SPAN * 32)]
                if u < BT // SPAN - 1:
                    E[e] = E[e] * select(u < part, D, one)
                if u > 0:
                    R[e] = R[e] * select(u > part, D, one)
        return E, R

    def sweep(
        self, st, thread: Int32, slot: Int32, a: cute.Tensor, E: list[Any], R: list[Any], scale: Float32
    ) -> None:
        """Forwards qE and -beta kE, then backwards kR. Words are read a batch ahead: no load may pass a store."""
        c, io = self.config, self.io
        wQ, wK, wE = (
            self.Q.words(st.q, Int32, slot),
            self.Q.words(st.k, Int32, slot),
            self.E.words(st.g, Int32, slot),
        )
        own = word(thread)
        size = c.batch
        batches = SPAN // size
        read = lambda wX, b: [wX[row(own, size * b + t)] for t in range(size)]
        sBeta = st.beta.get_tensor(cute.make_layout((BT, c.raw_stages)))[None, slot]
        betas = lambda b: vector_of(sBeta, size, thread // 32 % 4 * batches + b)
        sq, sk = lambda b: [scale] * size, lambda b: [Float32(-1.0)] * size
        if c.l2norm:
            sRstd = st.rstd.get_tensor(cute.make_layout((2 * SPAN, c.build.warps)))[None, thread // 32]
            sq, sk = lambda b: vector_of(sRstd, size, b), lambda b: vector_of(sRstd, size, batches + b)
        ahead = (read(wQ, 0), read(wK, 0), sq(0), sk(0), betas(0))
        for b in range(batches):
            q, k, fq, fk, beta = ahead
            xQ, xK = [], []
            for t in range(size):
                pq, pk, f = unpack(q[t], io), unpack(k[t], io), fk[t] * beta[t]
                for e in range(2):
                    E[e] = E[e] * a[size * b + t, e]
                    xQ.append(pq[e] * fq[t] * E[e])
                    xK.append(pk[e] * f * E[e])
            if b + 1 < batches:
                ahead = (read(wQ, b + 1), read(wK, b + 1), sq(b + 1), sk(b + 1), betas(b + 1))
            for t in range(size):
                wQ[row(own, size * b + t)] = pack(xQ[2 * t], xQ[2 * t + 1], io)
                wE[row(own, size * b + t)] = pack(xK[2 * t], xK[2 * t + 1], io)
        ahead = (read(wK, batches - 1), sk(batches - 1))
        for b in range(batches - 1, -1, -1):
            k, fk = ahead
            xK = [None] * (2 * size)
            for t in range(size - 1, -1, -1):
                pk = unpack(k[t], io)
                for e in range(2):
                    xK[2 * t + e] = pk[e] * fk[t] * R[e]
                    R[e] = R[e] * a[size * b + t, e]
            if b > 0:
                ahead = (read(wK, b - 1), sk(b - 1))
            for t in range(size):
                wK[row(own, size * b + t)] = pack(xK[2 * t], xK[2 * t + 1], io)

    @cute.jit
    def meet(self, half: Int32):
        """Barrier of a BUILD warpgroup; of all where fp32 g lies under the operands of the other."""
        c = self.config
        if const_expr(c.wide_g or c.builders == 1):
            cute.arch.barrier(barrier_id=int(Barrier.BUILD), number_of_threads=c.build.threads)
        elif half == 0:
            cute.arch.barrier(barrier_id=int(Barrier.BUILD), number_of_threads=WARPGROUP)
        else:
            cute.arch.barrier(barrier_id=Barrier.BUILD + 1, number_of_threads=WARPGROUP)

    @cute.jit
    def activated(self, beta: Float32):
        if const_expr(self.config.beta_mode == "sigmoid"):
            beta = sigmoid(beta)
        elif const_expr(self.config.beta_mode == "sigmoid2"):
            beta = 2.0 * sigmoid(beta)
        return beta

    @cute.jit
    def hold(
        self, st, raw, built, row, raws, rows, gTotal, out, new, kept, gH0, gHt, half: Int32, length: Int32, NT: Int32,
    ):  # fmt: skip
        """STATE: 64 columns of V for the whole sequence."""
        c = self.config
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        mma_t = wgmma.mma(self.io, BT)
        mma_s = wgmma.mma(self.io, c.K, b_rows_contiguous=True)
        thr_t, thr_s = mma_t.get_slice(tidx), mma_s.get_slice(tidx)
        tCrE = wgmma.operand_b(thr_t, self.E.view(st.g))
        tCrQ = wgmma.operand_b(thr_t, self.Q.view(st.q))
        tCrA = wgmma.operand_b(thr_t, self.A.view(st.A))
        tCrAqk = wgmma.operand_b(thr_t, self.A.view(st.Aqk))
        tCrR = wgmma.operand_b(thr_s, self.R.view(st.k))
        acc_S = wgmma.accumulator(thr_s, c.K)
        acc_V, acc_O = wgmma.accumulator(thr_t, BT), wgmma.accumulator(thr_t, BT)
        rS, rV = wgmma.operand_a(thr_t, c.K), wgmma.operand_a(thr_t, BT)
        rO = cute.make_rmem_tensor(acc_O.layout, self.io)

        sV = cute.local_tile(self.V.view(st.v), (ROWS, BT, c.row_stages), (half, 0, 0))
        load = copy.load_transposed(mma_t, self.io, tidx)
        rVc = wgmma.as_accumulator(rV, acc_V)
        tVsV, tVrV = load.partition_S(sV), load.retile(rVc)
        put_t = copy.store_transposed(mma_t, self.io, tidx)
        put_s = copy.store_transposed(mma_s, self.io, tidx)
        tBsB = wgmma.columns(
            thr_t, st.beta.get_tensor(cute.make_layout((BT, c.raw_stages))), BT, c.raw_stages
        )
        tDsD = wgmma.columns(
            thr_s, st.total.get_tensor(cute.make_layout((c.K, c.row_stages))), c.K, c.row_stages
        )
        beta = cute.make_rmem_tensor((2, BT // 8), Float32)
        total = cute.make_rmem_tensor((2, c.K // 8), Float32)

        if const_expr(c.has_h0):
            cute.autovec_copy(thr_s.partition_C(gH0), acc_S)
        else:
            acc_S.fill(0.0)
        # the first warp of the role loads: a chunk goes into the slots that the chunk before the last has left
        loader = half == 0 and cute.arch.make_warp_uniform(tidx // 32) == 0
        load_raw, load_row = raw.write_cursor(), row.write_cursor()
        if loader:
            for n in cutlass.range_constexpr(c.raw_stages - 1):
                if n < NT:
                    self.load(raw, load_raw, raws, n)
                    load_raw.advance()
            for n in cutlass.range_constexpr(c.row_stages - 1):
                if n < NT:
                    self.load_row(st, row, load_row, rows, gTotal, n)
                    load_row.advance()
        at_raw, at_row = raw.read_cursor(), row.read_cursor()
        for n in cutlass.range(NT, unroll=1):
            if loader:
                if n + c.raw_stages - 1 < NT:
                    self.load(raw, load_raw, raws, n + c.raw_stages - 1)
                    load_raw.advance()
                if n + c.row_stages - 1 < NT:
                    self.load_row(st, row, load_row, rows, gTotal, n + c.row_stages - 1)
                    load_row.advance()
            i, j = at_raw.index, at_row.index
            left = length - n * BT
            row.wait_full(at_row)
            built.wait_full(at_raw)
            # t = beta v + kE S, o = qE S
            cute.copy(load, tVsV[None, None, None, j], tVrV)
            cute.autovec_copy(tBsB[None, None, i], beta)
            acc_V.store(rVc.load().to(Float32))
            wgmma.scale_columns(acc_V, beta)
            wgmma.round_to(rS, acc_S)
            wgmma.fence()
            wgmma.gemm(mma_t, acc_V, rS, tCrE[None, None, None, i], True)
            wgmma.gemm(mma_t, acc_O, rS, tCrQ[None, None, None, i], False)
            if n > 0:
                self.send(out, n - 1, Int32(BT), half, tidx)
            if const_expr(c.want_h):
                self.vacate(half, tidx)
                self.stage(put_s, wgmma.as_accumulator(rS, acc_S), kept, half)
                self.send(kept, n, Int32(BT), half, tidx)
            wgmma.wait(0)
            # v_new = A t
            wgmma.round_to(rV, acc_V)
            wgmma.fence()
            wgmma.gemm(mma_t, acc_V, rV, tCrA[None, None, None, j], False)
            cute.autovec_copy(tDsD[None, None, j], total)
            wgmma.scale_columns(acc_S, total)
            wgmma.wait(0)
            wgmma.round_to(rV, acc_V)
            # S = total S + kR^T v_new, o += Aqk v_new
            wgmma.fence()
            wgmma.gemm(mma_s, acc_S, rV, tCrR[None, None, None, i], True)
            wgmma.gemm(mma_t, acc_O, rV, tCrAqk[None, None, None, j], True)
            if const_expr(c.want_v_new):
                self.vacate(half, tidx)
                self.stage(put_t, rVc, new, half)
                self.send(new, n, left, half, tidx)
            self.vacate(half, tidx)
            wgmma.wait(0)
            raw.free(at_raw)
            row.free(at_row)
            rO.store(acc_O.load().to(self.io))
            self.stage(put_t, rO, out, half)
            at_raw.advance()
            at_row.advance()
        if NT > 0:
            self.send(out, NT - 1, length - (NT - 1) * BT, half, tidx)
        if const_expr(c.want_ht):
            cute.autovec_copy(acc_S, thr_s.partition_C(gHt))
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def load(self, ring, at, copies, n):
        """Tile n of every copy into a slot, once it is free. Returns the slot's barrier."""
        ring.wait_empty(at)
        barrier = ring.expect(at)
        for tma, tXsX, tXgX in copies:
            cute.copy(tma, tXgX[None, n], tXsX[None, at.index], tma_bar_ptr=barrier)
        return barrier

    @cute.jit
    def load_row(self, st, ring, at, copies, gTotal: cute.Tensor, n):
        """As :meth:`load`, and the chunk's total decay."""
        c = self.config
        barrier = self.load(ring, at, copies, n)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=32 * c.K)
        sTotal = st.total.get_tensor(cute.make_layout((c.K, c.row_stages)))
        with cute.arch.elect_one():
            cute.copy(bulk, gTotal[n, None], sTotal[None, at.index], mbar_ptr=barrier)

    @cute.jit
    def vacate(self, half: Int32, tidx: Int32):
        """Wait until the store whose staging tile is written next has left it: all but the other kinds' latest ones."""
        c = self.config
        if cute.arch.make_warp_uniform(tidx // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(c.want_h + c.want_v_new, read=True)
        cute.arch.barrier(barrier_id=Barrier.STATE + half, number_of_threads=WARPGROUP)

    @cute.jit
    def stage(self, put, rX: cute.Tensor, to, half: Int32):
        """A result in accumulator layout to this warpgroup's staging tile of ``to``."""
        one = to[2][None, None, half]
        cute.copy(put, put.retile(rX), put.partition_D(one))

    @cute.jit
    def send(self, to, n: Int32, left: Int32, half: Int32, tidx: Int32):
        """The staging tile to tile n of ``to``, of which ``left`` tokens are inside the sequence."""
        tma, gX, sX, rows = to
        leader = cute.arch.make_warp_uniform(tidx // 32) == 0
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=Barrier.STATE + half, number_of_threads=WARPGROUP)
        tXsX, tXgX = tma_parts(tma, gX, sX)
        if const_expr(rows is not None):
            if left < BT:
                copy.rows_out(sX[None, None, half], rows[None, None, n], left, tidx, WARPGROUP)
            elif leader:
                cute.copy(tma, tXsX[None, half], tXgX[None, n])
        elif leader:
            cute.copy(tma, tXsX[None, half], tXgX[None, n])
        if leader:
            cute.arch.cp_async_bulk_commit_group()


def word(thread: Any) -> Any:
    """A BUILD thread's 32-bit word, a pair of channels, in the first of its 16 rows of a 16-bit tile.

    64 channels are 64 rows of 32 words, and a warp has 16 of these rows.
    """
    return thread // 32 * (SPAN * 32) + thread % 32


def wide_word(thread: Any) -> Any:
    """The same in 64-bit words of an fp32 tile: 32 channels are 64 rows of 16 words."""
    warp, lane = thread // 32, thread % 32
    return (warp // 4 * 2 + lane // 16) * (BT * 16) + warp % 4 * (SPAN * 16) + lane % 16


def row(own: Any, t: int) -> Any:
    """The word of row t: the 128-byte swizzle puts it at ``word ^ 4 (t % 8)``."""
    return (own ^ (4 * (t % 8))) + 32 * t


def halves(word: Any) -> Any:
    """A 64-bit word as two fp32 values."""
    both = cute.make_rmem_tensor(1, Int64)
    both[0] = word
    return cute.make_tensor(cute.recast_ptr(both.iterator, dtype=Float32), cute.make_layout(2))


def vector_of(sX: cute.Tensor, size: int, index: Any) -> cute.Tensor:
    """Elements size * index ... of a vector in shared memory, loaded together."""
    loaded = cute.make_rmem_tensor(size, sX.element_type)
    cute.autovec_copy(cute.local_tile(sX, (size,), (index,)), loaded)
    return loaded


def flat(address: Any, dtype: Any) -> cute.Tensor:
    """Global memory at an address as elements in a row."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1 << 30))


def round_up(x: int, step: int) -> int:
    return -(-x // step) * step


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x) in fp32; 0 and 1 at the ends."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2E, fastmath=True))


@jit(arch="sm_90a")
def _compile(config: Config) -> Program:
    """Fake tensors in the order of :meth:`KdaFwdStateSm90.__call__`; an absent operand is None."""
    c = config
    B, T, H, HV, V, NT, N, N1 = (symbol() for _ in range(8))
    states = (N, HV, V, c.K) if c.state_v_first else (N, HV, c.K, V)
    f32 = "float32"
    opt = lambda use, *args, **kw: tensor(*args, **kw) if use else None
    token_head = lambda dtype, heads, use=True: opt(use, dtype, B, T, heads, align=4 if dtype == f32 else 2)
    return Program(
        KdaFwdStateSm90(c),
        (
            tensor(c.io, B, T, H, c.K),
            tensor(c.io, B, T, H, c.K),
            tensor(c.io, B, T, HV, V),
            tensor(c.g, B, T, HV, c.K),
            token_head(c.beta, HV),
            tensor(c.io, B, T, HV, BT),
            tensor(c.io, B, T, HV, BT),
            token_head(f32, H, c.l2norm),
            token_head(f32, H, c.l2norm),
            tensor(f32, NT, HV, c.K),
            opt(c.has_h0, f32, *states),
            opt(c.has_A_log, f32, HV, align=4),
            opt(c.has_dt_bias, f32, HV, c.K, align=4, divisibility=2),
            opt(c.is_packed, c.index or "int32", N1, align=4),
            opt(c.is_packed, "int32", N1, align=4),
            tensor(c.io, B, T, HV, V),
            opt(c.want_ht, f32, *states),
            opt(c.want_h, c.io, NT, HV, c.K, V),
            opt(c.want_v_new, c.io, B, T, HV, V),
            Float32(1.0),
            Float32(1.0),
        ),
    )


def v_tile(chains: int, V: int, *, wide: bool) -> int:
    """BV from counts alone: ``chains`` = N HV; ``wide``: fp32 g together with kept states, whose tiles leave no room for 128."""
    return 64 if V % 128 or wide or chains * (V // 128) < FEW_CTAS else 128


def fwd_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    Aqk: Tensor,
    q_rstd: Tensor | None,
    k_rstd: Tensor | None,
    total: Tensor,
    h0: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: tuple[Tensor, Tensor] | None,
    *,
    scale: float,
    gate: str,
    lower_bound: float | None,
    beta_mode: str,
    l2norm: bool,
    state_v_first: bool,
    want_ht: bool,
    want_h: bool,
    want_v_new: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The recurrence over chunks, and the output.

    q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``, g ``[B, T, HV, K]``, beta ``[B, T, HV]``: the caller's own, io dtype bf16 or
    fp16; g and beta may be fp32. A, Aqk ``[B, T, HV, 64]`` io, scale in Aqk; q_rstd, k_rstd ``[B, T, H]`` fp32 with
    ``l2norm``, else None; total ``[NT, HV, K]`` fp32. h0 ``[N, HV, K, V]`` fp32 (``[N, HV, V, K]`` with ``state_v_first``) or
    None for zeros. A_log ``[HV]``, dt_bias ``[HV, K]`` fp32 or None for zeros; not read by gate "log". ``table``: None for a
    dense batch, else (cu_seqlens ``[N + 1]`` int32 or int64, first chunk of each sequence ``[N + 1]`` int32).

    Returns o ``[B, T, HV, V]`` io, zero outside every sequence; ht fp32 in the layout of h0; h ``[NT, HV, K, V]`` io, the
    state at the start of each chunk (rows past the last chunk of a packing are not written); v_new ``[B, T, HV, V]`` io.
    Those not wanted are None. ValueError or TypeError names the argument that does not fit.
    """
    import torch

    B, T, HV, V = v.shape
    H, K = q.shape[2:]
    f32, io = torch.float32, v.dtype
    N = B if table is None else table[0].shape[0] - 1
    NT = B * -(-T // BT) if table is None else -(-T // BT) + N
    if gate == "log":
        A_log = dt_bias = None
    states = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    if B * T >= 1 << 31:
        raise ValueError(f"`v` must have less than 2^31 tokens, got {B * T}")
    _check("q", q, (B, T, H, K), (io,), 16)
    _check("k", k, (B, T, H, K), (io,), 16)
    _check("v", v, (B, T, HV, V), (torch.bfloat16, torch.float16), 16)
    _check("g", g, (B, T, HV, K), (io, f32), 16)
    _check("beta", beta, (B, T, HV), (io, f32))
    _check("A", A, (B, T, HV, BT), (io,), 16)
    _check("Aqk", Aqk, (B, T, HV, BT), (io,), 16)
    _check("total", total, (NT, HV, K), (f32,), 16)
    for name, x, shape, align in (
        ("q_rstd", q_rstd, (B, T, H), 0),
        ("k_rstd", k_rstd, (B, T, H), 0),
        ("h0", h0, states, 16),
        ("A_log", A_log, (HV,), 0),
        ("dt_bias", dt_bias, (HV, K), 0),
    ):
        if x is not None:
            _check(name, x, shape, (f32,), align)
    if l2norm and (q_rstd is None or k_rstd is None):
        raise ValueError("`q_rstd` and `k_rstd` must be given with l2norm, got None")
    if H == 0 or HV % H:
        raise ValueError(f"the heads of `v` must be a multiple of those of `q`, got {HV} and {H}")
    if V % 64 or K not in (64, 128):
        raise ValueError(f"K must be 64 or 128 and V a multiple of 64, got K={K}, V={V}")
    if gate == "bounded" and lower_bound is None:
        raise ValueError("`lower_bound` must be given with gate 'bounded', got None")
    if table is not None:
        _check("table[0]", table[0], (N + 1,), (torch.int32, torch.int64))
        _check("table[1]", table[1], (N + 1,), (torch.int32,))
        if B != 1:
            raise ValueError(f"`v` must have batch size 1 with a table, got {B}")

    output = v.new_empty if table is None else v.new_zeros
    o = output((B, T, HV, V))
    v_new = output((B, T, HV, V)) if want_v_new else None
    ht = v.new_empty(states, dtype=f32) if want_ht else None
    h = v.new_empty((NT, HV, K, V)) if want_h else None
    if o.numel() == 0 or N == 0:
        if ht is not None:
            ht.copy_(h0) if h0 is not None else ht.zero_()
        return o, ht, h, v_new
    name = lambda x: str(x.dtype).removeprefix("torch.")
    config = Config(
        io=name(v),
        g=name(g),
        beta=name(beta),
        K=K,
        BV=v_tile(N * HV, V, wide=g.dtype is f32 and (want_h or want_v_new)),
        gate=gate,
        beta_mode=beta_mode,
        l2norm=l2norm,
        has_A_log=A_log is not None,
        has_dt_bias=dt_bias is not None,
        has_h0=h0 is not None,
        state_v_first=state_v_first,
        want_ht=want_ht,
        want_h=want_h,
        want_v_new=want_v_new,
        index="" if table is None else name(table[0]),
    )
    _compile(config)(
        q, k, v, g, beta, A, Aqk, q_rstd if l2norm else None, k_rstd if l2norm else None, total, h0, A_log, dt_bias,
        *(table or (None, None)), o, ht, h, v_new, scale, lower_bound or 0.0,
    )  # fmt: skip
    return o, ht, h, v_new


def _check(name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[Any, ...], align: int = 0) -> None:
    """Shape, dtype, and a layout TMA can read (address and strides multiples of ``align`` bytes); align 0: contiguous."""
    if tuple(x.shape) != shape:
        raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"`{name}` must have dtype {' or '.join(map(str, dtypes))}, got {x.dtype}")
    size = x.element_size()
    if align == 0 and not x.is_contiguous():
        raise ValueError(f"`{name}` must be contiguous, got strides {x.stride()}")
    if (
        align
        and x.numel()
        and (x.stride(-1) != 1 or x.data_ptr() % align or any(s * size % align for s in x.stride()[:-1]))
    ):
        raise ValueError(
            f"`{name}` must be contiguous in its last dimension, its address and other strides multiples of {align} "
            f"bytes, got address {x.data_ptr()} and strides {x.stride()} of {size} bytes"
        )

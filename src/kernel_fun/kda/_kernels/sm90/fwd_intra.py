"""fwd_intra on Hopper: what the tokens of a chunk know of each other. An item: one chunk of one value head.

Maths, per item: tokens i, j of 64, channels c of K; q, k of head h = hv // G:

    q_rstd_i = rsqrt(sum_c q_ic^2 + 1e-6), k_rstd_i alike             fp32; 1 without l2norm
    a_ic     = exp(gate(g_ic))                                        fp32 in [0, 1]; 1 past the last token
    f_s, r_s = running products of a in aligned groups of s tokens    fp32, see kernel_fun._cute.scan
    S[i, j]  = sum_c (x_ic f_s[i]) (k_jc r_s[j]),  x = q or k;  i right, j left in a group of 2 s
               s = 1: fp32, summed in fp32;  s = 2 .. 32: both factors rounded to io, fp32 accumulators
    S_q[i,i] = sum_c q_ic k_ic                                        exact products, fp32 accumulators
    Aqk      = scale q_rstd_i k_rstd_j S_q                            rounded to io; 0 above the diagonal
    L        = beta_i k_rstd_i k_rstd_j S_k, i > j                    fp32
    A        = (I + L)^-1                                             fp32, merges in tf32; rounded to io
    total_c  = product of a over the chunk                            fp32

Every factor of row i is a product of decays, each at most 1, of tokens that row i may see.

Operands: q, k [tokens, H, K]; g [tokens, HV, K]; beta [tokens, HV]; A, Aqk [tokens, HV, 64];
rstds [tokens, H]; total [NT, HV, K]; tokens = B T. Value heads are innermost in the order of items.

    tiles     64 tokens x 64 channels a pass, K / 64 passes     grid min(NT HV, resident)     threads 256
    warp b    tokens 8 b .. 8 b + 7, its block; a lane has two neighbouring channels of all 8
    norms     q.k, q.q, k.k as diagonals of mma.sync; factors of rows and columns to shared memory
    pass      raw words -> a, f, r;  s = 1: shuffles;  s = 2, 4: 8 rows each of q f, k f, k r, one product;
              s = 8: odd warps, with k r of the even one;  s = 16, 32: operands to where raw q, k, g were:

              block   where q was   where k was   where g was
              0, 1    k r_16        k r_32        k f_32 of block b + 6
              2, 3    q f_16        k f_16        k r_32
              4, 5    k r_16        q f_32        k f_32
              6, 7    q f_16        k f_16        q f_32

    blocks    s = 32: 16 rows x 32 columns a warp, 0-3;  s = 16: warps 4, 5;  16 x 16 inverses: warps 6, 7
    merges    warps 0-3, 16 -> 32 -> 64, while TMA brings the next item and warps 4-7 store Aqk
    barriers  TMA full; CTA: one a pass, operands, L, X_16, X_32

    smem      q, k, g         64 K each, in their dtypes, 128-byte swizzle
              L, then A       64 x 68 fp32
              Aqk             64 x 64 io, 16-byte units of row i permuted by i mod 8
              scales          3 x 64 fp32
              D, left         8 K fp32: decay of each block; K / 64 x 4 operands k r_8
    regs      128, 2 CTAs an SM
"""

# sizes: one CTA, one pass, read in order
from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kernel_fun._common import device
from kernel_fun._cute import scan, trisolve
from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.compile import DTYPES, Program, jit, symbol, tensor
from kernel_fun._cute.decay import GATES, NO_DECAY, Gate
from kernel_fun._cute.tile import SMEM_BYTES, Tile, tma_parts
from kernel_fun._cute.varlen import FIRST, VALID
from kernel_fun._cute.warp import load4, matrices, mma, mma_k8, pack, select, store4, unpack

if TYPE_CHECKING:
    from torch import Tensor, dtype

ARCH = "sm_90a"
BT = 64
BC = 8
WARPS = 8
THREADS = 32 * WARPS
PASS = 64
"""Channels of one pass: a row of 128 bytes, two channels a lane."""

ROW_WORDS = 32
SLOT_WORDS = BC * ROW_WORDS
HALF_WORDS = BT * ROW_WORDS
BETA_MODES = ("raw", "sigmoid", "sigmoid2")
EPS = 1e-6
CTA_RESERVED_BYTES = 1024
SM_SMEM_BYTES = 233472
SM_REGISTERS = 65536
CTAS = 2
"""CTAs of an SM: 128 registers a thread are as many as the kernel wants."""


class Place(IntEnum):
    """What a CTA knows of the item it works on."""

    CHUNK = 0
    HV = 1
    H = 2
    IN_GROUP = 3
    FIRST = 4
    VALID = 5


@dataclass(frozen=True)
class Resources:
    smem_bytes: int
    threads: int
    registers: int
    """Most a thread may use."""
    ctas_per_sm: int


@dataclass(frozen=True)
class Config:
    """Static facts of one kernel: the compile key. Dtypes by torch name."""

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

    def __post_init__(self) -> None:
        floats = ("bfloat16", "float16", "float32")
        for name, given, allowed in (
            ("io", self.io, floats[:2]),
            ("g", self.g, floats),
            ("beta", self.beta, floats),
            ("K", self.K, (64, 128)),
            ("gate", self.gate, GATES),
            ("beta_mode", self.beta_mode, BETA_MODES),
        ):
            if given not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(map(str, allowed))}, got {given}")
        if self.gate == "log" and (self.has_A_log or self.has_dt_bias):
            raise ValueError("`A_log` and `dt_bias` must be None with gate 'log', which has no parameters")

    @property
    def passes(self) -> int:
        return self.K // PASS

    @property
    def k_words(self) -> int:
        """32-bit words from q to k in shared memory."""
        return self.passes * HALF_WORDS

    @property
    def g_words(self) -> int:
        """32-bit words from q to g."""
        return 2 * self.k_words

    @property
    def left_words(self) -> int:
        """Left operands of level 8, one a pair of blocks and pass."""
        return self.passes * WARPS // 2 * SLOT_WORDS

    def tile_bytes(self) -> int:
        return 4 * (self.g_words + self.k_words * (2 if self.g == "float32" else 1))

    def resources(self) -> Resources:
        smem = 1024 + self.tile_bytes() + trisolve.TILE_BYTES + BT * BT * 2
        smem += 4 * (3 * BT + WARPS * self.K + self.left_words)
        ctas = min(CTAS, SM_SMEM_BYTES // (smem + CTA_RESERVED_BYTES))
        if smem > SMEM_BYTES:
            raise ValueError(f"shared memory of {self} is {smem} bytes, more than {SMEM_BYTES}")
        return Resources(smem, THREADS, min(255, SM_REGISTERS // (THREADS * ctas) // 8 * 8), ctas)


class KdaFwdIntraSm90:
    """The kernel of one config."""

    def __init__(self, config: Config) -> None:
        self.c = config
        self.io = getattr(cutlass, DTYPES[config.io])
        self.x_tile = Tile(self.io, BT, PASS, config.passes)
        self.g_tile = Tile(getattr(cutlass, DTYPES[config.g]), BT, PASS, config.passes)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mA_log: cute.Tensor | None,
        mDt_bias: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mA: cute.Tensor,
        mAqk: cute.Tensor,
        mQ_rstd: cute.Tensor | None,
        mK_rstd: cute.Tensor | None,
        mTotal: cute.Tensor,
        T: Int32,
        scale: Float32,
        lower_bound: Float32,
        resident: Int32,
        stream: Any,
    ):
        @cute.struct
        class Storage:
            q: self.x_tile.field()
            k: self.x_tile.field()
            g: self.g_tile.field()
            L: cute.struct.Align[cute.struct.MemRange[Float32, trisolve.SIZE * trisolve.PITCH], 128]
            Aqk: cute.struct.Align[cute.struct.MemRange[self.io, BT * BT], 128]
            scales: cute.struct.MemRange[Float32, 3 * BT]
            D: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * self.c.K], 128]
            left: cute.struct.Align[cute.struct.MemRange[Int32, self.c.left_words], 128]
            full: cute.struct.MemRange[Int64, 1]

        self.Storage = Storage
        H, HV, NT = mQ.shape[1], mTotal.shape[1], mTotal.shape[0]
        self.kda_fwd_intra_sm90(
            *self.x_tile.loader(heads_last(mQ)),
            *self.x_tile.loader(heads_last(mK)),
            *self.g_tile.loader(heads_last(mG)),
            mBeta, mA_log, mDt_bias, mTable, mA, mAqk, mQ_rstd, mK_rstd, mTotal, T, scale, lower_bound,
            *(cute.fast_divmod_create_divisor_v2(n) for n in (HV, HV // H, (T + (BT - 1)) // BT)),
        ).launch(
            grid=(cutlass.min(NT * HV, resident), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.c.resources().ctas_per_sm,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kda_fwd_intra_sm90(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_g: cute.CopyAtom,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mA_log: cute.Tensor | None,
        mDt_bias: cute.Tensor | None,
        mTable: cute.Tensor | None,
        mA: cute.Tensor,
        mAqk: cute.Tensor,
        mQ_rstd: cute.Tensor | None,
        mK_rstd: cute.Tensor | None,
        mTotal: cute.Tensor,
        T: Int32,
        scale: Float32,
        lower_bound: Float32,
        by_HV: cute.FastDivmodDivisorV2,
        by_G: cute.FastDivmodDivisorV2,
        by_NT: cute.FastDivmodDivisorV2,
    ):
        st = SmemAllocator().allocate(self.Storage)
        tid = cute.arch.thread_idx()[0]
        self.lanes(st, tid)
        full = st.full.data_ptr()
        if tid == 0:
            cute.arch.mbarrier_init(full, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        self.divisors = by_HV, by_G, by_NT
        self.inputs = (
            (tma_q, mQ, self.x_tile, st.q),
            (tma_k, mK, self.x_tile, st.k),
            (tma_g, mG, self.g_tile, st.g),
        )
        items, step = mTotal.shape[0] * mTotal.shape[1], cute.arch.grid_dim()[0]
        at = cute.make_rmem_tensor(len(Place), Int32)
        small = cute.make_rmem_tensor(4, Float32)
        phase = cute.make_rmem_tensor(1, Int32)
        phase[0] = Int32(0)
        self.fetch(cute.arch.block_idx()[0], items, T, at, small, mTable, mBeta, mA_log, mDt_bias, full)
        for item in cutlass.range(cute.arch.block_idx()[0], items, step, unroll=1):
            chunk, hv, h, in_group = at[Place.CHUNK], at[Place.HV], at[Place.H], at[Place.IN_GROUP]
            first, valid = at[Place.FIRST], at[Place.VALID]
            if valid > 0:
                cute.arch.mbarrier_wait(full, phase[0])
                phase[0] = phase[0] ^ 1
                self.blank(valid)
                self.clear_diagonal()
                self.norms()
                if self.lane < BC:
                    row = BC * self.warp + self.lane
                    rstd = self.scale_of_row(row, small[0], scale, valid)
                    if cutlass.const_expr(self.c.l2norm):
                        if row < valid and in_group == 0:
                            mQ_rstd[first + row, h] = rstd[0]
                            mK_rstd[first + row, h] = rstd[1]
                self.scores(small, mDt_bias, hv, lower_bound)
                self.total(mTotal[chunk, hv, None], tid)
                cute.arch.sync_threads()
                if self.warp < 6:
                    self.blocks()
                else:
                    trisolve.invert_blocks(self.L, self.warp - 6, self.lane)
                cute.arch.fence_view_async_shared()  # the tiles go back to TMA
                cute.arch.sync_threads()
            self.fetch(item + step, items, T, at, small, mTable, mBeta, mA_log, mDt_bias, full)
            if valid > 0:
                if self.warp < 4:
                    trisolve.merge_16(self.L, self.warp, self.lane)
                else:
                    self.store_Aqk(mAqk[None, hv, None], first, valid, tid)
                cute.arch.sync_threads()
                if self.warp < 4:
                    trisolve.merge_32(self.L, self.warp, self.lane)
                cute.arch.sync_threads()
                self.store_A(mA[None, hv, None], first, valid, tid)

    @cute.jit
    def fetch(
        self,
        item: Int32,
        items: Int32,
        T: Int32,
        at: cute.Tensor,
        small: cute.Tensor,
        mTable: cute.Tensor | None,
        mBeta: cute.Tensor,
        mA_log: cute.Tensor | None,
        mDt_bias: cute.Tensor | None,
        full: cute.Pointer,
    ):
        """Where an item is, and its loads: tiles by TMA, the rest to registers. None past the last item."""
        by_HV, by_G, by_NT = self.divisors
        at[Place.VALID] = Int32(0)
        if item < items:
            chunk, hv = divmod(item, by_HV)
            h, in_group = divmod(hv, by_G)
            if cutlass.const_expr(self.c.packed):
                first, valid = mTable[chunk, FIRST], mTable[chunk, VALID]
            else:
                b, c = divmod(chunk, by_NT)
                first, valid = b * T + c * BT, cutlass.min(T - c * BT, BT)
            place = (chunk, hv, h, in_group, first, valid)
            for n in cutlass.range_constexpr(len(Place)):
                at[n] = Int32(place[n])
            if valid > 0:
                if self.warp == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, self.c.tile_bytes())
                    for n in cutlass.range_constexpr(3):
                        tma, mX, tile, field = self.inputs[n]
                        rows = cute.domain_offset((first, 0), mX[None, None, hv if n == 2 else h])
                        tXsX, tXgX = tma_parts(
                            tma, cute.local_tile(rows, tile.shape, (0, None)), tile.view(field)
                        )
                        for p in cutlass.range_constexpr(self.c.passes):
                            cute.copy(tma, tXgX[None, p], tXsX[None, p], tma_bar_ptr=full)
                row = BC * self.warp + self.lane
                if self.lane < BC and row < valid:
                    small[0] = mBeta[first + row, hv].to(Float32)
                if cutlass.const_expr(mA_log is not None):
                    small[1] = mA_log[hv]
                self.read_bias(small, mDt_bias, hv, Int32(0))

    @cute.jit
    def scores(self, small: cute.Tensor, mDt_bias: cute.Tensor | None, hv: Int32, lower_bound: Float32):
        """Levels 1..8 of Aqk and L, and the operands of the others."""
        gate = Gate.of_head(
            self.c.gate, small[1] if cutlass.const_expr(self.c.has_A_log) else None, lower_bound
        )
        acc = cute.make_rmem_tensor(9, Float32)
        acc.fill(0.0)
        for p in cutlass.range(self.c.passes, unroll=1):
            self.one_pass(p, gate, mDt_bias, hv, acc, small)
        self.put_block(acc)

    def lanes(self, st: Any, tid: Int32) -> None:
        """Views of shared memory and a thread's position."""
        c = self.c
        self.warp, self.lane = cute.arch.make_warp_uniform(tid >> 5), tid & 31
        self.r, self.t = self.lane >> 2, self.lane & 3
        # q, k and g are neighbours: one base and constant offsets reach all three
        self.words = words_of(st.q, c.tile_bytes() // 4)
        self.at = st.q.data_ptr().toint()
        self.L = st.L.get_tensor(cute.make_layout(trisolve.SIZE * trisolve.PITCH))
        self.D = st.D.get_tensor(cute.make_layout(WARPS * c.K))
        self.left = st.left.get_tensor(cute.make_layout(c.left_words))
        self.Aqk_words = words_of(st.Aqk, BT * ROW_WORDS)
        self.Aqk_values = st.Aqk.get_tensor(cute.make_layout(BT * BT))
        self.scales = st.scales.get_tensor(cute.make_layout(3 * BT))

    def clear_diagonal(self) -> None:
        """Zeros to the warp's rows of its 16 x 16 block of Aqk, of which those above the diagonal remain."""
        i, unit = BC * self.warp + (self.lane & 7), (self.warp & 6) + ((self.lane >> 3) & 1)
        store4(self.Aqk_words.iterator.toint() + i * 128 + ((unit ^ (i & 7)) << 4), [Int32(0)] * 4)

    def read_bias(self, small: cute.Tensor, mDt_bias: cute.Tensor | None, hv: Int32, p: Int32) -> None:
        """dt_bias of the lane's two channels of a pass."""
        if mDt_bias is not None:
            channel = hv * self.c.K + p * PASS + 2 * self.lane
            small[2], small[3] = mDt_bias[channel], mDt_bias[channel + 1]

    @cute.jit
    def blank(self, valid: Int32):
        """Rows of the warp's block past the last token: q and k 0, g without decay, whatever TMA brought."""
        c, words, row = self.c, self.words, BC * self.warp
        no_decay = self.no_decay_word()
        for i in cutlass.range(cutlass.max(valid - row, 0), BC, unroll=1):
            at = (row + i) * ROW_WORDS + self.lane
            for p in cutlass.range_constexpr(c.passes):
                words[at + p * HALF_WORDS] = Int32(0)
                words[at + p * HALF_WORDS + c.k_words] = Int32(0)
            for p in cutlass.range_constexpr(self.g_tile.smem_bytes // (4 * HALF_WORDS)):
                words[at + p * HALF_WORDS + c.g_words] = no_decay
        cute.arch.sync_warp()

    def no_decay_word(self) -> Int32:
        """One or two raw gates of no decay."""
        x = Float32(NO_DECAY[self.c.gate])
        return bits_of(x) if self.c.g == "float32" else pack(x, x, self.g_tile.dtype)

    @cute.jit
    def norms(self):
        """q.k, q.q and k.k of the warp's rows, to where their scales will stand.

        The diagonals of [q; k] k^T and [q; k] q^T, eight channels at a time.
        """
        acc = cute.make_rmem_tensor(8, Float32)
        acc.fill(0.0)
        m = self.lane >> 3
        at = (
            self.at
            + self.warp * (4 * SLOT_WORDS)
            + (m & 1) * (4 * self.c.k_words)
            + row_of_matrix(self.lane, m >> 1)
        )
        for p in cutlass.range(self.c.passes, unroll=1):
            for u in cutlass.range_constexpr(0, PASS // 8, 2):
                x = matrices((at + p * (4 * HALF_WORDS)) ^ (16 * u))
                for n in cutlass.range_constexpr(2):
                    qk = x[2 * n : 2 * n + 2]
                    mma_k8(acc, 0, qk, qk[1], self.io)
                    if cutlass.const_expr(self.c.l2norm):
                        mma_k8(acc, 4, qk, qk[0], self.io)
        scales = self.scales
        odd = (self.r & 1) == 1
        sums = [select(odd, acc[at + 1], acc[at]) for at in (0, 4, 2)]
        if (self.r >> 1) == self.t:
            for n in cutlass.range_constexpr(3):
                scales[n * BT + BC * self.warp + self.r] = sums[n]
        cute.arch.sync_warp()

    def scale_of_row(
        self, row: Int32, beta: Float32, scale: Float32, valid: Int32
    ) -> tuple[Float32, Float32]:
        """Factors of row and column ``row`` in place of its sums, and Aqk[row, row]; returns the rstds."""
        scales, exists = self.scales, row < valid
        qk, qq, kk = (scales[n * BT + row] for n in range(3))
        if self.c.l2norm:
            q_rstd, k_rstd = (cute.math.rsqrt(x + EPS) for x in (qq, kk))
        else:
            q_rstd, k_rstd = Float32(1.0), Float32(1.0)
        if self.c.beta_mode != "raw":
            top = 2.0 if self.c.beta_mode == "sigmoid2" else 1.0
            beta = top / (1.0 + cute.math.exp(-beta))
        of_q, of_k, column = (
            select(exists, x, Float32(0.0)) for x in (scale * q_rstd, beta * k_rstd, k_rstd)
        )
        for n, x in enumerate((of_q, of_k, column)):
            scales[n * BT + row] = x
        self.Aqk_values[2 * self.Aqk_word(row, row) + (row & 1)] = (qk * of_q * column).to(self.io)
        return q_rstd, k_rstd

    @cute.jit
    def total(self, mTotal: cute.Tensor, tid: Int32):
        """Decay of the whole chunk, a channel a thread."""
        D, K = self.D, self.c.K
        if tid < K:
            x = D[tid]
            for b in cutlass.range_constexpr(1, WARPS):
                x = x * D[b * K + tid]
            mTotal[tid] = x

    @cute.jit
    def one_pass(
        self,
        p: Int32,
        gate: cutlass.Constexpr[Any],
        mDt_bias: cute.Tensor | None,
        hv: Int32,
        acc: cute.Tensor,
        small: cute.Tensor,
    ):
        """64 channels: decays, levels 1..8, operands of levels 16 and 32."""
        c, block = self.c, self.warp
        slot = p * HALF_WORDS + block * SLOT_WORDS
        # word of channels 2 lane, 2 lane + 1 in row i: 16-byte unit u of a row stands at u ^ i
        self.row = [slot + (self.lane ^ (4 * i)) for i in range(BC)]
        q, k = cute.make_rmem_tensor(BC, Int32), cute.make_rmem_tensor(BC, Int32)
        a = cute.make_rmem_tensor(2 * BC, Float32)
        for i in cutlass.range_constexpr(BC):
            at = self.row[i] + i * ROW_WORDS
            q[i], k[i] = self.words[at], self.words[at + c.k_words]
            x = self.raw_gate(p, i)
            for e in cutlass.range_constexpr(2):
                a[2 * i + e] = gate.decay(x[e] + small[2 + e] if cutlass.const_expr(c.has_dt_bias) else x[e])
        self.read_bias(small, mDt_bias, hv, cutlass.min(p + 1, c.passes - 1))
        cute.arch.sync_warp()  # every raw word of the slots has been read

        k_values = [unpack(k[i], self.io) for i in range(BC)]
        columns = [scan.start([a[2 * i + e] for i in range(BC)]) for e in range(2)]
        self.level_one(columns, q, k_values, acc)
        self.levels_two_and_four(slot, columns, q, k, k_values, acc)
        for f, r in columns:
            scan.double(f, r, 4)
        f, r = ([columns[e][x] for e in range(2)] for x in range(2))

        # level 8: the odd block of a pair is right, and multiplies
        odd = block & 1
        left_at = (p * (WARPS // 2) + (block >> 1)) * SLOT_WORDS
        for _ in cutlass.range(odd, unroll=1):
            self.put_rows(self.words, self.row, 0, [unpack(q[i], self.io) for i in range(BC)], f)
            self.put_rows(self.words, self.row, c.k_words, k_values, f)
        for _ in cutlass.range(1 - odd, unroll=1):
            self.put_rows(self.left, [left_at + (self.lane ^ (4 * i)) for i in range(BC)], 0, k_values, r)
        D = self.D
        for e in cutlass.range_constexpr(2):
            D[block * c.K + p * PASS + 2 * self.lane + e] = f[e][BC - 1]
        cute.arch.sync_threads()
        for _ in cutlass.range(odd, unroll=1):
            m = self.lane >> 3
            a_at = self.at + 4 * slot + (m & 1) * (4 * c.k_words) + row_of_matrix(self.lane, m >> 1)
            b_at = self.left.iterator.toint() + 4 * left_at + row_of_matrix(self.lane, m)
            self.multiply(acc, 4, a_at, b_at)

        # levels 16 and 32: decays to or from the edge of the wider group are one factor a channel
        D_1 = self.decays_of(block ^ 1, p)
        D_2 = [
            x * y
            for x, y in zip(
                self.decays_of((block ^ 2) & 6, p), self.decays_of((block ^ 2) | 1, p), strict=True
            )
        ]
        right_16, right_32 = (block >> 1) & 1, block >> 2
        one = Float32(1.0)
        f_16 = [select(odd == 1, x, one) for x in D_1]
        r_16 = [select(odd == 1, one, x) for x in D_1]
        f_32 = [x * select(right_16 == 1, y, one) for x, y in zip(f_16, D_2, strict=True)]
        r_32 = [x * select(right_16 == 1, one, y) for x, y in zip(r_16, D_2, strict=True)]
        q_32 = select(right_16 == 1, Int32(c.g_words), Int32(c.k_words))
        k_32 = select(right_16 == 1, Int32(c.g_words - 6 * SLOT_WORDS), Int32(c.g_words))
        self.wide_level(right_16, Int32(0), Int32(c.k_words), Int32(0), f, f_16, r, r_16, q, k_values)
        self.wide_level(right_32, q_32, k_32, q_32, f, f_32, r, r_32, q, k_values)

    @cute.jit
    def wide_level(
        self,
        right: Int32,
        q_slot: Int32,
        k_slot: Int32,
        left_slot: Int32,
        f: cutlass.Constexpr[Any],
        to_f: cutlass.Constexpr[Any],
        r: cutlass.Constexpr[Any],
        to_r: cutlass.Constexpr[Any],
        q: cute.Tensor,
        k_values: cutlass.Constexpr[Any],
    ):
        """Operands of one level: q f, k f of a block in the right half of its group, k r of one in the left.

        A loop of no or one turn, because a branch would be predicated and both sides issued.
        """
        for _ in cutlass.range(right, unroll=1):
            factor = [[x * to_f[e] for x in f[e]] for e in range(2)]
            at = [x + q_slot for x in self.row]
            self.put_rows(self.words, at, 0, [unpack(q[i], self.io) for i in range(BC)], factor)
            self.put_rows(self.words, [x + k_slot for x in self.row], 0, k_values, factor)
        for _ in cutlass.range(1 - right, unroll=1):
            factor = [[scan.times(x, to_r[e]) for x in r[e]] for e in range(2)]
            self.put_rows(self.words, [x + left_slot for x in self.row], 0, k_values, factor)

    def raw_gate(self, p: Int32, i: int) -> tuple[Float32, Float32]:
        """g of the lane's two channels and token i of the warp's block, as fp32."""
        if self.c.g != "float32":
            return unpack(self.words[self.row[i % 8] + i * ROW_WORDS + self.c.g_words], self.g_tile.dtype)
        # a row is 32 channels: the first 32 of the pass for every token, then the others
        column = (2 * (self.lane & 15)) ^ (4 * (i % 8))
        at = (2 * p + (self.lane >> 4)) * HALF_WORDS + self.warp * SLOT_WORDS + column
        at = at + i * ROW_WORDS + self.c.g_words
        return as_float(self.words[at]), as_float(self.words[at + 1])

    def decays_of(self, block: Int32, p: Int32) -> list[Float32]:
        """D_8 of a block, the lane's two channels."""
        at = block * self.c.K + p * PASS + 2 * self.lane
        return [self.D[at], self.D[at + 1]]

    def put_rows(
        self, words: cute.Tensor, rows: list[Any], slot: int, x: list[Any], factor: list[list[Any]]
    ) -> None:
        """Operand x factor of the block's tokens, ``slot`` words from ``rows``."""
        for i in range(BC):
            pair = [scan.times(x[i][e], factor[e][i]) for e in range(2)]
            words[rows[i] + i * ROW_WORDS + slot] = pack(*pair, self.io)

    def level_one(self, columns: Any, q: cute.Tensor, k: list[Any], acc: cute.Tensor) -> None:
        """Level 1, tokens 2 n and 2 n + 1 of one lane, summed over the lanes: added to acc[8].

        Lanes 4 n .. 4 n + 3 end with S_q of pair n, lanes 16 + 4 n .. with S_k.
        """
        sums: list[Any] = [None] * BC
        for n in range(BC // 2):
            i, j = 2 * n + 1, 2 * n
            qi = unpack(q[i], self.io)
            for e in range(2):
                left = k[j][e] * columns[e][0][i]
                for x, at in ((qi[e], n), (k[i][e], n + BC // 2)):
                    sums[at] = x * left if sums[at] is None else sums[at] + x * left
        for bit in (16, 8, 4):
            upper = (self.lane & bit) != 0
            half = len(sums) // 2
            kept = [select(upper, sums[n + half], sums[n]) for n in range(half)]
            sent = [select(upper, sums[n], sums[n + half]) for n in range(half)]
            sums = [x + cute.arch.shuffle_sync_bfly(y, offset=bit) for x, y in zip(kept, sent, strict=True)]
        x = sums[0]
        for bit in (2, 1):
            x = x + cute.arch.shuffle_sync_bfly(x, offset=bit)
        acc[8] = acc[8] + x

    def levels_two_and_four(
        self, slot: Int32, columns: Any, q: cute.Tensor, k: cute.Tensor, k_values: Any, acc: cute.Tensor
    ) -> None:
        """[q f; k f] of the four right tokens of a level times k r of its left ones, both levels at once.

        Rows 0-3 are level 2, 4-7 level 4: q f where q was, k f where k was, k r where g was. To acc[0:4].
        """
        words, c = self.words, self.c
        for n, s in enumerate((2, 4)):
            for f, r in columns:
                scan.double(f, r, s // 2)
            (f0, r0), (f1, r1) = columns
            for m, (i, j) in enumerate(
                zip(scan.right_half(s, BC), scan.left_half(s, BC), strict=True), 4 * n
            ):
                at = self.row[m] + m * ROW_WORDS
                qi = unpack(q[i], self.io)
                words[at] = pack(qi[0] * f0[i], qi[1] * f1[i], self.io)
                words[at + c.k_words] = pack(k_values[i][0] * f0[i], k_values[i][1] * f1[i], self.io)
                left = k[j]
                if r0[j] is not None:
                    left = pack(k_values[j][0] * r0[j], k_values[j][1] * r1[j], self.io)
                words[at + c.g_words] = left
        cute.arch.sync_warp()
        m = self.lane >> 3
        a_at = self.at + 4 * slot + (m & 1) * (4 * c.k_words) + row_of_matrix(self.lane, m >> 1)
        b_at = self.at + 4 * (slot + c.g_words) + row_of_matrix(self.lane, m)
        self.multiply(acc, 0, a_at, b_at)
        cute.arch.sync_warp()

    def multiply(self, acc: cute.Tensor, at: int, a_at: Int32, b_at: Int32) -> None:
        """acc[at : at + 4] += A B over the 64 channels of a pass."""
        for j in range(PASS // 32):
            b = matrices(b_at ^ (64 * j))
            for half in range(2):
                a = matrices(a_at ^ (64 * j + 32 * half))
                mma(acc, at, a, b[2 * half : 2 * half + 2], self.io)

    @cute.jit
    def put_block(self, acc: cute.Tensor):
        """What the warp knows of Aqk and L: its own 8 x 8 block, and if it is odd the block of level 8."""
        first, scales = BC * self.warp, self.scales
        sL, values = self.L, self.Aqk_values
        r, t = self.r, self.t
        # rows 0-3 of the product are level 2, of which its two groups are wanted, rows 4-7 level 4
        level_2 = r < 4
        if (level_2 and (r >> 1) == t) or (r >= 4 and t >= 2):
            i = first + select(level_2, 2 * r + 2 - (r & 1), r)
            j = first + select(level_2, 4 * t, 2 * t - 4)
            columns = self.column_scales(j)
            self.put_q(i, j, acc[0], acc[1], scales[i], columns)
            self.put_k(i, j, acc[2], acc[3], scales[BT + i], columns)
        if (self.lane & 3) == 0:
            j = first + 2 * ((self.lane >> 2) & 3)
            x = acc[8] * scales[2 * BT + j]
            if self.lane < 16:
                values[2 * self.Aqk_word(j + 1, j)] = (x * scales[j + 1]).to(self.io)
            else:
                sL[(j + 1) * trisolve.PITCH + j] = x * scales[BT + j + 1]
        if (self.warp & 1) == 1:
            i, j = first + r, first - BC + 2 * t
            columns = self.column_scales(j)
            self.put_q(i, j, acc[4], acc[5], scales[i], columns)
            self.put_k(i, j, acc[6], acc[7], scales[BT + i], columns)

    def Aqk_word(self, i: Int32, j: Int32) -> Int32:
        """Word of elements (i, j), (i, j + 1) of Aqk, j even: unit u of row i stands at u ^ (i mod 8)."""
        return i * ROW_WORDS + (((j >> 3) ^ (i & 7)) << 2) + ((j & 7) >> 1)

    def column_scales(self, j: Int32) -> tuple[Float32, Float32]:
        return self.scales[2 * BT + j], self.scales[2 * BT + j + 1]

    def put_q(self, i: Int32, j: Int32, x: Float32, y: Float32, row: Float32, columns: Any) -> None:
        """Elements (i, j), (i, j + 1) of Aqk from those of S_q; j is even."""
        self.Aqk_words[self.Aqk_word(i, j)] = pack(x * (row * columns[0]), y * (row * columns[1]), self.io)

    def put_k(self, i: Int32, j: Int32, x: Float32, y: Float32, row: Float32, columns: Any) -> None:
        """Elements (i, j), (i, j + 1) of L from those of S_k."""
        at = i * trisolve.PITCH + j
        self.L[at] = x * (row * columns[0])
        self.L[at + 1] = y * (row * columns[1])

    @cute.jit
    def blocks(self):
        """Levels 16 and 32.

        Level 32: 16 rows of q (warps 0, 2) or k (1, 3) with 32 columns. Level 16: 16 rows of both with 16
        columns (warps 4, 5). The operands stand as the table of the module says.
        """
        tile, half = 4 * 8 * ROW_WORDS, 4 * HALF_WORDS
        q_at, k_at, g_at = self.at, self.at + 4 * self.c.k_words, self.at + 4 * self.c.g_words
        left, right = rows_then_units(self.lane), units_then_rows(self.lane)
        acc = cute.make_rmem_tensor(16, Float32)
        acc.fill(0.0)
        is_k = (self.warp & 1) == 1
        if self.warp < 4:
            low = select(is_k, g_at + 4 * tile, k_at + 4 * tile)
            high = select(is_k, g_at, g_at + 6 * tile)
            a = select(self.warp < 2, low, high) + left
            for p in cutlass.range(self.c.passes, unroll=1):
                for j in cutlass.range_constexpr(PASS // 16):
                    x = matrices((a + p * half) ^ (32 * j))
                    for J in cutlass.range_constexpr(2):
                        y = matrices(((k_at, g_at + 2 * tile)[J] + right + p * half) ^ (32 * j))
                        for n in cutlass.range_constexpr(2):
                            mma(acc, 8 * J + 4 * n, x, y[2 * n : 2 * n + 2], self.io)
            i = 32 + 16 * (self.warp >> 1) + self.r
            for x in cutlass.range_constexpr(2):
                row = self.scales[select(is_k, Int32(BT), Int32(0)) + i + 8 * x]
                for n in cutlass.range_constexpr(4):
                    j, e = 8 * n + 2 * self.t, 4 * n + 2 * x
                    columns = self.column_scales(j)
                    if is_k:
                        self.put_k(i + 8 * x, j, acc[e], acc[e + 1], row, columns)
                    else:
                        self.put_q(i + 8 * x, j, acc[e], acc[e + 1], row, columns)
        elif self.warp < 6:
            pair = (self.warp - 4) * 4
            for p in cutlass.range(self.c.passes, unroll=1):
                for j in cutlass.range_constexpr(PASS // 16):
                    at = ((pair + 2) * tile + p * half + left) ^ (32 * j)
                    y = matrices((q_at + pair * tile + right + p * half) ^ (32 * j))
                    for n in cutlass.range_constexpr(2):
                        x = matrices((q_at, k_at)[n] + at)
                        mma(acc, 8 * n, x, y[:2], self.io)
                        mma(acc, 8 * n + 4, x, y[2:], self.io)
            i, first = 8 * (pair + 2) + self.r, 8 * pair + 2 * self.t
            for n in cutlass.range_constexpr(2):
                columns = self.column_scales(first + 8 * n)
                for x in cutlass.range_constexpr(2):
                    e, row = 4 * n + 2 * x, i + 8 * x
                    self.put_q(row, first + 8 * n, acc[e], acc[e + 1], self.scales[row], columns)
                    self.put_k(row, first + 8 * n, acc[e + 8], acc[e + 9], self.scales[BT + row], columns)

    @cute.jit
    def store_A(self, mA: cute.Tensor, first: Int32, valid: Int32, tid: Int32):
        """Rows of A that are tokens: four columns a thread in every sixteenth row."""
        words = cute.make_rmem_tensor(2, Int32)
        values = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.io), cute.make_layout(4))
        row, unit = tid >> 4, tid & 15
        J = unit >> 2
        for I in cutlass.range_constexpr(BT // 16):
            i = 16 * I + row
            if i < valid:
                from_ = i * trisolve.PITCH + 4 * unit
                for B in cutlass.range_constexpr(I):
                    from_ = from_ + select(J == B, Int32(trisolve.shift(I, B)), Int32(0))
                x = load4(self.L.iterator.toint() + 4 * from_)
                for e in cutlass.range_constexpr(2):
                    words[e] = select(J <= I, pack(x[2 * e], x[2 * e + 1], self.io), Int32(0))
                cute.autovec_copy(values, cute.local_tile(mA[first + i, None], (4,), (unit,)))

    @cute.jit
    def store_Aqk(self, mAqk: cute.Tensor, first: Int32, valid: Int32, tid: Int32):
        """Rows of Aqk that are tokens, by 128 threads: eight columns a thread in every sixteenth row."""
        words = cute.make_rmem_tensor(4, Int32)
        values = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.io), cute.make_layout(8))
        row, unit = (tid & 127) >> 3, tid & 7
        for I in cutlass.range_constexpr(BT // 16):
            i = 16 * I + row
            if i < valid:
                x = load4(self.Aqk_words.iterator.toint() + i * 128 + ((unit ^ (i & 7)) << 4))
                for e in cutlass.range_constexpr(4):
                    words[e] = select((unit >> 1) <= I, bits_of(x[e]), Int32(0))
                cute.autovec_copy(values, cute.local_tile(mAqk[first + i, None], (8,), (unit,)))


def heads_last(mX: cute.Tensor) -> cute.Tensor:
    """[tokens, heads, D] seen as (tokens, D, heads)."""
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, [0, 2, 1]))


def words_of(field: Any, words: int) -> cute.Tensor:
    """A storage field, and what follows it, as a flat tensor of 32-bit words."""
    return cute.make_tensor(cute.recast_ptr(field.data_ptr(), dtype=Int32), cute.make_layout(words))


def row_of_matrix(lane: Int32, unit: Any) -> Int32:
    """ldmatrix: lane 8 m + i names row i of matrix m. Bytes to a 16-byte unit of it, in rows of 128 bytes."""
    i = lane & 7
    return i * 128 + ((unit ^ i) << 4)


def rows_then_units(lane: Int32) -> Int32:
    """Matrices of an A operand: rows 0-7 and 8-15 of one 16-byte unit, then of the next."""
    m = lane >> 3
    return row_of_matrix(lane, m >> 1) + (m & 1) * 1024


def units_then_rows(lane: Int32) -> Int32:
    """Matrices of two B operands: two units of rows 0-7, then of rows 8-15."""
    m = lane >> 3
    return row_of_matrix(lane, m & 1) + (m >> 1) * 1024


def bits_of(x: Float32) -> Int32:
    """The bits of an fp32 value as a word."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def as_float(word: Int32) -> Float32:
    """The bits of a word as fp32."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


@jit(arch=ARCH)
def _compile(config: Config) -> Program:
    """Arguments of :class:`KdaFwdIntraSm90`; tokens B T, heads H and HV, chunks NT are run-time sizes."""
    tokens, H, HV, NT, K = symbol(), symbol(), symbol(), symbol(), config.K
    rstd = tensor("float32", tokens, H, align=4) if config.l2norm else None
    return Program(
        KdaFwdIntraSm90(config),
        (
            tensor(config.io, tokens, H, K),
            tensor(config.io, tokens, H, K),
            tensor(config.g, tokens, HV, K),
            tensor(config.beta, tokens, HV, align=2 if config.beta != "float32" else 4),
            tensor("float32", HV, align=4) if config.has_A_log else None,
            tensor("float32", symbol(), align=4) if config.has_dt_bias else None,
            tensor("int32", NT, 4) if config.packed else None,
            tensor(config.io, tokens, HV, BT),
            tensor(config.io, tokens, HV, BT),
            rstd,
            rstd,
            tensor("float32", NT, HV, K),
            Int32(1),
            Float32(1.0),
            Float32(0.0),
            Int32(1),
        ),
    )


def fwd_intra(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: Tensor | None,
    *,
    scale: float,
    gate: str,
    lower_bound: float | None,
    beta_mode: str,
    l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """(A, Aqk, q_rstd, k_rstd, total) of a batch, or of packed sequences laid out by ``table``.

    ``q``, ``k`` [B, T, H, K] bf16 or fp16; ``g`` [B, T, HV, K] and ``beta`` [B, T, HV] bf16, fp16 or
    fp32; HV a multiple of H; K 64 or 128. ``A_log`` [HV], ``dt_bias`` [HV K] fp32 or None. ``gate``: "log"
    (g is the natural-log decay, <= 0), "softplus" or "bounded" (by ``lower_bound`` <= 0). ``beta_mode``:
    "raw", "sigmoid" or "sigmoid2". ``table``: chunk table of :func:`kernel_fun._cute.varlen.chunk_table`,
    with B = 1, rows without tokens allowed; None: every row of the batch is one sequence.

    A, Aqk [B, T, HV, 64] in the dtype of q; rows outside every chunk are not written. q_rstd, k_rstd
    [B, T, H] fp32, None without ``l2norm``. total [NT, HV, K] fp32, NT = B ceil(T / 64) or the rows of
    ``table``, of which those without tokens are not written. Runs on the current stream of the device.
    ValueError or TypeError for anything outside this.
    """
    import torch

    B, T, H, K = q.shape
    HV = g.shape[2]
    for name, x, shape in (("k", k, (B, T, H, K)), ("g", g, (B, T, HV, K)), ("beta", beta, (B, T, HV))):
        if tuple(x.shape) != shape:
            raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(x.shape)}")
    for name, x, size in (("A_log", A_log, HV), ("dt_bias", dt_bias, HV * K)):
        if x is not None and (x.dtype != torch.float32 or tuple(x.shape) != (size,) or not x.is_contiguous()):
            raise ValueError(f"`{name}` must be contiguous float32 [{size}], got {x.dtype} {list(x.shape)}")
    if table is not None and (table.dtype != torch.int32 or table.ndim != 2 or table.shape[1] != 4):
        raise ValueError(f"`table` must be int32 [NT, 4], got {table.dtype} {list(table.shape)}")
    if table is not None and B != 1:
        raise ValueError(f"`q` must have B = 1 with a chunk table, got B = {B}")
    if k.dtype != q.dtype:
        raise TypeError(f"`k` must have the dtype of q, {q.dtype}, got {k.dtype}")
    if H == 0 or HV % H:
        raise ValueError(f"`g` must have a multiple of {H} heads, got {HV}")
    if gate == "bounded" and (lower_bound is None or not lower_bound <= 0.0):
        raise ValueError(f"`lower_bound` must be a number <= 0 with gate 'bounded', got {lower_bound}")
    tokens = B * T
    if tokens >= 1 << 31:
        raise ValueError(f"`q` must have fewer than 2^31 tokens, got {tokens}")
    config = _config(
        q.dtype, g.dtype, beta.dtype, K, gate, beta_mode, l2norm,
        A_log is not None, dt_bias is not None, table is not None,
    )  # fmt: skip
    NT = B * -(-T // BT) if table is None else table.shape[0]
    A, Aqk = q.new_empty(tokens, HV, BT), q.new_empty(tokens, HV, BT)
    q_rstd, k_rstd = (q.new_empty(tokens, H, dtype=torch.float32) if l2norm else None for _ in range(2))
    total = q.new_empty(NT, HV, K, dtype=torch.float32)
    if NT * HV * tokens:
        _compile(config)(
            _tma_operand(q, tokens),
            _tma_operand(k, tokens),
            _tma_operand(g, tokens),
            _detached(beta).reshape(tokens, HV).contiguous(),
            None if A_log is None else _detached(A_log),
            None if dt_bias is None else _detached(dt_bias),
            table,
            A,
            Aqk,
            q_rstd,
            k_rstd,
            total,
            T,
            scale,
            lower_bound or 0.0,
            _ctas_per_sm(config) * device.of(q.device).sms,
        )
    rstds = (None if x is None else x.view(B, T, H) for x in (q_rstd, k_rstd))
    return A.view(B, T, HV, BT), Aqk.view(B, T, HV, BT), *rstds, total


@lru_cache(maxsize=None)
def _config(q: dtype, g: dtype, beta: dtype, *facts: Any) -> Config:
    """The config of three dtypes and, in its order, everything else."""
    return Config(*(str(x).removeprefix("torch.") for x in (q, g, beta)), *facts)


@lru_cache(maxsize=None)
def _ctas_per_sm(config: Config) -> int:
    return config.resources().ctas_per_sm


def _tma_operand(x: Tensor, tokens: int) -> Tensor:
    """[B, T, heads, D] as [tokens, heads, D] that TMA can address.

    Copied where its tokens are not equally spaced or its base or strides are not multiples of 16 bytes.
    """
    _, _, heads, D = x.shape
    flat = _detached(x).reshape(tokens, heads, D)
    strides = flat.stride()
    if tokens == 1 or heads == 1:  # the stride of a size 1 says nothing
        strides = (heads * D if tokens == 1 else strides[0], D if heads == 1 else strides[1], strides[2])
        flat = flat.as_strided(flat.shape, strides)
    step = 16 // x.element_size()
    if strides[2] == 1 and not (strides[0] % step or strides[1] % step or flat.data_ptr() % 16):
        return flat
    return flat.new_empty(flat.shape).copy_(flat)


def _detached(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x

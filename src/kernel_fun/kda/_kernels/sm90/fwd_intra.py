"""fwd_intra on Hopper: what the tokens of a chunk know of each other. An item: one chunk of one value head.

Maths, per item: tokens i, j of 64, channels c of K; q, k of head h = hv // G:

    q_rstd_i = rsqrt(sum_c q_ic^2 + 1e-6), k_rstd_i alike             fp32; 1 without l2norm
    a_ic     = exp(gate(g_ic))                                        fp32 in [0, 1]; 1 past the last token
    f_s, r_s = running products of a in aligned groups of s tokens    fp32, see kernel_fun._cute.scan
    S[i, j]  = sum_c (x_ic f_s[i]) (k_jc r_s[j]),  x = q or k         i right, j left in a group of 2 s; s = 1, 2, 4
    S[i, j]  = sum_c (x_ic f_8[i]) (k_jc r_8[j] P)                    i, j of blocks I > J of 8 tokens; P is the
                                                                      decay of the blocks between them
               f, r, P and their products rounded to io, fp32 accumulators
    S_q[i,i] = sum_c q_ic k_ic                                        exact products, fp32 accumulators
    Aqk      = scale q_rstd_i k_rstd_j S_q                            rounded to io; 0 above the diagonal
    L        = beta_i k_rstd_i k_rstd_j S_k, i > j                    fp32
    A        = (I + L)^-1                                             fp32, merges in tf32; rounded to io
    total_c  = products of a over the chunk, and over what of it comes before and after each
               16 tokens                                              fp32

Every factor of row i is a product of decays, each at most 1, of tokens that row i may see.

Operands: q, k [tokens, H, K]; g [tokens, HV, K]; beta [tokens, HV]; A, Aqk [tokens, HV, 64];
rstds [tokens, H]; total [NT, HV, 9 K]; tokens = B T. Value heads are innermost in the order of items.

    tiles     64 tokens x 64 channels a pass, K / 64 passes     grid min(NT HV, resident)     threads 256
    warp b    tokens 8 b .. 8 b + 7, its block; a lane has two neighbouring channels of all 8
    pass      norms as diagonals of mma.sync; raw words -> a, f, r;  level 1 from registers, as diagonals too;
              operands over the block's own raw rows: levels 2 and 4 in one product, then q f_8 where q was,
              k f_8 where k was, k r_8 where g was
    blocks    warps 0-3: the 8 x 8 block below each 16 x 16 diagonal;  4-7: P of every other pair, and total
              warps 0-5: 16 x 16 blocks of S, P times k r_8 in registers;  6, 7: 16 x 16 inverses
    merges    16 -> 32 by warps 0-3 while TMA brings the next item and 4-7 store Aqk, the rstds and ask for
              the next beta and dt_bias;  32 -> 64 by all
    barriers  TMA full; CTA: operands, diagonals and P, L, X_16, T, X_32
    limit     words through shared memory: about 5100 of 128 bytes an item, three quarters of the clocks it takes

    smem      q, k, g         64 K each, in their dtypes, 128-byte swizzle
              L, then A       64 x 68 fp32
              Aqk             64 x 64 io, 16-byte units of row i permuted by i mod 8
              scales, beta    4 x 64 fp32; dt_bias, A_log: K + 1
              D, between      8 K fp32: decay of each block; 24 K / 2 words: P of each pair, two channels a word
    regs      128, 2 CTAs an SM; beside the scan one CTA of two such teams, see :mod:`overlap`
"""

# sizes: one CTA, one pass, read in order
from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int16, Int32, Int64, cute

from kernel_fun._common.device import of
from kernel_fun._cute import scan, trisolve
from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.compile import DTYPES, Program, jit, symbol, tensor
from kernel_fun._cute.decay import GATES, LOG2E, NO_DECAY, Gate, exp2
from kernel_fun._cute.pipe import thread_again
from kernel_fun._cute.tile import ALIGN_BYTES, SMEM_BYTES, Tile, tma_parts
from kernel_fun._cute.warp import (
    load2,
    load4,
    matrices,
    mma,
    mma_k8,
    pack,
    product,
    select,
    store2,
    store4,
    unpack,
)
from kernel_fun.kda._kernels.sm90 import overlap
from kernel_fun.kda._kernels.sm90.chunk_inputs import facts_of
from kernel_fun.kda._kernels.sm90.rows import Rows, flat, flattened, packed_rows, tma_rows
from kernel_fun.kda._kernels.sm90.scan_config import DECAYS

if TYPE_CHECKING:
    from torch import Tensor, device

    from kernel_fun.kda._kernels.sm90.chunk_inputs import Facts

ARCH = "sm_90a"
BT = 64
BC = 8
WARPS = 8
THREADS = 32 * WARPS
PASS = 64
"""Channels of one pass: a row of 128 bytes, two channels a lane."""

PAIRS = 24
"""Pairs of blocks, one left of the other, that are not the two of one 16 x 16 block."""

ROW_WORDS = 32
SLOT_WORDS = BC * ROW_WORDS
HALF_WORDS = BT * ROW_WORDS
BETA_MODES = ("raw", "sigmoid", "sigmoid2")
EPS = 1e-6
CTA_RESERVED_BYTES = 1024
SM_SMEM_BYTES = 233472
SM_REGISTERS = 65536
SOLVERS = 4
"""Warps that merge inverses; the first of the others asks for the next item."""

CTAS = 2
"""CTAs of an SM: 128 registers a thread are as many as the kernel wants."""


class Place(IntEnum):
    """What a CTA knows of an item: words in shared memory, written by the warp that fetches it.

    Of three items: while one is worked on, the next is written, and warps may still read where the last one is.
    """

    CHUNK = 0
    HV = 1
    FIRST = 2
    VALID = 3
    H = 4
    IN_GROUP = 5
    PHASE = 6


PLACE_WORDS = 8
PLACES = 3
TABLE_ROW_BYTES = 16


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
    overlapped: bool = False
    """The scan runs beside it, see :mod:`overlap`: a CTA has an SM to itself and as many teams as it holds."""

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
    def between_words(self) -> int:
        """Decays between blocks, a word for two channels."""
        return PAIRS * self.K // 2

    def tile_bytes(self) -> int:
        return 4 * (self.g_words + self.k_words * (2 if self.g == "float32" else 1))

    @property
    def team_bytes(self) -> int:
        """Shared memory of the threads that work on one item."""
        smem = (
            1024 + self.tile_bytes() + trisolve.TILE_BYTES + BT * BT * 2
        )  # the first: barrier, places, alignment
        smem += 4 * (4 * BT + (WARPS + 1) * self.K + self.between_words)
        return -(-smem // ALIGN_BYTES) * ALIGN_BYTES if self.overlapped else smem

    @property
    def teams(self) -> int:
        """Items a CTA works on at a time."""
        return CTAS if self.overlapped else 1

    def resources(self) -> Resources:
        smem, threads = self.team_bytes * self.teams, THREADS * self.teams
        ctas = min(CTAS // self.teams, SM_SMEM_BYTES // (smem + CTA_RESERVED_BYTES))
        if smem > SMEM_BYTES:
            raise ValueError(f"shared memory of {self} is {smem} bytes, more than {SMEM_BYTES}")
        return Resources(smem, threads, min(255, SM_REGISTERS // (threads * ctas) // 8 * 8), ctas)


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
        mReady: cute.Tensor | None,
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
            Aqk: cute.struct.Align[cute.struct.MemRange[self.io, BT * BT], 1024]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, 3 * BT], 128]
            D: cute.struct.Align[cute.struct.MemRange[Float32, WARPS * self.c.K], 128]
            between: cute.struct.Align[cute.struct.MemRange[Int32, self.c.between_words], 128]
            full: cute.struct.MemRange[Int64, 1]
            place: cute.struct.MemRange[Int32, PLACES * PLACE_WORDS + 1]
            beta: cute.struct.MemRange[Int32, BT]
            parameters: cute.struct.Align[cute.struct.MemRange[Float32, self.c.K + 1], 128]

        self.Storage = Storage
        mQ, mK, mG, mBeta, mA, mAqk = [without_batch(x) for x in (mQ, mK, mG, mBeta, mA, mAqk)]
        if cutlass.const_expr(self.c.l2norm):
            mQ_rstd, mK_rstd = without_batch(mQ_rstd), without_batch(mK_rstd)
        H, HV, NT = mQ.shape[1], mTotal.shape[1], mTotal.shape[0]
        c, row_chunks = self.c, (T + (BT - 1)) // BT
        teams, turns = c.teams, row_chunks
        if cutlass.const_expr(c.overlapped):  # all sequences take turns, a chunk each
            turns = cutlass.max(NT // cutlass.max(row_chunks, 1), 1)
        self.kda_fwd_intra_sm90(
            *self.x_tile.loader(heads_last(mQ)),
            *self.x_tile.loader(heads_last(mK)),
            *self.g_tile.loader(heads_last(mG)),
            mBeta, mA_log, mDt_bias, mTable, mA, mAqk, mQ_rstd, mK_rstd, mTotal, mReady, T, scale, lower_bound,
            *(cute.fast_divmod_create_divisor_v2(n) for n in (HV, HV // H, turns)),
        ).launch(
            grid=(cutlass.min(NT * HV, resident), 1, 1),
            block=(THREADS * teams, 1, 1),
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
        mReady: cute.Tensor | None,
        T: Int32,
        scale: Float32,
        lower_bound: Float32,
        by_HV: cute.FastDivmodDivisorV2,
        by_G: cute.FastDivmodDivisorV2,
        by_turn: cute.FastDivmodDivisorV2,
    ):
        c = self.c
        tid = cute.arch.thread_idx()[0]
        st = self.own(tid)
        self.lanes(st, tid)
        full = st.full.data_ptr()
        if self.within(tid) == 0:
            cute.arch.mbarrier_init(full, 1)
            place = self.place
            place[PLACES * PLACE_WORDS] = Int32(0)
            cute.arch.mbarrier_init_fence()
        self.meet()
        self.divisors = by_HV, by_G, by_turn
        self.inputs = (
            (tma_q, mQ, self.x_tile, st.q),
            (tma_k, mK, self.x_tile, st.k),
            (tma_g, mG, self.g_tile, st.g),
        )
        items, step = mTotal.shape[0] * mTotal.shape[1], cute.arch.grid_dim()[0]
        if cutlass.const_expr(c.overlapped):
            step = c.teams * step
        if self.warp == SOLVERS:
            self.locate(self.first_item(tid), items, T, Int32(0), mTable)
            cute.arch.sync_warp()
            self.fetch(Int32(0), full)
        if cutlass.const_expr(c.overlapped):
            mine = self.first_item(tid) + self.within(tid) * step
            for item in cutlass.range(mine, items, THREADS * step, unroll=1):
                chunk, hv = divmod(item, by_HV)
                n, b = divmod(chunk, by_turn)
                overlap.withdraw(mReady, hv, self.row_of_total(b, n, T))
            overlap.allow()
        self.meet()
        self.keep(self.ask(Int32(0), mBeta, mA_log, mDt_bias))
        self.meet()
        now = cute.make_rmem_tensor(4, Int32)
        self.turn_to(Int32(0), now)
        for item in cutlass.range(self.first_item(tid), items, step, unroll=1):
            # what follows from the lane is made anew after a barrier: no register holds it all along
            here, valid, phase = (now[n] for n in range(3))
            self.lanes(st, now[3])
            then = select(here < (PLACES - 1) * PLACE_WORDS, here + PLACE_WORDS, Int32(0))
            if self.warp == SOLVERS:
                self.locate(item + step, items, T, then, mTable)
            if valid > 0:
                gate = self.gate(lower_bound)
                self.settle_beta()
                self.clear_diagonal()
                cute.arch.mbarrier_wait(full, phase)
                self.blank(valid)
                acc, pair = self.scores(gate, scale, valid)
                cute.arch.fence_view_async_shared()  # no more is written to the tiles before TMA does
                self.all_meet(st)
                self.put_block(acc, pair)
                if self.warp < SOLVERS:
                    self.level_eight()
                else:
                    chunk, hv = self.place[here + Place.CHUNK], self.place[here + Place.HV]
                    self.decays_between(mTotal[chunk, hv, None])
                ahead = self.first_operands()
                self.meet()
                if self.warp < 6:
                    self.blocks(ahead)
                else:
                    trisolve.invert_blocks(self.L, self.warp - 6, self.lane)
            self.all_meet(st)
            if self.warp == SOLVERS:
                self.fetch(then, full)
            asked = self.ask(then, mBeta, mA_log, mDt_bias)
            if valid > 0:
                if self.warp < SOLVERS:
                    trisolve.merge_16(self.L, self.warp, self.lane)
                else:
                    self.store_Aqk(mAqk, here, valid)
                    if cutlass.const_expr(self.c.l2norm):
                        self.store_rstds(mQ_rstd, mK_rstd, here, valid)
                rows = trisolve.rows_of_L(self.L, self.warp, self.lane)
                self.meet()
                trisolve.multiply_32(self.L, self.warp, self.lane, rows)
                rows = trisolve.rows_of_X(self.L, self.warp, self.lane)
                self.meet()
                trisolve.merge_32(self.L, self.warp, self.lane, rows)
            self.keep(asked)
            to, step_A = self.rows_of_A(mA, here)
            self.meet()
            self.turn_to(then, now)
            if valid > 0:
                self.store_A(to, step_A, valid)
                if cutlass.const_expr(c.overlapped):
                    self.meet()
                    if self.warp == WARPS - 1:
                        with cute.arch.elect_one():
                            overlap.publish(
                                mReady, self.place[here + Place.HV], self.place[here + Place.CHUNK]
                            )

    def team(self, tid: Int32) -> Any:
        """Which team of its CTA a thread belongs to."""
        return cute.arch.make_warp_uniform(tid // THREADS) if self.c.overlapped else 0

    def row_of_total(self, b: Int32, n: Int32, T: Int32) -> Int32:
        """Of chunk n of sequence b, in a dense batch."""
        return b * ((T + (BT - 1)) // BT) + n

    def first_item(self, tid: Int32) -> Any:
        block = cute.arch.block_idx()[0]
        return self.c.teams * block + self.team(tid) if self.c.overlapped else block

    def within(self, tid: Int32) -> Int32:
        """A thread's index in its team."""
        return tid % THREADS if self.c.overlapped else tid

    def own(self, tid: Int32) -> Any:
        """The shared memory of a thread's team."""
        if not self.c.overlapped:
            return SmemAllocator().allocate(self.Storage)
        size = self.c.team_bytes
        assert self.Storage.size_in_bytes() <= size
        memory = SmemAllocator().allocate(size * self.c.teams, ALIGN_BYTES)
        return self.Storage(memory + cute.assume(self.team(tid) * size, divby=ALIGN_BYTES))

    def meet(self) -> None:
        """Barrier of a team."""
        if self.c.overlapped:
            team = self.team(cute.arch.thread_idx()[0])
            cute.arch.barrier(barrier_id=1 + team, number_of_threads=THREADS)
        else:
            cute.arch.sync_threads()

    def turn_to(self, here: Int32, now: cute.Tensor) -> None:
        """The item that comes: its place, valid tokens and phase; and this thread."""
        for n, x in enumerate(
            (here, self.place[here + Place.VALID], self.place[here + Place.PHASE], thread_again())
        ):
            now[n] = x

    def all_meet(self, st: Any) -> None:
        """A barrier, and the lane anew: its latency passes while others come."""
        tid = thread_again()
        self.meet()
        self.lanes(st, tid)

    @cute.jit
    def locate(self, item: Int32, items: Int32, T: Int32, here: Int32, mTable: cute.Tensor | None):
        """Where an item is, to ``here``. No valid token past the last item."""
        by_HV, by_G, by_turn = self.divisors
        place = self.place
        if self.warp == SOLVERS:
            valid, phase = Int32(0), place[PLACES * PLACE_WORDS]
            cute.arch.sync_warp()
            if item < items:
                chunk, hv = divmod(item, by_HV)
                h, in_group = divmod(hv, by_G)
                if cutlass.const_expr(self.c.packed):
                    first, valid = row_of_table(mTable.iterator.toint() + Int64(chunk) * TABLE_ROW_BYTES)
                else:
                    if cutlass.const_expr(self.c.overlapped):
                        c, b = divmod(chunk, by_turn)
                        chunk = self.row_of_total(b, c, T)
                    else:
                        b, c = divmod(chunk, by_turn)
                    first, valid = b * T + c * BT, cutlass.min(T - c * BT, BT)
                known = (chunk, hv, first, h, in_group, phase)
                names = (Place.CHUNK, Place.HV, Place.FIRST, Place.H, Place.IN_GROUP, Place.PHASE)
                for n, x in zip(names, known, strict=True):
                    place[here + n] = Int32(x)
                if valid > 0:
                    place[PLACES * PLACE_WORDS] = phase ^ 1
                    for tma, _, tXgX in self.tiles_at(first, h, hv):
                        cute.prefetch(tma, tXgX)
            place[here + Place.VALID] = valid

    @cute.jit
    def fetch(self, here: Int32, full: cute.Pointer):
        """The tiles of the item whose place is ``here``, by TMA."""
        place = self.place
        if place[here + Place.VALID] > 0:
            first, h, hv = (place[here + n] for n in (Place.FIRST, Place.H, Place.HV))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.c.tile_bytes())
            for tma, tXsX, tXgX in self.tiles_at(first, h, hv):
                for p in cutlass.range_constexpr(self.c.passes):
                    cute.copy(tma, tXgX[None, p], tXsX[None, p], tma_bar_ptr=full)

    def tiles_at(
        self, first: Int32, h: Int32, hv: Int32
    ) -> list[tuple[cute.CopyAtom, cute.Tensor, cute.Tensor]]:
        """Of q, k and g: a copy, where it goes and what it reads."""
        found = []
        for (tma, mX, tile, field), head in zip(self.inputs, (h, h, hv), strict=True):
            rows = cute.domain_offset((first, 0), mX[None, None, head])
            found.append(
                (tma, *tma_parts(tma, cute.local_tile(rows, tile.shape, (0, None)), tile.view(field)))
            )
        return found

    @cute.jit
    def ask(
        self, here: Int32, mBeta: cute.Tensor, mA_log: cute.Tensor | None, mDt_bias: cute.Tensor | None
    ) -> tuple[Int32, Float32, Float32]:
        """beta of a row of an item, as it is in memory, and dt_bias of a channel, a thread of the last warps; A_log."""
        thread = 32 * (self.warp - SOLVERS) + self.lane
        word, bias, A_log = Int32(0), Float32(0.0), Float32(0.0)
        if self.warp >= SOLVERS:
            valid = self.place[here + Place.VALID]
            if valid > 0:
                hv = self.place[here + Place.HV]
                kind = Int32 if cutlass.const_expr(self.c.beta == "float32") else Int16
                raw = cute.make_tensor(cute.recast_ptr(mBeta.iterator, dtype=kind), mBeta.layout)
                row = cutlass.min(thread & (BT - 1), valid - 1)
                word = Int32(raw[self.place[here + Place.FIRST] + row, hv])
                if cutlass.const_expr(self.c.has_dt_bias):
                    bias = mDt_bias[hv * self.c.K + (thread & (self.c.K - 1))]
                if cutlass.const_expr(self.c.has_A_log):
                    A_log = mA_log[hv]
        return word, bias, A_log

    @cute.jit
    def keep(self, asked: tuple[Int32, Float32, Float32]):
        """What was asked for, to where the passes find it."""
        word, bias, A_log = asked
        beta, parameters = self.beta, self.parameters
        thread = 32 * (self.warp - SOLVERS) + self.lane
        if self.warp >= SOLVERS:
            if thread < BT:
                beta[thread] = word
            if cutlass.const_expr(self.c.has_dt_bias):
                if thread < self.c.K:
                    parameters[thread] = bias
            if cutlass.const_expr(self.c.has_A_log):
                if thread == 0:
                    parameters[self.c.K] = A_log

    def gate(self, lower_bound: Float32) -> Gate:
        """The gate of the item's value head."""
        A_log = self.parameters[self.c.K] if self.c.has_A_log else None
        return Gate.of_head(self.c.gate, A_log, lower_bound)

    def settle_beta(self) -> None:
        """beta of the warp's rows, from what is in memory to its fp32 value."""
        beta, row = self.beta, BC * self.warp + (self.lane & 7)
        word = beta[row]
        x = (
            as_float(word)
            if self.c.beta == "float32"
            else unpack(word, getattr(cutlass, DTYPES[self.c.beta]))[0]
        )
        if self.c.beta_mode != "raw":
            top = 2.0 if self.c.beta_mode == "sigmoid2" else 1.0
            x = top * cute.arch.rcp_approx(exp2(x * -LOG2E) + 1.0)
        cute.arch.sync_warp()
        beta[row] = bits_of(x)

    @cute.jit
    def scores(self, gate: cutlass.Constexpr[Any], scale: Float32, valid: Int32):
        """Levels 1, 2 and 4 of Aqk and L, which stay in registers, and the operands of all wider blocks."""
        acc = cute.make_rmem_tensor(4 + 3 + BC, Float32)  # levels 2 and 4, three norms, traces of level 1
        acc.fill(0.0)
        for p in cutlass.range_constexpr(self.c.passes):
            self.one_pass(p, gate, acc)
        self.put_sums(acc)
        pair = self.sum_of_traces()
        self.scale_of_row(scale, valid)
        return acc, pair

    def lanes(self, st: Any, tid: Int32) -> None:
        """Views of shared memory and a thread's position."""
        c = self.c
        tid = self.within(tid)
        self.warp, self.lane = cute.arch.make_warp_uniform(tid >> 5), tid & 31
        self.r, self.t = self.lane >> 2, self.lane & 3
        # q, k and g are neighbours: one base and constant offsets reach all three
        self.words = words_of(st.q, c.tile_bytes() // 4)
        self.at = st.q.data_ptr().toint()
        self.L = st.L.get_tensor(cute.make_layout(trisolve.SIZE * trisolve.PITCH))
        self.D = st.D.get_tensor(cute.make_layout(WARPS * c.K))
        self.beta = words_of(st.beta, BT)
        self.parameters = st.parameters.get_tensor(cute.make_layout(self.c.K + 1))
        self.place = words_of(st.place, PLACES * PLACE_WORDS + 1)
        self.between = words_of(st.between, c.between_words)
        self.Aqk_words = words_of(st.Aqk, BT * ROW_WORDS)
        self.Aqk_values = st.Aqk.get_tensor(cute.make_layout(BT * BT))
        self.scales = st.scales.get_tensor(cute.make_layout(3 * BT))

    def clear_diagonal(self) -> None:
        """Zeros to the warp's rows of its 16 x 16 block of Aqk, of which those above the diagonal remain."""
        i, unit = BC * self.warp + (self.lane & 7), (self.warp & 6) + ((self.lane >> 3) & 1)
        store4(self.Aqk_words.iterator.toint() + i * 128 + ((unit ^ (i & 7)) << 4), [Int32(0)] * 4)

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

    def norms(self, slot: Int32, acc: cute.Tensor) -> None:
        """q.k, q.q and k.k of the warp's rows over the channels of a pass, added to acc[4:7].

        The diagonals of [q; k] k^T and [q; k] q^T: lane (r, t) has that of row r if t = r / 2.
        """
        at = (
            self.at
            + 4 * slot
            + row_of_matrix(self.lane, self.lane >> 4)
            + ((self.lane >> 3) & 1) * (4 * self.c.k_words)
        )
        sums = cute.make_rmem_tensor(8, Float32)
        sums.fill(0.0)
        for j in range(PASS // 16):
            x = matrices(at ^ (32 * j))
            for half in (x[:2], x[2:]):  # eight channels of q and of k
                mma_k8(sums, 0, half, half[1], self.io)
                if self.c.l2norm:
                    mma_k8(sums, 4, half, half[0], self.io)
        for n, e in enumerate((0, 4, 2), 4):
            acc[n] = acc[n] + self.diagonal(sums, e)

    def diagonal(self, sums: cute.Tensor, e: int) -> Float32:
        """Element (r, r) of the 8 x 8 product whose first row of fragments is sums[e : e + 2], if t = r / 2."""
        return select((self.r & 1) == 1, sums[e + 1], sums[e])

    @cute.jit
    def put_sums(self, acc: cute.Tensor):
        """The sums of :meth:`norms` to where their scales will stand, and the diagonals of :meth:`level_one`.

        The latter to words of the warp's rows of Aqk that are above the diagonal, or not yet written.
        """
        scales = self.scales
        if (self.r >> 1) == self.t:
            for n in cutlass.range_constexpr(3):
                scales[n * BT + BC * self.warp + self.r] = acc[4 + n]
            for half in cutlass.range_constexpr(2):
                words = [bits_of(acc[7 + BC // 2 * half + n]) for n in range(4)]
                store4(self.traces_at(half) ^ (self.r * (4 * ROW_WORDS + 16)), words)
        cute.arch.sync_warp()

    def traces_at(self, half: Any) -> Int32:
        """Where four sums of the first row of the warp's block are: unit u of row i stands at u ^ i."""
        return (
            self.Aqk_words.iterator.toint()
            + self.warp * (4 * SLOT_WORDS)
            + 16 * (((self.warp & 6) ^ 2) + half)
        )

    def sum_of_traces(self) -> Float32:
        """Of level 1, S_q of the warp's token pair ``lane & 7`` or, from 4 on, S_k of pair ``(lane & 7) - 4``."""
        at = self.traces_at((self.lane >> 2) & 1) + 4 * (self.lane & 3)
        return pairwise([as_float(word_at(at ^ (i * (4 * ROW_WORDS + 16)), 0)) for i in range(BC)])

    def scale_of_row(self, scale: Float32, valid: Int32) -> None:
        """Factors of row and column ``row`` in place of its sums, Aqk[row, row], and q_rstd in the place of beta."""
        scales, row = self.scales, BC * self.warp + (self.lane & 7)
        exists = row < valid
        beta = as_float(self.beta[row])
        qk, qq, kk = (scales[n * BT + row] for n in range(3))
        if self.c.l2norm:
            q_rstd, k_rstd = (cute.math.rsqrt(x + EPS) for x in (qq, kk))
        else:
            q_rstd, k_rstd = Float32(1.0), Float32(1.0)
        of_q, of_k, column = (
            select(exists, x, Float32(0.0)) for x in (scale * q_rstd, beta * k_rstd, k_rstd)
        )
        cute.arch.sync_warp()
        for n, x in enumerate((of_q, of_k, column)):
            scales[n * BT + row] = x
        self.beta[row] = bits_of(q_rstd)
        self.Aqk_values[2 * self.Aqk_word(row, row) + (row & 1)] = (qk * of_q * column).to(self.io)

    @cute.jit
    def store_rstds(self, mQ_rstd: cute.Tensor, mK_rstd: cute.Tensor, here: Int32, valid: Int32):
        """Norms of the rows that are tokens, by the last two warps, once a head of q."""
        row = 32 * (self.warp - (WARPS - 2)) + self.lane
        if row >= 0 and row < valid and self.place[here + Place.IN_GROUP] == 0:
            first, h = self.place[here + Place.FIRST], self.place[here + Place.H]
            mQ_rstd[first + row, h] = as_float(self.beta[row])
            mK_rstd[first + row, h] = self.scales[2 * BT + row]

    @cute.jit
    def one_pass(
        self,
        p: Int32,
        gate: cutlass.Constexpr[Any],
        acc: cute.Tensor,
    ):
        """64 channels: decays, levels 1..8, operands of levels 16 and 32."""
        c, block = self.c, self.warp
        slot = p * HALF_WORDS + block * SLOT_WORDS
        bias = (
            load2(self.parameters.iterator.toint() + 4 * (p * PASS + 2 * self.lane))
            if c.has_dt_bias
            else None
        )
        self.norms(slot, acc)
        # address of channels 2 lane, 2 lane + 1 in row i: 16-byte unit u of a row stands at u ^ i
        first = self.at + 4 * (slot + self.lane)
        self.row = [first ^ (i * (4 * ROW_WORDS + 16)) for i in range(BC)]
        a = []
        for i in cutlass.range_constexpr(BC):
            x = self.raw_gate(p, i)
            a.append([gate.decay(x[e] + bias[e] if c.has_dt_bias else x[e]) for e in range(2)])
        columns = [scan.start([x[e] for x in a]) for e in range(2)]
        q, k = ([word_at(x, 4 * n * c.k_words) for x in self.row] for n in range(2))
        cute.arch.sync_warp()  # every raw word of the slots has been read
        self.level_one(columns, q, k, acc)
        self.levels_two_and_four(slot, columns, q, k, acc)
        for f, r in columns:
            scan.double(f, r, 4)
        for i in cutlass.range_constexpr(BC):
            f, r = (self.factor(columns, n, i) for n in range(2))
            self.put(i, 0, self.times(q[i], f))
            self.put(i, c.k_words, self.times(k[i], f))
            self.put(i, c.g_words, self.times(k[i], r))
        D = [bits_of(f[BC - 1]) for f, _ in columns]
        store2(self.D.iterator.toint() + 4 * (block * c.K + p * PASS + 2 * self.lane), D)

    def level_one(self, columns: Any, q: list[Any], k: list[Any], acc: cute.Tensor) -> None:
        """q f and k f of each odd token times k of the one before, to acc[7:11] and acc[11:15].

        A lane's word of a token is an element of an operand of eight groups of eight channels, one a row or a
        column: their own products stand on the diagonal, and its sum over the lanes is the token's.
        """
        for n, (i, j) in enumerate(zip(scan.right_half(1, BC), scan.left_half(1, BC), strict=True)):
            f = self.factor(columns, 0, i)
            sums = cute.make_rmem_tensor(4, Float32)
            sums.fill(0.0)
            mma_k8(sums, 0, (self.times(q[i], f), self.times(k[i], f)), k[j], self.io)
            for half in range(2):
                at = 7 + BC // 2 * half + n
                acc[at] = acc[at] + self.diagonal(sums, 2 * half)

    def levels_two_and_four(
        self, slot: Int32, columns: Any, q: list[Any], k: list[Any], acc: cute.Tensor
    ) -> None:
        """One product: rows 0-7 and columns 0-3 are level 2, rows 8-15 and columns 4-7 level 4, to acc[:4].

        Of each level's rows four are q f and four k f of its right tokens; the columns are k r of its left tokens.
        """
        c = self.c
        for n, s in enumerate((2, 4)):
            for f, r in columns:
                scan.double(f, r, s // 2)
            tokens = zip(scan.right_half(s, BC), scan.left_half(s, BC), strict=True)
            for row, (i, j) in enumerate(tokens):
                f = self.factor(columns, 0, i)
                self.put(row, n * c.k_words, self.times(q[i], f))
                self.put(BC // 2 + row, n * c.k_words, self.times(k[i], f))
                self.put(BC // 2 * n + row, c.g_words, self.times(k[j], self.factor(columns, 1, j)))
        cute.arch.sync_warp()
        m = self.lane >> 3
        a_at = self.at + 4 * slot + (m & 1) * (4 * c.k_words) + row_of_matrix(self.lane, m >> 1)
        b_at = self.at + 4 * (slot + c.g_words) + row_of_matrix(self.lane, m)
        for j in range(PASS // 32):
            b = matrices(b_at ^ (64 * j))
            for half in range(2):
                mma(acc, 0, matrices(a_at ^ (64 * j + 32 * half)), b[2 * half : 2 * half + 2], self.io)
        cute.arch.sync_warp()

    def factor(self, columns: Any, n: int, i: int) -> Any:
        """f (n = 0) or r (n = 1) of token i and the lane's two channels, a word; None stands for 1."""
        x, y = (column[n][i] for column in columns)
        return None if x is None else pack(x, y, self.io)

    def times(self, word: Any, factor: Any) -> Any:
        """Two channels of a token times a factor."""
        return word if factor is None else product(word, factor, self.io)

    def put(self, row: int, tile: int, word: Any) -> None:
        """A word of a row of the warp's slot, ``tile`` words from that of q."""
        put_word(self.row[row], 4 * tile, word)

    def raw_gate(self, p: Int32, i: int) -> tuple[Float32, Float32]:
        """g of the lane's two channels and token i of the warp's block, as fp32."""
        if self.c.g != "float32":
            return unpack(word_at(self.row[i], 4 * self.c.g_words), self.g_tile.dtype)
        # a row is 32 channels: the first 32 of the pass for every token, then the others
        column = (2 * (self.lane & 15)) ^ (4 * i)
        at = (2 * p + (self.lane >> 4)) * HALF_WORDS + self.warp * SLOT_WORDS + column
        at = at + i * ROW_WORDS + self.c.g_words
        return as_float(self.words[at]), as_float(self.words[at + 1])

    @cute.jit
    def put_block(self, acc: cute.Tensor, pair: Float32):
        """The warp's own 8 x 8 block of Aqk and L: level 1 by eight lanes, a pair of tokens each; 2 and 4 by all."""
        first, scales = BC * self.warp, self.scales
        sL, values = self.L, self.Aqk_values
        odd = first + 2 * (self.lane & 3) + 1
        pair = pair * (scales[select(self.lane < BC // 2, odd, BT + odd)] * scales[2 * BT + odd - 1])
        wide, is_q, n, column = self.t >= 2, self.r < BC // 2, self.r & 3, 2 * (self.t & 1)
        i = first + select(wide, 4 + n, 2 + 2 * column + (n & 1))
        j = first + select(wide, column, 2 * column)
        x, y = (select(wide, acc[2 + e], acc[e]) for e in range(2))
        row, columns = scales[select(is_q, i, BT + i)], self.column_scales(j)
        if self.lane < BC // 2:
            values[2 * self.Aqk_word(odd, odd - 1)] = pair.to(self.io)
        elif self.lane < BC:
            sL[odd * trisolve.PITCH + trisolve.place(odd - 1)] = pair
        if wide or (n >> 1) == self.t:
            if is_q:
                self.put_q(i, j, x, y, row, columns)
            else:
                self.put_k(i, j, x, y, row, columns)

    def Aqk_word(self, i: Int32, j: Int32) -> Int32:
        """Word of elements (i, j), (i, j + 1) of Aqk, j even: unit u of row i stands at u ^ (i mod 8)."""
        return i * ROW_WORDS + (((j >> 3) ^ (i & 7)) << 2) + ((j & 7) >> 1)

    def column_scales(self, j: Int32) -> tuple[Float32, Float32]:
        return load2(self.scales.iterator.toint() + 4 * (2 * BT + j))

    def put_q(self, i: Int32, j: Int32, x: Float32, y: Float32, row: Float32, columns: Any) -> None:
        """Elements (i, j), (i, j + 1) of Aqk from those of S_q; j is even."""
        self.Aqk_words[self.Aqk_word(i, j)] = pack(x * (row * columns[0]), y * (row * columns[1]), self.io)

    def put_k(
        self, i: Int32, j: Int32, x: Float32, y: Float32, row: Float32, columns: Any, *, far: bool = False
    ) -> None:
        """Elements (i, j), (i, j + 1) of L from those of S_k; j is even. ``far``: outside the 16 x 16 blocks."""
        at = i * trisolve.PITCH + trisolve.place(j)
        for n, z in enumerate((x * (row * columns[0]), y * (row * columns[1]))):
            self.L[at + trisolve.place(n)] = trisolve.rounded(z) if far else z

    @cute.jit
    def level_eight(self):
        """Blocks (2 w + 1, 2 w) of Aqk and L by warp w."""
        acc = cute.make_rmem_tensor(8, Float32)
        acc.fill(0.0)
        right = self.warp * 2 + 1
        i, j = BC * right + self.r, BC * (right - 1) + 2 * self.t
        rows, columns = [self.scales[n * BT + i] for n in range(2)], self.column_scales(j)
        a_at, b_at = self.rows_of(right), self.columns_of(right - 1)
        for p in cutlass.range_constexpr(self.c.passes):
            for step in cutlass.range_constexpr(PASS // 32):
                b = matrices((b_at ^ (64 * step)) + 4 * HALF_WORDS * p)
                for half in cutlass.range_constexpr(2):
                    a = matrices((a_at ^ (64 * step + 32 * half)) + 4 * HALF_WORDS * p)
                    mma(acc, 4 * half, a, b[2 * half : 2 * half + 2], self.io)
        for e in cutlass.range_constexpr(4):
            acc[e] = acc[e] + acc[4 + e]
        self.put_q(i, j, acc[0], acc[1], rows[0], columns)
        self.put_k(i, j, acc[2], acc[3], rows[1], columns)

    def rows_of(self, block: Int32) -> Int32:
        """Address for ldmatrix of an A operand: q f of a block's tokens, then k f, 16 channels."""
        m = self.lane >> 3
        slot = self.at + block * (4 * SLOT_WORDS)
        return slot + (m & 1) * (4 * self.c.k_words) + row_of_matrix(self.lane, m >> 1)

    def columns_of(self, block: Int32) -> Int32:
        """Address for ldmatrix of two B operands: k r of a block's tokens, 32 channels."""
        slot = self.at + 4 * self.c.g_words + block * (4 * SLOT_WORDS)
        return slot + row_of_matrix(self.lane, self.lane >> 3)

    @cute.jit
    def decays_between(self, mTotal: cute.Tensor):
        """Decays from the end of block J to the start of block I, and the rows of total, by 128 threads.

        A thread has two channels, and the even blocks I or the odd ones. Words of 32 channels stand in the
        order of B operands: lane t of a row finds its four words of two products together.
        """
        c, between = self.c, self.between
        pairs = c.K // 2
        thread = 32 * (self.warp - SOLVERS) + self.lane
        odd, pair = thread // pairs, thread % pairs
        if odd < 2:
            at = self.D.iterator.toint() + 8 * pair
            D = [load2(at + 4 * c.K * b) for b in range(WARPS)]
            word = (pair & ~15) + 4 * (pair & 3) + ((pair >> 2) & 3)
            word = word + odd * (2 * pairs)
            is_odd = odd == 1
            for even in cutlass.range_constexpr(2, WARPS, 2):
                x = [select(is_odd, y, Float32(1.0)) for y in D[even]]
                for J in cutlass.range_constexpr(even - 1, -1, -1):
                    between[word + place_of(even, J) * pairs] = pack(x[0], x[1], self.io)
                    x = [y * d for y, d in zip(x, D[J], strict=True)]
            # of two blocks together: what comes before them by the even threads, what comes after by the odd ones
            to = mTotal.iterator.toint() + 8 * pair
            row, each = 4 * c.K, WARPS // 2
            x = [Float32(1.0), Float32(1.0)]
            if is_odd:
                for b in cutlass.range_constexpr(WARPS - 1, -1, -1):
                    if cutlass.const_expr(b % 2 == 1):
                        put_global(to + row * (1 + each + b // 2), [bits_of(y) for y in x])
                    x = [y * d for y, d in zip(x, D[b], strict=True)]
            else:
                for b in cutlass.range_constexpr(WARPS):
                    if cutlass.const_expr(b % 2 == 0):
                        put_global(to + row * (1 + b // 2), [bits_of(y) for y in x])
                    x = [y * d for y, d in zip(x, D[b], strict=True)]
                put_global(to, [bits_of(y) for y in x])

    def blocks_of_warp(self) -> tuple[Int32, Int32]:
        """The first of two blocks I and of two blocks J of a warp: see :func:`place_of`."""
        below, far = self.warp >= 1, self.warp >= 3
        top = select(far, Int32(6), select(below, Int32(4), Int32(2)))
        return top, 2 * (self.warp - select(far, Int32(3), select(below, Int32(1), Int32(0))))

    def first_operands(self) -> Any:
        """What :meth:`blocks` begins with of operands that the passes wrote."""
        top, left = self.blocks_of_warp()
        return self.block_operands(self.rows_of(top), self.columns_of(left), 0, 0)

    @cute.jit
    def blocks(self, operands: cutlass.Constexpr[Any]):
        """Blocks (I, J), J < I, beyond the 16 x 16 ones, two by two a warp."""
        c, w = self.c, self.warp
        top, left = self.blocks_of_warp()
        acc = cute.make_rmem_tensor(16, Float32)
        acc.fill(0.0)
        a_at, b_at = self.rows_of(top), self.columns_of(left)
        f_at = self.between.iterator.toint() + w * (4 * 2 * c.K) + 16 * self.t
        columns = [self.column_scales(BC * (left + n) + 2 * self.t) for n in range(2)]
        rows = [[self.scales[m * BT + BC * (top + n) + self.r] for m in range(2)] for n in range(2)]
        steps = [(p, j) for p in range(c.passes) for j in range(PASS // 32)]
        ahead = *operands, self.block_decays(f_at, *steps[0])
        for i in cutlass.range_constexpr(len(steps)):
            a, b, f = ahead
            if cutlass.const_expr(i + 1 < len(steps)):
                ahead = (
                    *self.block_operands(a_at, b_at, *steps[i + 1]),
                    self.block_decays(f_at, *steps[i + 1]),
                )
            for n in cutlass.range_constexpr(4):
                y = [product(x, bits_of(z), self.io) for x, z in zip(b[n & 1], f[n], strict=True)]
                for half in cutlass.range_constexpr(2):
                    mma(acc, 4 * n, a[n >> 1][half], y[2 * half : 2 * half + 2], self.io)
        for n in cutlass.range_constexpr(4):
            i, j = BC * (top + (n >> 1)) + self.r, BC * (left + (n & 1)) + 2 * self.t
            self.put_q(i, j, acc[4 * n], acc[4 * n + 1], rows[n >> 1][0], columns[n & 1])
            self.put_k(i, j, acc[4 * n + 2], acc[4 * n + 3], rows[n >> 1][1], columns[n & 1], far=True)

    def block_operands(self, a_at: Int32, b_at: Int32, p: int, j: int) -> tuple[Any, Any]:
        """Of 32 channels: A of two blocks and B of two."""
        at, slot = 4 * HALF_WORDS * p, 4 * SLOT_WORDS
        a = [
            [matrices((a_at ^ (64 * j + 32 * half)) + (slot * n + at)) for half in range(2)] for n in range(2)
        ]
        b = [matrices((b_at ^ (64 * j)) + (slot * n + at)) for n in range(2)]
        return a, b

    def block_decays(self, f_at: Int32, p: int, j: int) -> Any:
        """Of 32 channels: the decays between two blocks and two."""
        return [load4(f_at + p * (2 * PASS) + n * (2 * self.c.K) + 64 * j) for n in range(4)]

    def unit_of_A(self) -> tuple[Int32, Int32]:
        """Row and unit of eight columns of A a thread stores; eight lanes that read together: four units, two rows."""
        row = 4 * self.warp + ((self.lane >> 2) & 1) + 2 * (self.lane >> 4)
        return row, (self.lane & 3) + 4 * ((self.lane >> 3) & 1)

    def rows_of_A(self, mA: cute.Tensor, here: Int32) -> tuple[Int64, Int64]:
        """Where :meth:`store_A` begins, and how far 32 rows are."""
        row, unit = self.unit_of_A()
        return self.rows_from(mA, here, row, 16 * unit, 32)

    @cute.jit
    def store_A(self, to: Int64, step: Int64, valid: Int32):
        """Rows of A that are tokens: eight columns a thread in every 32nd row."""
        row, unit = self.unit_of_A()
        J, odd = unit >> 1, self.warp >> 2
        at = self.L.iterator.toint() + 4 * (row * trisolve.PITCH + 8 * unit)
        found = []
        for n in cutlass.range_constexpr(2):
            moved = select((J == 2 * n) & (odd == 1), Int32(4 * trisolve.shift(1, 0)), Int32(0))
            x, y = (load4(at + 4 * 32 * n * trisolve.PITCH + moved + 16 * e) for e in range(2))
            found.append(
                [select(J <= 2 * n + odd, pack(*z, self.io), Int32(0)) for z in zip(x, y, strict=True)]
            )
        for n in cutlass.range_constexpr(2):
            put_global(to + n * step, found[n], 32 * n + row < valid)

    @cute.jit
    def store_Aqk(self, mAqk: cute.Tensor, here: Int32, valid: Int32):
        """Rows of Aqk that are tokens, by 128 threads: eight columns a thread in every sixteenth row."""
        row, unit = 4 * (self.warp & 3) + (self.lane >> 3), self.lane & 7
        to, step = self.rows_from(mAqk, here, row, 16 * unit, 16)
        from_ = self.Aqk_words.iterator.toint() + row * 128 + ((unit ^ (row & 7)) << 4)
        found = [[bits_of(x) for x in load4(from_ + 16 * 128 * I)] for I in range(BT // 16)]
        for I in cutlass.range_constexpr(BT // 16):
            words = [select((unit >> 1) <= I, w, Int32(0)) for w in found[I]]
            put_global(to + I * step, words, 16 * I + row < valid)

    def rows_from(
        self, mX: cute.Tensor, here: Int32, row: Int32, byte: Int32, rows: int
    ) -> tuple[Int64, Int64]:
        """Address of a byte in a row of the item in a [tokens, HV, 64] result, and how far ``rows`` rows are."""
        HV, first, hv = mX.shape[1], self.place[here + Place.FIRST], self.place[here + Place.HV]
        start = (Int64(first + row) * HV + hv) * (2 * BT)
        return mX.iterator.toint() + start + byte, Int64(HV * (2 * BT * rows))


def place_of(even: int, J: int) -> int:
    """Place of the pair of blocks (even, J) among the decays between blocks; (even + 1, J) is two behind.

    A warp has four neighbours: 0 (2-3, 0-1);  1, 2 (4-5, 0-1), (4-5, 2-3);  3, 4, 5 (6-7, 0-1), (6-7, 2-3), (6-7, 4-5).
    """
    warp = {2: 0, 4: 1, 6: 3}[even] + J // 2
    return 4 * warp + J % 2


def row_of_table(address: Int64) -> tuple[Int32, Int32]:
    """First token and valid tokens of a chunk, the first two words of its row of the table."""
    return cute.arch.inline_ptx(
        "ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32, Int32], read_only_args=[address]
    )


def word_at(address: Int32, offset: int) -> Int32:
    """The word of shared memory that many bytes behind an address."""
    ptx = f"ld.shared.b32 {{$w0}}, [{{$r0}}+{offset}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[address])


def put_word(address: Int32, offset: int, word: Int32) -> None:
    """A word to shared memory, that many bytes behind an address."""
    cute.arch.inline_ptx(f"st.shared.b32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, word])


def put_global(address: Int64, words: list[Any], exists: Any = None) -> None:
    """Two or four words to global memory, if ``exists``."""
    names = ", ".join(f"{{$r{n + 1}}}" for n in range(len(words)))
    ptx = f"st.global.v{len(words)}.b32 [{{$r0}}], {{{names}}};"
    given = [address, *words]
    if exists is not None:
        ptx = f"{{ .reg .pred p; setp.ne.b32 p, {{$r{len(given)}}}, 0; @p {ptx} }}"
        given.append(select(exists, Int32(1), Int32(0)))
    cute.arch.inline_ptx(ptx, read_only_args=given)


def without_batch(mX: cute.Tensor) -> cute.Tensor:
    """[1, tokens, ...] seen as [tokens, ...]."""
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, list(range(1, cute.rank(mX)))))


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


def pairwise(x: list[Float32]) -> Float32:
    """The sum of a power of two of values."""
    return x[0] if len(x) == 1 else pairwise([y + z for y, z in zip(x[::2], x[1::2], strict=True)])


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
    rstd = tensor("float32", 1, tokens, H, align=4) if config.l2norm else None
    return Program(
        KdaFwdIntraSm90(config),
        (
            tensor(config.io, 1, tokens, H, K),
            tensor(config.io, 1, tokens, H, K),
            tensor(config.g, 1, tokens, HV, K),
            tensor(config.beta, 1, tokens, HV, align=2 if config.beta != "float32" else 4),
            tensor("float32", HV, align=4) if config.has_A_log else None,
            tensor("float32", symbol(), align=4) if config.has_dt_bias else None,
            tensor("int32", NT, 4) if config.packed else None,
            tensor(config.io, 1, tokens, HV, BT),
            tensor(config.io, 1, tokens, HV, BT),
            rstd,
            rstd,
            tensor("float32", NT, HV, DECAYS * K),
            tensor("int32", HV, NT, align=4) if config.overlapped else None,
            Int32(1),
            Float32(1.0),
            Float32(0.0),
            Int32(1),
        ),
    )


@dataclass(frozen=True)
class Plan:
    """What a call's shapes, strides, dtypes and flags decide: the kernel, its rows, the sizes of its results."""

    config: Config
    rows: tuple[Rows, Rows, Rows, Rows]
    """Of q, k, g and beta."""
    square: tuple[int, ...]
    """[B, T, HV, BT], of A and Aqk."""
    norms: tuple[int, ...]
    totals: tuple[int, ...]
    ready: tuple[int, int]
    """[HV, NT], by which the scan follows."""
    scalars: tuple[int, float, float, int]
    """T, scale, lower bound and CTAs, the last arguments of the kernel."""
    runs: bool


@lru_cache(maxsize=512)
def prepare(
    facts: tuple[Facts | None, ...], at: device, *, scale: float, gate: str, lower_bound: float | None,
    beta_mode: str, l2norm: bool, beside: int = 0,
) -> Plan:  # fmt: skip
    """Everything about a launch but addresses. ValueError or TypeError names the argument that does not fit.

    ``beside``: SMs left to the scan of the same dense tensors, see :mod:`overlap`.
    """
    import torch

    q, k, g, beta, A_log, dt_bias, table = facts
    B, T, H, K = q[0]
    HV = g[0][2]
    for name, x, shape in (("k", k, (B, T, H, K)), ("g", g, (B, T, HV, K)), ("beta", beta, (B, T, HV))):
        if tuple(x[0]) != shape:
            raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(x[0])}")
    for name, x, size in (("A_log", A_log, HV), ("dt_bias", dt_bias, HV * K)):
        if x is not None and (x[2] != torch.float32 or tuple(x[0]) != (size,) or x[1] != (1,)):
            raise ValueError(f"`{name}` must be contiguous float32 [{size}], got {x[2]} {list(x[0])}")
    if table is not None:
        if table[2] != torch.int32 or len(table[0]) != 2 or table[0][1] != 4 or table[1] != (4, 1):
            raise ValueError(f"`table` must be contiguous int32 [NT, 4], got {table[2]} {list(table[0])}")
        if B != 1:
            raise ValueError(f"`q` must have B = 1 with a chunk table, got B = {B}")
    if k[2] != q[2]:
        raise TypeError(f"`k` must have the dtype of q, {q[2]}, got {k[2]}")
    if H == 0 or HV % H:
        raise ValueError(f"`g` must have a multiple of {H} heads, got {HV}")
    if gate == "bounded" and (lower_bound is None or not lower_bound <= 0.0):
        raise ValueError(f"`lower_bound` must be a number <= 0 with gate 'bounded', got {lower_bound}")
    if B * T >= 1 << 31:
        raise ValueError(f"`q` must have fewer than 2^31 tokens, got {B * T}")
    config = Config(
        *(str(x[2]).removeprefix("torch.") for x in (q, g, beta)), K, gate, beta_mode, l2norm,
        A_log is not None, dt_bias is not None, table is not None,
    )  # fmt: skip
    NT = B * -(-T // BT) if table is None else table[0][0]
    rows = tma_rows(q), tma_rows(k), tma_rows(g), packed_rows(beta)
    # a copy of an operand would be given back while the kernel reads it, before the scan has its results' memory
    if beside and all(x.strides is not None for x in rows):
        config = replace(config, overlapped=True)
    else:
        beside = 0
    return Plan(
        config,
        rows,
        square=(B, T, HV, BT),
        norms=(B, T, H),
        totals=(NT, HV, DECAYS * K),
        ready=(HV, NT),
        scalars=(T, scale, lower_bound or 0.0, config.resources().ctas_per_sm * (of(at).sms - beside)),
        runs=NT * HV * B * T > 0,
    )


def launch(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: Tensor | None,
    ready: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """See :func:`fwd_intra`; on tensors whose facts are those that the plan was prepared from.

    ``ready``: int32, :attr:`Plan.ready`, where the scan follows.
    """
    import torch

    A = q.new_empty(plan.square)
    Aqk = torch.empty_like(A)
    q_rstd = k_rstd = None
    if plan.config.l2norm:
        q_rstd = q.new_empty(plan.norms, dtype=torch.float32)
        k_rstd = torch.empty_like(q_rstd)
    total = q.new_empty(plan.totals, dtype=torch.float32)
    if plan.runs:
        q_rows, k_rows, g_rows, beta_rows = plan.rows
        _compile(plan.config)(
            flattened(q, q_rows),
            flattened(k, k_rows),
            flattened(g, g_rows),
            flattened(beta, beta_rows),
            A_log,
            dt_bias,
            table,
            flat(A),
            flat(Aqk),
            None if q_rstd is None else flat(q_rstd),
            None if k_rstd is None else flat(k_rstd),
            total,
            ready,
            *plan.scalars,
        )
    return A, Aqk, q_rstd, k_rstd, total


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
    [B, T, H] fp32, None without ``l2norm``. total [NT, HV, 9 K] fp32: the decay of a chunk, of what of it comes
    before each block of 16 tokens (4 K) and of what comes after it (4 K); NT = B ceil(T / 64) or the rows of
    ``table``, of which those without tokens are not written. Runs on the current stream of the device.
    ValueError or TypeError for anything outside this.
    """
    given = q, k, g, beta, A_log, dt_bias, table
    plan = prepare(
        facts_of(*given), q.device, scale=scale, gate=gate, lower_bound=lower_bound, beta_mode=beta_mode,
        l2norm=l2norm,
    )  # fmt: skip
    return launch(plan, *given)

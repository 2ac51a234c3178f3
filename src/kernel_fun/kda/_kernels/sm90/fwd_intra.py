"""fwd_intra on Hopper: what the tokens of a chunk know of each other. An item: one chunk of one value head.

Maths, per item: tokens i, j of 64, channels c of K; q, k of head h = hv // G:

    q_rstd_i = rsqrt(sum_c q_ic^2 + 1e-6), k_rstd_i alike             fp32; 1 without l2norm
    a_ic     = exp(gate(g_ic))                                        fp32 in [0, 1]; 1 past the last token
    S[i, j]  = sum_c x_ic k_jc a_[j+1]c ... a_ic,  x = q or k         operands rounded to io, fp32 accumulators
    S_q[i,i] = sum_c q_ic k_ic                                        exact products, fp32 accumulators
    Aqk      = scale q_rstd_i k_rstd_j S_q                            rounded to io; 0 above the diagonal, of finite inputs
    L        = beta_i k_rstd_i k_rstd_j S_k, i > j                    fp32
    A        = (I + L)^-1                                             fp32, merges in tf32; rounded to io
    total_c  = products of a over the chunk, and over what of it comes before and after each
               16 tokens                                              fp32

Every factor of row i is made of decays of tokens that row i may see. How S comes about depends on the gate: as products
of decays, of any gate, :mod:`fwd_intra_products`; as their quotients, of one with a bound, :mod:`fwd_intra_quotients`.

Operands: q, k [tokens, H, K]; g [tokens, HV, K]; beta [tokens, HV]; A, Aqk [tokens, HV, 64];
rstds [tokens, H]; total [NT, HV, 9 K]; tokens = B T. Value heads are innermost in the order of items.

    tiles     64 tokens x 64 channels a pass, K / 64 passes     grid min(NT HV, resident)     threads 256
    passes    norms as diagonals of mma.sync; raw words to decays; operands over the warp's own raw rows
    blocks    warps 0-3: what is near the diagonal;  4-7: decays between blocks, and total
              warps 0-5: 16 x 16 blocks of S, the decays between times k's operand in registers;  6, 7: 16 x 16 inverses
    merges    16 -> 32 -> 64 by warps 0-3 while TMA brings the next item and 4-7 store Aqk, the rstds and
              ask for the next beta and dt_bias
    barriers  TMA full; CTA: operands, diagonals and P, L, A; of warps 0-3: X_32, T
    limit     words through shared memory: by count about 5100 of 128 bytes an item, three quarters of the clocks it takes;
              with quotients 3900

    smem      q, k, g         64 K each, in their dtypes, 128-byte swizzle
              L, then A       64 x 68 fp32
              Aqk             64 x 64 io, 16-byte units of row i permuted by i mod 8
              scales, beta    4 x 64 fp32, with quotients 7 x 64; dt_bias, A_log: K + 1
              D, between      8 K fp32: decay of each block of 8; 24 K / 2 words: P of each pair, two channels a word.
                              With quotients 4 K of blocks of 16, 6 K / 2
    files     what both forms of S share is :mod:`fwd_intra_scores`; where an item is, what is asked for of the next one
              and where results go, :mod:`fwd_intra_items`; the threads, their memory and their barriers,
              :mod:`fwd_intra_teams`
    regs      128, 2 CTAs an SM; beside the scan one CTA of two such teams, see :mod:`overlap`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kernel_fun._common.device import of
from kernel_fun._cute import trisolve
from kernel_fun._cute.compile import DTYPES, Program, jit, symbol, tensor
from kernel_fun._cute.decay import Gate
from kernel_fun._cute.tile import Tile, modes, without_batch
from kernel_fun._cute.warp import select
from kernel_fun.kda._kernels.sm90 import overlap
from kernel_fun.kda._kernels.sm90.chunk_inputs import facts_of
from kernel_fun.kda._kernels.sm90.fwd_intra_config import (
    BT,
    FAR,
    PASS,
    SOLVERS,
    THREADS,
    WARPS,
    Config,
    takes_quotients,
)
from kernel_fun.kda._kernels.sm90.fwd_intra_items import PLACE_WORDS, PLACES, Place
from kernel_fun.kda._kernels.sm90.fwd_intra_products import Products
from kernel_fun.kda._kernels.sm90.fwd_intra_quotients import LEAST_BOUND, Quotients
from kernel_fun.kda._kernels.sm90.fwd_intra_teams import Teams
from kernel_fun.kda._kernels.sm90.rows import (
    LAUNCHES_TAKE_LEAVES,
    TMA_BYTES,
    Rows,
    flat,
    flattened,
    packed_rows,
    tma_rows,
)
from kernel_fun.kda._kernels.sm90.scan_config import DECAYS

if TYPE_CHECKING:
    from torch import Tensor, device

    from kernel_fun.kda._kernels.sm90.chunk_inputs import Facts

ARCH = "sm_90a"


class KdaFwdIntraSm90(Teams):
    """The kernel of one config, but for the form of its scores."""

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
            scales: cute.struct.Align[cute.struct.MemRange[Float32, self.c.scales], 128]
            D: cute.struct.Align[cute.struct.MemRange[Float32, self.c.blocks * self.c.K], 128]
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
            *self.x_tile.loader(modes(mQ, 0, 2, 1)),
            *self.x_tile.loader(modes(mK, 0, 2, 1)),
            *self.g_tile.loader(modes(mG, 0, 2, 1)),
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
                self.begin()
                cute.arch.mbarrier_wait(full, phase)
                self.blank(valid)
                own = self.scores(gate, scale, valid)
                cute.arch.fence_view_async_shared()  # no more is written to the tiles before TMA does
                self.all_meet(st)
                self.put_block(*own)
                if self.warp < SOLVERS:
                    self.near(scale, valid)
                else:
                    chunk, hv = self.place[here + Place.CHUNK], self.place[here + Place.HV]
                    self.decays_between(mTotal[chunk, hv, None])
                ahead = self.first_operands()
                self.meet()
                if self.warp < FAR:
                    self.blocks(ahead)
                else:
                    trisolve.invert_blocks(self.L, self.warp - FAR, self.lane)
            self.all_meet(st)
            if self.warp == SOLVERS:
                self.fetch(then, full)
            asked = self.ask(then, mBeta, mA_log, mDt_bias)
            if valid > 0:
                if self.warp < SOLVERS:
                    self.solve()
                else:
                    self.store_Aqk(mAqk, here, valid)
                    if cutlass.const_expr(self.c.l2norm):
                        self.store_rstds(mQ_rstd, mK_rstd, here, valid)
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

    def gate(self, lower_bound: Float32) -> Gate:
        """The gate of the item's value head."""
        A_log = self.parameters[self.c.K] if self.c.has_A_log else None
        return Gate.of_head(self.c.gate, A_log, lower_bound)


class OfProducts(Products, KdaFwdIntraSm90):
    pass


class OfQuotients(Quotients, KdaFwdIntraSm90):
    pass


@jit(arch=ARCH)
def _compile(config: Config) -> Program:
    """Arguments of :class:`KdaFwdIntraSm90`; tokens B T, heads H and HV, chunks NT are run-time sizes."""
    tokens, H, HV, NT, K = symbol(), symbol(), symbol(), symbol(), config.K
    rstd = tensor("float32", 1, tokens, H, align=4) if config.l2norm else None
    return Program(
        (OfQuotients if config.quotients else OfProducts)(config),
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
    as_given: bool
    """The kernel takes the tensors themselves, where their addresses are TMA's."""
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
    dtypes = [str(x[2]).removeprefix("torch.") for x in (q, g, beta)]
    quotients = gate == "bounded" and lower_bound >= LEAST_BOUND and takes_quotients(*dtypes[:2], K)
    config = Config(
        *dtypes, K, gate, beta_mode, l2norm, A_log is not None, dt_bias is not None, table is not None,
        quotients=quotients,
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
        as_given=LAUNCHES_TAKE_LEAVES and all([x.as_given for x in rows]),
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

    A = q.new_empty(*plan.square)
    Aqk = torch.empty_like(A)
    q_rstd = k_rstd = None
    if plan.config.l2norm:
        q_rstd = q.new_empty(*plan.norms, dtype=torch.float32)
        k_rstd = torch.empty_like(q_rstd)
    total = q.new_empty(*plan.totals, dtype=torch.float32)
    if plan.runs:
        results = A, Aqk, q_rstd, k_rstd
        if not plan.as_given or (q.data_ptr() | k.data_ptr() | g.data_ptr()) % TMA_BYTES:
            q, k, g, beta = [flattened(x, rows) for x, rows in zip((q, k, g, beta), plan.rows)]
            results = [None if x is None else flat(x) for x in results]
        _compile(plan.config)(
            q, k, g, beta, A_log, dt_bias, table, *results, total, ready, *plan.scalars,
        )  # fmt: skip
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

"""bwd_grads on Hopper: every gradient of a chunk from the states on both its sides, an item per value head.

Per chunk of 64 tokens: q^, k^ are q, k times their rstd, S = h, dS = dh, M = A beta_j. A file for each phase says what it
computes, line by line:

    A  bwd_grads_values    what is contracted over values: dAqk, dM, dv, s, and of dq, dw, dk, dbeta the part that is
    B  bwd_grads_gate      the decays and their products by eights of tokens
       bwd_grads_chunk     through A: dAkk and rk from dM and dw; Q and B, operands of the sweeps
    C  bwd_grads_sweeps    dq, dk, dg of the tokens of the chunk from each other
    D  bwd_grads_finish    the derivatives of gate, norm and beta: dq, dk, dg, dbeta, sums for dA_log and d dt_bias

bwd_grads_math runs them on what a thread keeps of its place, bwd_grads_thread; bwd_grads_moves is LOAD and STORE. Sizes
are in bwd_grads_config, WGMMA in bwd_grads_products. Shares of value heads in dq and dk are added by bwd_grads_reduce.

Rows past the last token: q = k = v = do = v_new = dv2 = A = beta = 0 and no decay, by selection; not stored. Before the
first token of a chunk with S = 0, dl is 0.

Modes in global memory: q, k, g, A, v, do, v_new, dv2 (tokens, D, heads); h, dh (K, V, HV, chunks).

    tiles      64 tokens, 128 channels (K = 64 is padded with zeros), 64 values a turn
    grid       a CTA an SM, items in turn, value heads of a chunk adjacent
    role       warps    registers   does
    MATH       0-7      240         A..D; a warpgroup owns 64 channels, a warp 16, tokens on the other axis;
                                    the gate: a thread owns two channels of 16 tokens
    LOAD       8-10     24          ring; A and g; q and k of the items, a warp each
    STORE      11       24          dq, dk, dg of whole chunks
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
from kernel_fun._cute.pipe import Pipe
from kernel_fun._cute.tile import Tile, modes, storage, vector, without_batch
from kernel_fun.kda._kernels.sm90.bwd_grads_config import (
    BT,
    BV,
    CHANNELS,
    LOAD,
    MATH,
    STORE,
    THREADS,
    TOKEN_VECTORS,
    Config,
)
from kernel_fun.kda._kernels.sm90.bwd_grads_math import Math
from kernel_fun.kda._kernels.sm90.bwd_grads_moves import load_ring, load_tiles, store_tiles
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


class KdaBwdGradsSm90(Math):
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
        self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mG: cute.Tensor, mBeta: cute.Tensor, mA: cute.Tensor,
        mQ_rstd, mK_rstd, mH: cute.Tensor, mV_new: cute.Tensor, mDh: cute.Tensor, mDv2: cute.Tensor, mDo: cute.Tensor,
        mA_log, mDt_bias, mTable, mDq: cute.Tensor, mDk: cute.Tensor, mDv: cute.Tensor, mDg: cute.Tensor,
        mDbeta: cute.Tensor, mDA, mDbias, T: Int32, ctas: Int32, scale: Float32, lower_bound: Float32, stream: Any,
    ):  # fmt: skip
        self.Storage = self.storage()
        mQ, mK, mV, mG, mBeta, mA, mV_new, mDv2, mDo, mDq, mDk, mDv, mDg, mDbeta = [
            without_batch(x)
            for x in (mQ, mK, mV, mG, mBeta, mA, mV_new, mDv2, mDo, mDq, mDk, mDv, mDg, mDbeta)
        ]
        if cutlass.const_expr(self.c.l2norm):
            mQ_rstd, mK_rstd = without_batch(mQ_rstd), without_batch(mK_rstd)
        rows = lambda mX: modes(mX, 0, 2, 1)
        states = lambda mX: modes(mX, 2, 3, 1, 0)
        dqks = None
        if cutlass.const_expr(not self.c.shared):
            dqks = tuple([self.x.storer(rows(x)) for x in (mDq, mDk)])
        self.kda_bwd_grads_sm90(
            tuple([self.x.loader(rows(x)) for x in (mQ, mK)]),
            self.raw_g.loader(rows(mG)),
            self.square.loader(rows(mA)),
            tuple([self.state.loader(states(x)) for x in (mH, mDh)]),
            tuple([self.row.loader(rows(x)) for x in (mDo, mV_new, mDv2, mV)]),  # as DO, V_NEW, DV2, V
            dqks,
            self.raw_g.storer(rows(mDg)),
            mBeta,
            (mQ_rstd, mK_rstd),
            (mA_log, mDt_bias),
            mTable,
            (mDq, mDk, mDv, mDg, mDbeta, mDA, mDbias),
            (T, mH.shape[0] * mH.shape[1], mH.shape[1], mH.shape[1] // mQ.shape[1], mV.shape[2] // BV),
            (scale, lower_bound),
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kda_bwd_grads_sm90(
        self, qks, g, A, states, rows, dqks, dg, mBeta: cute.Tensor, mRstds, parameters, mTable, results, sizes, scalars,
    ):  # fmt: skip
        """``qks`` to ``rows``: TMA atoms and what they load from; ``dqks``, ``dg``: what they store to."""
        T, items, HV, G, NV = sizes
        st = SmemAllocator().allocate(self.Storage)
        ring, qk, gates, one = (getattr(self, x).bind(getattr(st, x)) for x in ("ring", "qk", "gates", "one"))
        out_qk, out_g = self.out.bind(st.out_qk), self.out.bind(st.out_g)
        pipe.start()
        warp_index = pipe.index_of_warp()
        if warp_index < MATH.warps:
            pipe.take_registers(MATH, pipe.registers_at_entry(THREADS))
            rings, outs = (ring, qk, gates, one), (out_qk, out_g)
            self.math(st, rings, outs, mBeta, mRstds, parameters, mTable, results, sizes, scalars)
        else:
            pipe.take_registers(LOAD, pipe.registers_at_entry(THREADS))
            of_qk = lambda moved: [(*x, self.x, field) for x, field in zip(moved, (st.q, st.k))]
            of_g = lambda moved: [(*moved, self.raw_g, st.g)]
            if warp_index == LOAD.first_warp:
                of_states = [(*x, self.state, st.state) for x in states]
                of_rows = [(*x, self.row, st.row) for x in rows]
                load_ring(ring, of_states, of_rows, mTable, T, items, HV, NV)
            elif warp_index == LOAD.first_warp + 1:
                of_A = [(*A, self.square, st.A)]
                load_tiles(one, of_A, gates, of_g(g), mTable, T, items, HV, Int32(1))
            elif warp_index == LOAD.first_warp + 2:
                load_tiles(qk, of_qk(qks), qk, [], mTable, T, items, HV, G)
            elif warp_index == STORE.first_warp:
                of = of_qk(dqks) if cutlass.const_expr(not self.c.shared) else []
                store_tiles(out_qk, qk, of, out_g, gates, of_g(dg), mTable, T, items, HV)


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
        dq, dk = fresh(*plan.shares, dtype=f32), fresh(*plan.shares, dtype=f32)
    else:
        dq, dk = like(q), like(k)
    dv, dg, dbeta = like(v), like(g), like(beta)
    dA = fresh(*plan.chunks[:2], dtype=f32) if c.has_A_log else None
    dbias = fresh(*plan.chunks, dtype=f32) if c.has_dt_bias else None
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

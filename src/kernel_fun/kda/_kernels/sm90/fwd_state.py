"""fwd_state on Hopper: the recurrence over chunks, and the output.

One CTA walks the chunks of one sequence and value head for BV columns of V, with the transposed state S^T [V, K] in
fp32 registers. Per chunk of BT = 64 tokens, with qE, kE = io(-beta k^ E) and kR of :mod:`operands`, every product
accumulated in fp32:

    t     = io(beta v + kE S)              [BT, V]; the accumulator is preset to beta v
    v_new = io(A t)                        A [BT, BT] io
    o     = io(qE S + Aqk v_new)           io(S) is the operand, and what h keeps
    S     = total S + kR^T v_new

Everything runs transposed, so that the state and then t, v_new are the register A operand of WGMMA, 64 rows of V a
warpgroup. Rows past the end of a sequence: a = 1 and q = k = v = A = beta = 0, by selection; their o and v_new are not
stored. Without o, as the backward rescans, neither q nor Aqk is read.

Modes in global memory: q, k, g, A, Aqk (T, D, heads, B); v, o, v_new (V, T, heads, B); h (V, K, heads, NT).

    tiles      BT=64  K  BV=128 or 64, see v_tile()       grid (V/BV, HV, N) flattened, V tiles adjacent
    role       warps          does
    BUILD      0..K/16-1      qE, kE, kR in place; :mod:`operands`
    STATE      next BV/16     t, v_new, o, S; stores o, v_new, h; its first warp issues the loads; :mod:`fwd_state_walk`
    pipe       writer -> readers          holds
    raw        TMA -> BUILD, STATE        q, k, g of a chunk; freed by STATE
    built      BUILD -> STATE             the same slots once they hold qE, kR, kE
    row        TMA -> STATE               v, A, Aqk, total; freed by STATE

Beside fwd_intra, see :mod:`overlap`, raw of a chunk is asked for once fwd_intra has written the chunk after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cutlass import Float32, const_expr, cute

from kernel_fun._common.device import of
from kernel_fun._cute import pipe
from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.compile import Program, jit, symbol
from kernel_fun._cute.pipe import WARPGROUP, Pipe
from kernel_fun._cute.tile import Tile, dims_first, storage, tma_parts, tokens_first, vector
from kernel_fun.kda._kernels.sm90 import overlap
from kernel_fun.kda._kernels.sm90.chunk_inputs import (
    ChunkTensors,
    check,
    check_addresses,
    check_chunk_inputs,
    chunk_facts,
    facts_of,
    v_tile,
)
from kernel_fun.kda._kernels.sm90.fwd_state_walk import Walk
from kernel_fun.kda._kernels.sm90.operands import Builder
from kernel_fun.kda._kernels.sm90.rows import uninitialised, zeros
from kernel_fun.kda._kernels.sm90.scan_config import BT, ROWS, Chain, ScanConfig
from kernel_fun.kda._kernels.sm90.scan_loads import Loads

if TYPE_CHECKING:
    from torch import Tensor, device


@dataclass(frozen=True, kw_only=True)
class Config(ScanConfig):
    """Static facts of one compiled kernel."""

    has_h0: bool = False
    want_o: bool = True
    want_ht: bool = False
    want_h: bool = False
    want_v_new: bool = False
    overlapped: bool = False
    """It runs beside fwd_intra, see :mod:`overlap`."""
    leads: bool = False
    """bwd_state may run beside it."""

    def __post_init__(self) -> None:
        if not (self.want_o or self.want_ht or self.want_h or self.want_v_new):
            raise ValueError("one of `want_o`, `want_ht`, `want_h` and `want_v_new` must be True, got none")
        super().__post_init__()

    @property
    def reads_q(self) -> bool:
        return self.want_o

    @property
    def squares(self) -> int:
        return 1 + self.want_o

    @property
    def out_bytes(self) -> int:
        return 2 * self.BV * (BT * (self.want_o + self.want_v_new) + self.K * self.want_h)


class KdaFwdStateSm90(Walk):
    """The kernel of one config. Its roles are :meth:`Builder.run` and :meth:`walk`; E and R are views of the slots of g
    and k once BUILD has written kE and kR there."""

    def __init__(self, config: Config) -> None:
        self.config = c = config
        raw, row = c.raw_stages, c.row_stages
        self.builder = b = Builder(c, reverse=False, follows=c.overlapped)
        self.io = io = b.io
        self.R = Tile(io, c.K, BT, raw, rows_contiguous=True)
        self.A = Tile(io, BT, BT, row)
        self.V = Tile(io, c.BV, BT, row, rows_contiguous=True)
        self.O = Tile(io, ROWS, BT, c.holders, rows_contiguous=True)
        self.H = Tile(io, ROWS, c.K, c.holders, rows_contiguous=True)
        self.padded = (("v", self.V), ("A", self.A))
        row_bytes = self.V.stage_bytes + (1 + c.want_o) * self.A.stage_bytes + 4 * c.K
        self.row = Pipe(row, c.state, (c.state,), tx_bytes=row_bytes)

    def storage(self) -> Any:
        c, b = self.config, self.builder
        optional = (
            (c.want_o, "Aqk", self.A),
            (c.want_o, "o", self.O),
            (c.want_v_new, "v_new", self.O),
            (c.want_h, "h", self.H),
        )
        return storage(
            raw=b.raw.field(),
            built=b.built.field(),
            row=self.row.field(),
            total=vector(Float32, c.K * c.row_stages),
            **b.fields(),
            v=self.V.field(),
            A=self.A.field(),
            **{name: tile.field() for wanted, name, tile in optional if wanted},
        )

    @cute.jit
    def __call__(
        self, mQ, mK: cute.Tensor, mV: cute.Tensor, mG: cute.Tensor, mBeta: cute.Tensor, mA: cute.Tensor, mAqk, mQr,
        mKr, mTotal: cute.Tensor, mH0, mALog, mBias, mCu, mFirst, mReady, mO, mHt, mH, mVn, scale: Float32,
        lower_bound: Float32, stream,
    ):  # fmt: skip
        c = self.config
        self.Storage = self.storage()
        N = mCu.shape[0] - 1 if const_expr(c.is_packed) else mV.shape[0]
        T, HV, NV = mV.shape[1], mV.shape[2], mV.shape[3] // c.BV
        states = [0, 1, 3, 2] if const_expr(not c.state_v_first) else [0, 1, 2, 3]
        vk = lambda m: cute.make_tensor(m.iterator, cute.select(m.layout, states))
        rows_out = lambda m: (*self.O.storer(dims_first(m)), dims_first(m))
        states_out = lambda m: self.H.storer(
            cute.make_tensor(m.iterator, cute.select(m.layout, [3, 2, 1, 0]))
        )
        self.kda_fwd_state_sm90(
            self.builder.atoms(mQ, mK, mG),
            self.V.loader(dims_first(mV)),
            self.A.loader(tokens_first(mA)),
            self.A.loader(tokens_first(mAqk)) if const_expr(c.want_o) else None,
            rows_out(mO) if const_expr(c.want_o) else None,
            rows_out(mVn) if const_expr(c.want_v_new) else None,
            states_out(mH) if const_expr(c.want_h) else None,
            mBeta,
            (mQr, mKr),
            mTotal,
            vk(mH0) if const_expr(c.has_h0) else None,
            vk(mHt) if const_expr(c.want_ht) else None,
            (mALog, mBias),
            (mCu, mFirst),
            mReady,
            (scale, lower_bound),
            (T, NV, HV, HV // mK.shape[2]),
        ).launch(
            grid=(NV * HV * N, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=c.overlapped,
        )

    @cute.kernel
    def kda_fwd_state_sm90(
        self, raws, tmaV, tmaA, tmaAqk, outO, outVn, outH, mBeta: cute.Tensor, mRstds, mTotal, mH0, mHt, parameters,
        tables, mReady, scalars, sizes,
    ):  # fmt: skip
        c = self.config
        mCu, mFirst = tables
        T, NV, HV, G = sizes
        scale, lower_bound = scalars
        st = SmemAllocator().allocate(self.Storage)
        rings = self.builder.raw.bind(st.raw), self.builder.built.bind(st.built), self.row.bind(st.row)
        if const_expr(c.leads):
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(c.overlapped):
            overlap.begin()
        pipe.start()

        x = cute.arch.block_idx()[0]
        vt, hv = x % NV, x // NV % HV
        chain = Chain.of(x // NV // HV, T, mCu, mFirst)
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        entry = pipe.registers_at_entry(c.threads)
        if warpgroup < c.builders:
            pipe.take_registers(c.build, entry)
            rows = mBeta, *mRstds, chain.b, chain.start, hv, hv // G
            self.builder.run(
                st, rings, self.padded, rows, cute.domain_offset((chain.first, 0), mTotal[None, hv, None]),
                self.builder.head(parameters, hv, lower_bound), scale, chain.length, chain.NT,
            )  # fmt: skip
        else:
            pipe.take_registers(c.state, entry)
            half = warpgroup - c.builders
            tile = vt * c.holders + half
            gV = cute.domain_offset((0, chain.start), tmaV[1][None, None, hv, chain.b])
            gV = cute.local_tile(gV, self.V.shape, (vt, None))
            more = [
                (tmaV[0], *tma_parts(tmaV[0], gV, self.V.view(st.v))),
                chain.load(*tmaA, hv, self.A, st.A),
            ]
            if const_expr(c.want_o):
                more += [chain.load(*tmaAqk, hv, self.A, st.Aqk)]
            gAround = cute.domain_offset((chain.first, 0), mTotal[None, hv, None])
            gTotal = cute.make_tensor(
                gAround.iterator, cute.make_layout((gAround.shape[0], c.K), stride=gAround.stride)
            )
            sTotal = st.total.get_tensor(cute.make_layout((c.K, c.row_stages)))
            cols = lambda m: cute.local_tile(
                cute.domain_offset((0, chain.start), m[None, None, hv, chain.b]), (ROWS, BT), (tile, None)
            )
            rows_to = lambda out, field: (
                out[0], cols(out[1]), self.O.view(field)[None, None, half],
                cols(out[2]) if const_expr(c.is_packed) else None,
            )  # fmt: skip
            state = lambda m: cute.local_tile(m[chain.n, hv, None, None], (ROWS, c.K), (tile, 0))
            o = v_new = h = None
            if const_expr(c.want_o):
                o = rows_to(outO, st.o)
            if const_expr(c.want_v_new):
                v_new = rows_to(outVn, st.v_new)
            if const_expr(c.want_h):
                gH = cute.domain_offset((0, 0, chain.first), outH[1][None, None, hv, None])
                gH = cute.local_tile(gH, (ROWS, c.K), (tile, 0, None))
                h = outH[0], gH, self.H.view(st.h)[None, None, half], None
            ready = None
            if const_expr(c.overlapped):
                at = lambda head: overlap.address(mReady, head, chain.first)
                ready = at(hv), at(hv // G * G), chain.NT
            loads = Loads(self.builder.loads(chain, raws, st, hv, G), more, gTotal, sTotal, gAround)
            self.walk(
                st, rings, loads, ready, (o, v_new, h),
                state(mH0) if const_expr(c.has_h0) else None, state(mHt) if const_expr(c.want_ht) else None,
                half, chain.length, chain.NT,
            )  # fmt: skip


@jit(arch="sm_90a")
def _compile(config: Config) -> Program:
    """Fake tensors in the order of :meth:`KdaFwdStateSm90.__call__`; an absent operand is None."""
    c = config
    V, N = symbol(), symbol()
    states = (N, "HV", V, c.K) if c.state_v_first else (N, "HV", c.K, V)
    x = ChunkTensors(c)
    opt = lambda use, *args: x.tensor(*args) if use else None
    q, k, g, beta, A, Aqk, q_rstd, k_rstd, total = x.inputs()
    values = c.io, "B", "T", "HV", V
    return Program(
        KdaFwdStateSm90(c),
        (
            q if c.want_o else None,
            k,
            x.tensor(*values),
            g,
            beta,
            A,
            Aqk if c.want_o else None,
            q_rstd,
            k_rstd,
            total,
            opt(c.has_h0, "float32", *states),
            *x.parameters(),
            x.tensor("int32", "HV", "NT", align=4) if c.overlapped else None,
            opt(c.want_o, *values),
            opt(c.want_ht, "float32", *states),
            opt(c.want_h, c.io, "NT", "HV", c.K, V),
            opt(c.want_v_new, *values),
            Float32(1.0),
            Float32(1.0),
        ),
    )


@dataclass(frozen=True)
class Plan:
    """What a call's shapes, strides, dtypes and flags decide: the kernel, and the shapes of its results."""

    config: Config
    states: tuple[int, ...]
    chunks: tuple[int, ...]
    scalars: tuple[float, float]
    """Scale and lower bound, the last arguments of the kernel."""
    runs: bool


NAMES = ("q", "k", "v", "g", "A", "Aqk", "total", "h0")
"""What TMA or wide loads read."""


@lru_cache(maxsize=512)
def prepare(
    facts: tuple[Any, ...], at: device, *, scale: float, gate: str, lower_bound: float | None, beta_mode: str, l2norm: bool,
    state_v_first: bool, want_ht: bool, want_h: bool, want_v_new: bool, want_o: bool, overlapped: bool = False,
    leads: bool = False,
) -> Plan:  # fmt: skip
    """Everything about a launch but addresses. ValueError or TypeError names the argument that does not fit.

    ``overlapped``: beside fwd_intra, of dense sequences; ``leads``: bwd_state follows. See :mod:`overlap`.
    """
    import torch

    q, k, v, g, beta, A, Aqk, q_rstd, k_rstd, total, h0, A_log, dt_bias, cu_seqlens, first_chunks = facts
    N, NT = check_chunk_inputs(
        q, k, g, beta, A, Aqk, q_rstd, k_rstd, total, A_log, dt_bias, cu_seqlens, first_chunks,
        gate=gate, has_bound=lower_bound is not None, l2norm=l2norm,
    )  # fmt: skip
    (B, T, _, K), HV, V = q[0], A[0][2], v[0][-1]
    check("v", v, (B, T, HV, V), (q[2],), 16)
    if V % ROWS:
        raise ValueError(f"V must be a multiple of {ROWS}, got {V}")
    states = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    if h0 is not None:
        check("h0", h0, states, (torch.float32,), 16)
    config = Config(
        **chunk_facts(q, g, beta, A_log, dt_bias, cu_seqlens, gate=gate, beta_mode=beta_mode, l2norm=l2norm),
        BV=_v_tile(N * HV, V, of(at).sms, wide=g[2] is torch.float32 and want_o and (want_h or want_v_new)),
        state_v_first=state_v_first,
        has_h0=h0 is not None,
        want_o=want_o,
        want_ht=want_ht,
        want_h=want_h,
        want_v_new=want_v_new,
        overlapped=overlapped,
        leads=leads,
    )
    scalars = scale, lower_bound or 0.0
    return Plan(config, states, (NT, HV, K, V), scalars, B * T * HV * V * N > 0)


def _v_tile(chains: int, V: int, sms: int, *, wide: bool) -> int:
    """BV from counts alone; ``wide``: fp32 g, o and kept states together leave no room for 128."""
    return 64 if wide else v_tile(chains, V, sms)


def launch(
    plan: Plan,
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
    cu_seqlens: Tensor | None,
    first_chunks: Tensor | None,
    ready: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """See :func:`fwd_state`; on tensors whose facts are those that the plan was prepared from, and whose
    addresses TMA can take. ``ready``: of fwd_intra, launched just before, where it is overlapped."""
    import torch

    config, output = plan.config, uninitialised if cu_seqlens is None else zeros
    o = output(v) if config.want_o else None
    v_new = output(v) if config.want_v_new else None
    ht = v.new_empty(*plan.states, dtype=torch.float32) if config.want_ht else None
    h = v.new_empty(*plan.chunks) if config.want_h else None
    if plan.runs:
        if not config.l2norm:
            q_rstd = k_rstd = None
        _compile(config)(
            q if config.want_o else None, k, v, g, beta, A, Aqk if config.want_o else None, q_rstd, k_rstd, total, h0,
            A_log, dt_bias, cu_seqlens, first_chunks, ready, o, ht, h, v_new, *plan.scalars,
        )  # fmt: skip
    elif ht is not None:
        ht.copy_(h0) if h0 is not None else ht.zero_()
    return o, ht, h, v_new


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
    want_o: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The recurrence over chunks, and the output.

    q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``, g ``[B, T, HV, K]``, beta ``[B, T, HV]``: the caller's own, io
    dtype bf16 or fp16; g and beta may be fp32. A, Aqk ``[B, T, HV, 64]`` io, scale in Aqk; q_rstd, k_rstd
    ``[B, T, H]`` fp32 with ``l2norm``, else None; total ``[NT, HV, 9 K]`` fp32, as fwd_intra gives it. h0 ``[N, HV, K, V]`` fp32
    (``[N, HV, V, K]`` with ``state_v_first``) or None for zeros. A_log ``[HV]``, dt_bias ``[HV, K]`` fp32 or
    None for zeros; not read by gate "log". ``table``: None for a dense batch, else (cu_seqlens ``[N + 1]`` int32
    or int64, first chunk of each sequence ``[N + 1]`` int32).

    Returns o ``[B, T, HV, V]`` io, zero outside every sequence; ht fp32 in the layout of h0; h
    ``[NT, HV, K, V]`` io, the state at the start of each chunk (rows past the last chunk of a packing are not
    written); v_new ``[B, T, HV, V]`` io. Those not wanted are None; one must be wanted. ValueError or
    TypeError names the argument that does not fit.
    """
    if gate == "log":
        A_log = dt_bias = None
    given = q, k, v, g, beta, A, Aqk, q_rstd, k_rstd, total, h0, A_log, dt_bias, *(table or (None, None))
    plan = prepare(
        facts_of(*given), q.device, scale=scale, gate=gate, lower_bound=lower_bound, beta_mode=beta_mode, l2norm=l2norm,
        state_v_first=state_v_first, want_ht=want_ht, want_h=want_h, want_v_new=want_v_new, want_o=want_o,
    )  # fmt: skip
    check_addresses(NAMES, (q, k, v, g, A, Aqk, total, h0))
    return launch(plan, *given)

"""bwd_state on Hopper: the recurrence over chunks in reverse.

One CTA walks the chunks of one sequence and value head from the last to the first for BV columns of V, with
the transposed gradient of the state dS^T [V, K] in fp32 registers. Per chunk of BT = 64 tokens, with qE, kE =
io(-beta k^ E) and kR of :mod:`operands`, every product accumulated in fp32:

    dh  = io(dS)                            the chunk's output, before its update
    dv2 = io(Aqk^T do + kR io(dS))          [BT, V]; Aqk, A [BT, BT] io
    y   = io(A^T dv2)                       [BT, V]
    dS  = total dS + qE^T do + kE^T y

Everything runs transposed, so that do, the state, dv2 and y are the register A operand (64 rows of V a
warpgroup). Rows past the end of a sequence: a = 1 and q = k = do = A = Aqk = beta = 0, by selection; their
dv2 is not stored. Of a run of tokens whose gradient is only passed on, dh and dv2 are not wanted: dh0 alone.

Modes in global memory: q, k, g, A, Aqk (T, D, heads, B); do, dv2 (V, T, heads, B); dh (V, K, heads, NT).

    tiles      BT=64  K  BV=128 or 64, see v_tile()       grid (V/BV, HV, N) flattened, V tiles adjacent
    role       warps          does
    BUILD      0..K/16-1      qE, kE, kR in place; :mod:`operands`
    STATE      next BV/16     dv2, y, dS; stores dh, dv2; its first warp issues the loads; :mod:`bwd_state_walk`
    pipe       writer -> readers          holds
    raw        TMA -> BUILD, STATE        q, k, g of a chunk; freed by STATE
    built      BUILD -> STATE             the same slots once they hold qE, kR, kE
    row        TMA -> STATE               do, A, Aqk, total; freed once dv2, staged over do, has left
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
from kernel_fun.kda._kernels.sm90.bwd_state_walk import BLOCK, Walk
from kernel_fun.kda._kernels.sm90.chunk_inputs import (
    ChunkTensors,
    check,
    check_addresses,
    check_chunk_inputs,
    chunk_facts,
    facts_of,
    v_tile,
)
from kernel_fun.kda._kernels.sm90.operands import Builder
from kernel_fun.kda._kernels.sm90.scan_config import BT, ROWS, Chain, ScanConfig
from kernel_fun.kda._kernels.sm90.scan_loads import Loads

if TYPE_CHECKING:
    from torch import Tensor, device


@dataclass(frozen=True, kw_only=True)
class Config(ScanConfig):
    """Static facts of one compiled kernel."""

    has_do: bool = True
    has_dht: bool = False
    want_dh: bool = True
    """And dv2; else only dh0."""
    want_dh0: bool = False
    overlapped: bool = False
    """It runs beside the rescan of fwd_state, see :mod:`overlap`."""

    def __post_init__(self) -> None:
        if not (self.want_dh or self.want_dh0):
            raise ValueError("one of `want_dh` and `want_dh0` must be True, got neither")
        super().__post_init__()

    @property
    def reads_beta(self) -> bool:
        return False

    @property
    def squares(self) -> int:
        return 2

    @property
    def out_bytes(self) -> int:
        return 2 * self.BV * BLOCK * self.want_dh


class KdaBwdStateSm90(Walk):
    """The kernel of one config. Its roles are :meth:`Builder.run` and :meth:`walk`."""

    def __init__(self, config: Config) -> None:
        self.config = c = config
        row = c.row_stages
        self.builder = b = Builder(c, reverse=True)
        self.io = io = b.io
        self.A = Tile(io, BT, BT, row)
        self.At = Tile(io, BT, BT, row, rows_contiguous=True)
        self.D = Tile(io, c.BV, BT, row, rows_contiguous=True)
        self.V = Tile(io, ROWS, BT, row * c.holders, rows_contiguous=True)
        self.H = Tile(io, ROWS, BLOCK, c.holders, rows_contiguous=True)
        self.padded = (("A", self.A), *((("do", self.D), ("Aqk", self.A)) if c.has_do else ()))
        self.Qt = Tile(io, c.K, BT, c.raw_stages, rows_contiguous=True)
        self.Et = Tile(io, c.K, BT, c.raw_stages, rows_contiguous=True, pitch_bytes=b.G.stage_bytes)
        row_bytes = self.A.stage_bytes + 4 * c.K
        if c.has_do:
            row_bytes += self.D.stage_bytes + self.A.stage_bytes
        self.row = Pipe(row, c.state, (c.state,), tx_bytes=row_bytes)

    def storage(self) -> Any:
        c, b = self.config, self.builder
        return storage(
            raw=b.raw.field(),
            built=b.built.field(),
            row=self.row.field(),
            total=vector(Float32, c.K * c.row_stages),
            **b.fields(),
            do=self.D.field(),
            A=self.A.field(),
            Aqk=self.A.field(),
            **({"dh": self.H.field()} if c.want_dh else {}),
        )

    @cute.jit
    def __call__(
        self, mQ: cute.Tensor, mK: cute.Tensor, mG: cute.Tensor, mBeta: cute.Tensor, mA: cute.Tensor,
        mAqk: cute.Tensor, mQr, mKr, mTotal: cute.Tensor, mDo, mDht, mALog, mBias, mCu, mFirst,
        mDh, mDv, mDh0, scale: Float32, lower_bound: Float32, stream,
    ):  # fmt: skip
        c = self.config
        self.Storage = self.storage()
        N = mCu.shape[0] - 1 if const_expr(c.is_packed) else mA.shape[0]
        states = [0, 1, 3, 2] if const_expr(not c.state_v_first) else [0, 1, 2, 3]
        vk = lambda m: cute.make_tensor(m.iterator, cute.select(m.layout, states))
        chunks = lambda m: cute.make_tensor(m.iterator, cute.select(m.layout, [3, 2, 1, 0]))
        V = mDv.shape[3] if const_expr(c.want_dh) else vk(mDh0).shape[2]
        T, HV, NV = mA.shape[1], mA.shape[2], V // c.BV
        self.kda_bwd_state_sm90(
            self.builder.atoms(mQ, mK, mG),
            self.A.loader(tokens_first(mA)),
            self.A.loader(tokens_first(mAqk)),
            self.D.loader(dims_first(mDo)) if const_expr(c.has_do) else None,
            self.H.storer(chunks(mDh)) if const_expr(c.want_dh) else None,
            (*self.V.storer(dims_first(mDv)), dims_first(mDv)) if const_expr(c.want_dh) else None,
            mBeta,
            (mQr, mKr),
            mTotal,
            vk(mDht) if const_expr(c.has_dht) else None,
            vk(mDh0) if const_expr(c.want_dh0) else None,
            (mALog, mBias),
            (mCu, mFirst),
            (scale, lower_bound),
            (T, NV, HV, HV // mQ.shape[2]),
        ).launch(
            grid=(NV * HV * N, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=c.overlapped,
        )

    @cute.kernel
    def kda_bwd_state_sm90(
        self, raws, tmaA, tmaAqk, tmaDo, outDh, outDv, mBeta: cute.Tensor, mRstds, mTotal, mDht, mDh0, parameters,
        tables, scalars, sizes,
    ):  # fmt: skip
        c = self.config
        mCu, mFirst = tables
        T, NV, HV, G = sizes
        scale, lower_bound = scalars
        st = SmemAllocator().allocate(self.Storage)
        rings = self.builder.raw.bind(st.raw), self.builder.built.bind(st.built), self.row.bind(st.row)
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
            more = [chain.load(*tmaA, hv, self.A, st.A)]
            if const_expr(c.has_do):
                gDo = cute.domain_offset((0, chain.start), tmaDo[1][None, None, hv, chain.b])
                gDo = cute.local_tile(gDo, self.D.shape, (vt, None))
                more += [
                    (tmaDo[0], *tma_parts(tmaDo[0], gDo, self.D.view(st.do))),
                    chain.load(*tmaAqk, hv, self.A, st.Aqk),
                ]
            gAround = cute.domain_offset((chain.first, 0), mTotal[None, hv, None])
            gTotal = cute.make_tensor(
                gAround.iterator, cute.make_layout((gAround.shape[0], c.K), stride=gAround.stride)
            )
            sTotal = st.total.get_tensor(cute.make_layout((c.K, c.row_stages)))
            cols = lambda m: cute.local_tile(
                cute.domain_offset((0, chain.start), m[None, None, hv, chain.b]), (ROWS, BT), (tile, None)
            )
            state = lambda m: cute.local_tile(m[chain.n, hv, None, None], (ROWS, c.K), (tile, 0))
            dh = dv2 = gDh = None
            if const_expr(c.want_dh):
                gDh = cute.domain_offset((0, 0, chain.first), outDh[1][None, None, hv, None])
                gDh = cute.local_tile(gDh, self.H.shape, (tile, None, None))
            loads = Loads(self.builder.loads(chain, raws, st, hv, G), more, gTotal, sTotal, gAround)
            if const_expr(c.want_dh):
                dh = outDh[0], gDh
                dv2 = outDv[0], cols(outDv[1]), cols(outDv[2]) if const_expr(c.is_packed) else None
            self.walk(
                st, rings, loads, dh, dv2,
                state(mDht) if const_expr(c.has_dht) else None, state(mDh0) if const_expr(c.want_dh0) else None,
                half, chain.length, chain.NT,
            )  # fmt: skip


@jit(arch="sm_90a")
def _compile(config: Config) -> Program:
    """Fake tensors in the order of :meth:`KdaBwdStateSm90.__call__`; an absent operand is None."""
    c = config
    V, N = symbol(), symbol()
    states = (N, "HV", V, c.K) if c.state_v_first else (N, "HV", c.K, V)
    x = ChunkTensors(c)
    opt = lambda use, *args: x.tensor(*args) if use else None
    return Program(
        KdaBwdStateSm90(c),
        (
            *x.inputs(),
            opt(c.has_do, c.io, "B", "T", "HV", V),
            opt(c.has_dht, "float32", *states),
            *x.parameters(),
            opt(c.want_dh, c.io, "NT", "HV", c.K, V),
            opt(c.want_dh, c.io, "B", "T", "HV", V),
            opt(c.want_dh0, "float32", *states),
            Float32(1.0),
            Float32(1.0),
        ),
    )


@dataclass(frozen=True)
class Plan:
    """What a call's shapes, strides, dtypes and flags decide: the kernel, and the shapes of its results."""

    config: Config
    values: tuple[int, ...]
    chunks: tuple[int, ...]
    states: tuple[int, ...]
    scalars: tuple[float, float]
    """Scale and lower bound, the last arguments of the kernel."""
    runs: bool


NAMES = ("q", "k", "g", "A", "Aqk", "total", "do", "dht")
"""What TMA or wide loads read."""


@lru_cache(maxsize=512)
def prepare(
    facts: tuple[Any, ...], at: device, *, scale: float, gate: str, lower_bound: float | None, beta_mode: str, l2norm: bool,
    state_v_first: bool, want_dh0: bool, want_dh: bool = True, overlapped: bool = False,
) -> Plan:  # fmt: skip
    """Everything about a launch but addresses. ValueError or TypeError names the argument that does not fit.

    ``overlapped``: beside the rescan of dense sequences, see :mod:`overlap`.
    """
    import torch

    q, k, g, beta, A, Aqk, q_rstd, k_rstd, total, do, dht, A_log, dt_bias, cu_seqlens, first_chunks = facts
    N, NT = check_chunk_inputs(
        q, k, g, beta, A, Aqk, q_rstd, k_rstd, total, A_log, dt_bias, cu_seqlens, first_chunks,
        gate=gate, has_bound=lower_bound is not None, l2norm=l2norm,
    )  # fmt: skip
    (B, T, _, K), HV = q[0], A[0][2]
    if do is not None:
        V = do[0][-1]
    elif dht is not None:
        V = dht[0][-2 if state_v_first else -1]
    else:
        raise ValueError("`do` or `dht` must be given, got None for both")
    if V % ROWS:
        raise ValueError(f"V must be a multiple of {ROWS}, got {V}")
    states = (N, HV, V, K) if state_v_first else (N, HV, K, V)
    if do is not None:
        check("do", do, (B, T, HV, V), (q[2],), 16)
    if dht is not None:
        check("dht", dht, states, (torch.float32,), 16)
    config = Config(
        **chunk_facts(q, g, beta, A_log, dt_bias, cu_seqlens, gate=gate, beta_mode=beta_mode, l2norm=l2norm),
        BV=v_tile(N * HV, V, of(at).sms),
        state_v_first=state_v_first,
        has_do=do is not None,
        has_dht=dht is not None,
        want_dh=want_dh,
        want_dh0=want_dh0,
        overlapped=overlapped,
    )
    scalars = scale, lower_bound or 0.0
    return Plan(config, (B, T, HV, V), (NT, HV, K, V), states, scalars, B * T * HV * V * N > 0)


def launch(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    Aqk: Tensor,
    q_rstd: Tensor | None,
    k_rstd: Tensor | None,
    total: Tensor,
    do: Tensor | None,
    dht: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    first_chunks: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """See :func:`bwd_state`; on tensors whose facts are those that the plan was prepared from, and whose
    addresses TMA can take."""
    import torch

    dh = dv2 = None
    if plan.config.want_dh:
        dv2 = (q.new_empty if cu_seqlens is None else q.new_zeros)(*plan.values)
        dh = q.new_empty(*plan.chunks)
    dh0 = q.new_empty(*plan.states, dtype=torch.float32) if plan.config.want_dh0 else None
    if plan.runs:
        if not plan.config.l2norm:
            q_rstd = k_rstd = None
        _compile(plan.config)(
            q, k, g, beta, A, Aqk, q_rstd, k_rstd, total, do, dht, A_log, dt_bias, cu_seqlens, first_chunks, dh, dv2,
            dh0, *plan.scalars,
        )  # fmt: skip
    elif dh0 is not None:
        dh0.copy_(dht) if dht is not None else dh0.zero_()
    return dh, dv2, dh0


def bwd_state(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    A: Tensor,
    Aqk: Tensor,
    q_rstd: Tensor | None,
    k_rstd: Tensor | None,
    total: Tensor,
    do: Tensor | None,
    dht: Tensor | None,
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
    want_dh0: bool,
    want_dh: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The recurrence over chunks in reverse.

    q, k ``[B, T, H, K]``, g ``[B, T, HV, K]``, beta ``[B, T, HV]``: the caller's own, io dtype bf16 or fp16; g
    and beta may be fp32. A, Aqk ``[B, T, HV, 64]`` io, lower triangular with zeros above the diagonal, scale in
    Aqk; q_rstd, k_rstd ``[B, T, H]`` fp32 with ``l2norm``; total ``[NT, HV, 9 K]`` fp32, as fwd_intra gives it. do ``[B, T, HV, V]`` io,
    dht ``[N, HV, K, V]`` fp32 (``[N, HV, V, K]`` with ``state_v_first``), either None for zeros, not both.
    A_log ``[HV]``, dt_bias ``[HV, K]`` fp32 or None for zeros; not read by gate "log". ``table``: None for a
    dense batch, else (cu_seqlens ``[N + 1]`` int32 or int64, first chunk of each sequence ``[N + 1]`` int32).

    Returns dh ``[NT, HV, K, V]`` io, the gradient of the state at the end of each chunk (rows past the last
    chunk of a packing are not written); dv2 ``[B, T, HV, V]`` io, the gradient of v_new, zero outside every
    sequence; with ``want_dh0`` the gradient of the initial state, fp32 in the layout of dht, else None. Without
    ``want_dh`` dh and dv2 are None, and dh0 must be wanted.
    ValueError or TypeError names the argument that does not fit.
    """
    if gate == "log":
        A_log = dt_bias = None
    given = q, k, g, beta, A, Aqk, q_rstd, k_rstd, total, do, dht, A_log, dt_bias, *(table or (None, None))
    plan = prepare(
        facts_of(*given), q.device, scale=scale, gate=gate, lower_bound=lower_bound, beta_mode=beta_mode, l2norm=l2norm,
        state_v_first=state_v_first, want_dh0=want_dh0, want_dh=want_dh,
    )  # fmt: skip
    check_addresses(NAMES, (q, k, g, A, Aqk, total, do, dht))
    return launch(plan, *given)

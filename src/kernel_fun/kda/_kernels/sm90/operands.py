"""The operands both scans read of a chunk, built in shared memory over the caller's q, k, g.

Per chunk of BT = 64 tokens, a = 2^(log2 decay) [BT, K], one exponential per token and channel:

    E[t] = a[0] ... a[t]      R[t] = a[t+1] ... a[63]      fp32, products only: exact for a gate of -inf
    qE = io(scale q^ E)       kE = io(-beta k^ E)          kR = io(k^ R)

q^, k^ are q, k times their rstd. qE is written over q, kR over k, kE over g. Rows past the end of a sequence
get a = 1 and q = k = beta = 0 by selection: what follows them in memory, NaN included, enters no product.

    role       warps          does
    BUILD      0..K/16-1      the operands
    STATE      next BV/16     what the kernel does with them, 64 columns of V a warpgroup; issues the loads
    pipe       writer -> readers          holds
    raw        TMA -> BUILD, STATE        q, k, g of a chunk; freed by STATE
    built      BUILD -> STATE             the same slots once they hold qE, kR, kE
    row        TMA -> STATE               what else the kernel reads of a chunk; freed by STATE
"""

# sizes: shared with fwd_state until that kernel takes its builder from here
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from kernel_fun._cute import pipe, wgmma
from kernel_fun._cute.compile import DTYPES
from kernel_fun._cute.decay import GATES, LOG2E, Gate
from kernel_fun._cute.pipe import WARPGROUP, Pipe, Role
from kernel_fun._cute.tile import SMEM_BYTES, Tile, tma_parts, tokens_first, vector
from kernel_fun._cute.warp import pack, select

BT = 64
ROWS = wgmma.M
"""Columns of V a STATE warpgroup owns: the rows of its products."""
QUARTER = BT // 4
"""Tokens a BUILD warp turns into operands."""
BATCH = 2
"""Tokens a BUILD thread holds as operands at once."""
BETAS = ("raw", "sigmoid", "sigmoid2")
BARRIER = 1
"""First of the named barriers of BUILD; a warpgroup adds its index."""
STATE_BARRIER = 3
"""First of the named barriers a kernel may use in STATE."""


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """Static facts both scans share.

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
    state_v_first: bool = False
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
    def holders(self) -> int:
        """STATE warpgroups, 64 columns of V each."""
        return self.BV // ROWS

    @property
    def build(self) -> Role:
        return Role(0, 4 * self.builders, self.registers[0])

    @property
    def state(self) -> Role:
        return Role(4 * self.builders, 4 * self.holders, self.registers[1])

    @property
    def registers(self) -> tuple[int, int]:
        """Of a BUILD and of a STATE thread; fp32 gates take more of the addresses."""
        if (self.K, self.BV) == (128, 128):
            return (72, 184) if self.wide_g else (64, 192)
        return {(128, 64): (128, 240), (64, 128): (88, 208), (64, 64): (0, 0)}[self.K, self.BV]

    @property
    def threads(self) -> int:
        return self.build.threads + self.state.threads

    @property
    def raw_bytes(self) -> int:
        """q, k, g of a chunk."""
        return BT * self.K * (4 + (4 if self.wide_g else 2))

    @property
    def raw_stages(self) -> int:
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the storage, alignment included."""
        raise NotImplementedError


@dataclass(frozen=True)
class Chain:
    """The chunks of one sequence and value head: NT of them, the first at token ``start`` of batch row ``b``.

    ``first``: its first chunk among those of the call.
    """

    n: Any
    b: Any
    start: Any
    length: Any
    first: Any
    NT: Any

    @classmethod
    def of(cls, n: Any, T: Any, mCu: Any, mFirst: Any) -> Chain:
        """Sequence n of a packing, or batch row n of T tokens where ``mCu`` is None."""
        if mCu is None:
            return cls(n, n, Int32(0), T, n * ((T + BT - 1) // BT), (T + BT - 1) // BT)
        start = Int32(mCu[n])
        length = Int32(mCu[n + 1]) - start
        return cls(n, Int32(0), start, length, Int32(mFirst[n]), (length + BT - 1) // BT)

    def load(self, atom: cute.CopyAtom, mX: cute.Tensor, head: Any, tile: Tile, field: Any) -> Any:
        """(atom, shared, global) of a TMA copy of (tokens, dims) tiles of the chain."""
        gX = cute.domain_offset((self.start, 0), mX[None, None, head, self.b])
        return atom, *tma_parts(atom, cute.local_tile(gX, tile.shape, (None, 0)), tile.view(field))


class Builder:
    """BUILD. ``reverse``: from the last chunk of a chain to the first."""

    def __init__(self, config: ScanConfig, *, reverse: bool) -> None:
        self.config = c = config
        self.reverse = reverse
        self.io, self.g, self.beta = (getattr(cutlass, DTYPES[name]) for name in (c.io, c.g, c.beta))
        self.Q = Tile(self.io, BT, c.K, c.raw_stages)
        self.G = Tile(self.g, BT, c.K, c.raw_stages)
        self.E = Tile(self.io, BT, c.K, c.raw_stages, pitch_bytes=self.G.stage_bytes)
        raw_bytes = 2 * self.Q.stage_bytes + self.G.stage_bytes
        self.raw = Pipe(c.raw_stages, c.state, (c.state,), tx_bytes=raw_bytes)
        self.built = Pipe(c.raw_stages, c.build)

    def fields(self) -> dict[str, Any]:
        """Storage: the small arrays, then the tiles."""
        c = self.config
        small = {"beta": vector(Float32, BT * c.raw_stages)}
        if c.l2norm:
            small["rstd"] = vector(Float32, 32 * c.build.warps)
        return {**small, "q": self.Q.field(), "k": self.Q.field(), "g": self.G.field()}

    def atoms(self, mQ: cute.Tensor, mK: cute.Tensor, mG: cute.Tensor) -> tuple[Any, ...]:
        """TMA atom and coordinates of q, k and g."""
        tensors = ((self.Q, mQ), (self.Q, mK), (self.G, mG))
        return tuple(x for tile, m in tensors for x in tile.loader(tokens_first(m)))

    def loads(self, chain: Chain, atoms: Any, st: Any, hv: Any, G: Any) -> Any:
        """TMA copies of g, k and q; value head hv reads head hv / G of q and k."""
        tmaQ, mQ, tmaK, mK, tmaG, mG = atoms
        return (
            chain.load(tmaG, mG, hv, self.G, st.g),
            chain.load(tmaK, mK, hv // G, self.Q, st.k),
            chain.load(tmaQ, mQ, hv // G, self.Q, st.q),
        )

    def scalars(self, chain: Chain, mBeta: cute.Tensor, mRstds: Any, hv: Any, G: Any) -> Any:
        """beta and the rstds of the chain's tokens."""
        tokens = lambda m, head: cute.domain_offset((chain.start,), m[chain.b, None, head])
        rstds = tuple(tokens(m, hv // G) for m in mRstds) if self.config.l2norm else None
        return tokens(mBeta, hv), rstds

    def head(self, parameters: Any, hv: Any, lower_bound: Any) -> Any:
        """The gate of a head and its dt_bias."""
        mALog, mBias = parameters
        c = self.config
        gate = Gate.of_head(c.gate, mALog[hv] if c.has_A_log else None, lower_bound)
        return gate, mBias[hv, None] if c.has_dt_bias else None

    def at(self, step: Any, NT: Any) -> Any:
        """Chunk of the chain that is visited at a step."""
        return NT - 1 - step if self.reverse else step

    @cute.jit
    def run(
        self, st, rings, padded, scalars, head, scale: Float32, half: Int32, length: Int32, NT: Int32,
    ):  # fmt: skip
        """One pair of channels over one quarter of each chunk a thread.

        ``rings``: raw, built, row. ``padded``: names and tiles of what of row must read as 0 past the end
        of a sequence; TMA sees to it in a dense batch. ``scalars``, ``head``: what these methods give.
        """
        c = self.config
        raw, built, row = rings
        (gBeta, gRstds), (gate, gBias) = scalars, head
        lane, quarter = cute.arch.lane_idx(), pipe.index_of_warp() % 4
        sBeta = st.beta.get_tensor(cute.make_layout((BT, c.raw_stages)))
        bias = cute.make_rmem_tensor(2, Float32)
        bias.fill(0.0)
        if const_expr(c.has_dt_bias):
            cute.autovec_copy(cute.local_tile(gBias, (2,), (half * 32 + lane,)), bias)
        gRstd, rstd, beta = None, Float32(0.0), self.beta(0.0)
        if const_expr(c.l2norm):  # a q_rstd for lanes 0-15, a k_rstd for the others
            gQr, gKr = gRstds
            address = Int64(cutlass.select_(lane < QUARTER, gQr.iterator.toint(), gKr.iterator.toint()))
            pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
            gRstd = cute.make_tensor(pointer, gQr.layout)
        at_raw, at_row = raw.read_cursor(), row.read_cursor()
        for i in cutlass.range(-1, NT, unroll=1):
            if i >= 0:
                left = length - self.at(i, NT) * BT
                raw.wait_full(at_raw)
                self.operands(
                    st, (row, at_row, padded), sBeta[None, at_raw.index], at_raw.index, (bias, gate),
                    (rstd, beta, scale), (half, quarter), left,
                )  # fmt: skip
                built.publish(at_raw)
                at_raw.advance()
                at_row.advance()
            # row scalars of the next chunk, as they are: nothing waits for them here
            t = self.at(i + 1, NT) * BT + quarter * QUARTER + lane % QUARTER
            rstd, beta = Float32(0.0), self.beta(0.0)
            if i + 1 < NT and t < length:
                if const_expr(c.l2norm):
                    rstd = gRstd[t]
                beta = gBeta[t]

    @cute.jit
    def operands(
        self, st, rows, sBeta: cute.Tensor, slot: Int32, decays, scales, place, left: Int32,
    ):  # fmt: skip
        """q, k, g of one slot become qE, kR, kE.

        32-bit words of the tiles: a pair of channels each, 32 a row of 128 bytes. The 128-byte swizzle puts
        the word of row t at ``word ^ 4 (t % 8)``.
        """
        c = self.config
        (bias, gate), (rstd, beta, scale), (half, quarter) = decays, scales, place
        thread = pipe.thread_again()  # addresses are made anew for every chunk: registers hold the decays
        lane = thread % 32
        wQ, wK, wE = self.Q.words(st.q, Int32), self.Q.words(st.k, Int32), self.E.words(st.g, Int32)
        own = thread // 32 * (QUARTER * 32) + lane
        word = own + slot * (self.Q.stage_bytes // 4)
        word_E = own + slot * (self.G.stage_bytes // 4)
        at = lambda base, t: (base ^ (4 * (t % 8))) + 32 * t

        # a; the words of g that hold the quarter's product once they have been read
        if const_expr(c.wide_g):
            wG = self.G.words(st.g, Int64)
            word_G = (half * 2 + lane // 16) * (BT * 16) + quarter * (QUARTER * 16) + lane % 16
            word_G = word_G + slot * (self.G.stage_bytes // 8)
            exchange = (2 * word_G, 2 * word_G + 1)
        else:
            wG, word_G = wE, word_E
            exchange = (at(word_E, 0), at(word_E, 1))
        a = cute.make_rmem_tensor((QUARTER, 2), Float32)
        g = self.gates(wG, word_G)
        for t in cutlass.range_constexpr(QUARTER):
            for e in cutlass.range_constexpr(2):
                x = g[t, e].to(Float32)
                if const_expr(c.has_dt_bias):
                    x = x + bias[e]
                a[t, e] = gate.decay(x)
        if left < BT:
            for t in cutlass.range_constexpr(QUARTER):
                if quarter * QUARTER + t >= left:
                    a[t, 0] = Float32(1.0)
                    a[t, 1] = Float32(1.0)
                    wQ[at(word, t)] = Int32(0)
                    wK[at(word, t)] = Int32(0)
            if const_expr(c.is_packed):
                row, at_row, padded = rows
                row.wait_full(at_row)
                self.clear(st, padded, at_row.index, (half, quarter, lane), left)

        # the quarter's product, and those of the quarters before and after
        D = [a[0, 0], a[0, 1]]
        for t in cutlass.range_constexpr(1, QUARTER):
            for e in cutlass.range_constexpr(2):
                D[e] = D[e] * a[t, e]
        wD = self.E.words(st.g, Float32)
        for e in cutlass.range_constexpr(2):
            wD[exchange[e]] = D[e]
        # an operand over fp32 gates overlaps those of the other warpgroup
        group = c.builders if const_expr(c.wide_g) else 1
        named = BARRIER + (0 if const_expr(c.wide_g) else half)
        scales = None
        if const_expr(c.l2norm):
            sRstd = st.rstd.get_tensor(cute.make_layout((32, c.build.warps)))
            sRstd[lane, half * 4 + quarter] = rstd * select(lane < QUARTER, scale, Float32(-1.0))
            scales = sRstd[None, half * 4 + quarter]
        if lane < QUARTER:  # by both warpgroups, each for itself
            r = quarter * QUARTER + lane
            sBeta[r] = select(r < left, self.activated(beta.to(Float32)), Float32(0.0))
        cute.arch.barrier(barrier_id=named, number_of_threads=group * WARPGROUP)
        E = [Float32(1.0), Float32(1.0)]
        R = [Float32(-1.0), Float32(-1.0)]  # k^ comes with a minus sign, for kE's sake
        for u in cutlass.range_constexpr(4):
            for e in cutlass.range_constexpr(2):
                x = wD[exchange[e] + (u - quarter) * (QUARTER * 32)]
                if const_expr(u < 3):
                    E[e] = E[e] * select(u < quarter, x, Float32(1.0))
                if const_expr(u > 0):
                    R[e] = R[e] * select(u > quarter, x, Float32(1.0))
        cute.arch.barrier(barrier_id=named, number_of_threads=group * WARPGROUP)

        # forwards: qE, kE; then backwards: kR. Words are read a batch ahead: no load may pass a store
        batches = QUARTER // BATCH
        q, k = self.words(wQ, word, 0), self.words(wK, word, 0)
        sq, sk = self.rstds(scales, 0, scale), self.rstds(scales, batches, Float32(-1.0))
        own_beta = cute.local_tile(sBeta, (QUARTER,), (quarter,))
        sb = self.rstds(own_beta, 0, None)
        for b in cutlass.range_constexpr(batches):
            xQ, xK = [], []
            for t in cutlass.range_constexpr(BATCH):
                for e in cutlass.range_constexpr(2):
                    E[e] = E[e] * a[BATCH * b + t, e]
                    xQ.append(q[t, e].to(Float32) * sq[t] * E[e])
                    xK.append(k[t, e].to(Float32) * (sk[t] * sb[t]) * E[e])
            last = b
            if const_expr(b + 1 < batches):
                last = b + 1
                q, sq = self.words(wQ, word, last), self.rstds(scales, last, scale)
                sb = self.rstds(own_beta, last, None)
            k, sk = self.words(wK, word, last), self.rstds(scales, batches + last, Float32(-1.0))
            for t in cutlass.range_constexpr(BATCH):
                wQ[at(word, BATCH * b + t)] = pack(xQ[2 * t], xQ[2 * t + 1], self.io)
                wE[at(word_E, BATCH * b + t)] = pack(xK[2 * t], xK[2 * t + 1], self.io)
        for b in cutlass.range_constexpr(batches - 1, -1, -1):
            xK = [None] * (2 * BATCH)
            for t in cutlass.range_constexpr(BATCH - 1, -1, -1):
                for e in cutlass.range_constexpr(2):
                    xK[2 * t + e] = k[t, e].to(Float32) * sk[t] * R[e]
                    R[e] = R[e] * a[BATCH * b + t, e]
            if const_expr(b > 0):
                k, sk = self.words(wK, word, b - 1), self.rstds(scales, batches + b - 1, Float32(-1.0))
            for t in cutlass.range_constexpr(BATCH):
                wK[at(word, BATCH * b + t)] = pack(xK[2 * t], xK[2 * t + 1], self.io)

    @cute.jit
    def clear(self, st, padded, slot: Int32, place, left: Int32):
        """Zero the rows past the end of the padded tiles, 64 x 64 blocks of them shared by the warpgroups."""
        c = self.config
        half, quarter, lane = place
        blocks = [
            (getattr(st, name), tile, u)
            for name, tile in padded
            for u in range(tile.rows * tile.cols // BT**2)
        ]
        for i in cutlass.range_constexpr(len(blocks)):
            field, tile, u = blocks[i]
            words = tile.words(field, Int32)
            base = slot * (tile.stage_bytes // 4) + u * (BT * 32) + quarter * (QUARTER * 32) + lane
            if half == i % c.builders:
                for t in cutlass.range_constexpr(QUARTER):
                    if quarter * QUARTER + t >= left:
                        words[base + 32 * t] = Int32(0)

    def words(self, wX: cute.Tensor, word: Any, batch: int) -> cute.Tensor:
        """A batch of this thread's words, seen as (token, channel of the pair)."""
        words = cute.make_rmem_tensor(BATCH, Int32)
        for t in range(BATCH):
            row = BATCH * batch + t
            words[t] = wX[(word ^ (4 * (row % 8))) + 32 * row]
        return cute.make_tensor(
            cute.recast_ptr(words.iterator, dtype=self.io), cute.make_layout((BATCH, 2), stride=(2, 1))
        )

    def rstds(self, scales: Any, batch: int, constant: Any) -> Any:
        """The scale of each token of a batch."""
        if scales is None:
            return [constant] * BATCH
        rstd = cute.make_rmem_tensor(BATCH, Float32)
        cute.autovec_copy(cute.local_tile(scales, (BATCH,), (batch,)), rstd)
        return rstd

    def gates(self, wG: cute.Tensor, word: Any) -> cute.Tensor:
        """This thread's raw gates, (token of the quarter, channel of the pair)."""
        unit = 2 if self.config.wide_g else 1
        words = cute.make_rmem_tensor(QUARTER, wG.element_type)
        for t in range(QUARTER):
            words[t] = wG[(word ^ (4 // unit * (t % 8))) + 32 // unit * t]
        return cute.make_tensor(
            cute.recast_ptr(words.iterator, dtype=self.g), cute.make_layout((QUARTER, 2), stride=(2, 1))
        )

    @cute.jit
    def activated(self, beta: Float32):
        """beta as the recurrence uses it; sigmoid is 0 and 1 at its ends."""
        if const_expr(self.config.beta_mode != "raw"):
            beta = cute.arch.rcp_approx(1.0 + cute.math.exp2(beta * -LOG2E, fastmath=True))
        if const_expr(self.config.beta_mode == "sigmoid2"):
            beta = 2.0 * beta
        return beta

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

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from kernel_fun._cute import pipe, wgmma
from kernel_fun._cute.compile import DTYPES
from kernel_fun._cute.decay import GATES, LOG2E, Gate
from kernel_fun._cute.pipe import Pipe, Role
from kernel_fun._cute.tile import SMEM_BYTES, Tile, tma_parts, tokens_first, vector
from kernel_fun._cute.warp import pack, select, unpack

BT = 64
ROWS = wgmma.M
"""Columns of V a STATE warpgroup owns: the rows of its products."""
BETAS = ("raw", "sigmoid", "sigmoid2")
BARRIER = 1
"""First of the named barriers of BUILD; a half of the channels adds its index."""
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
        """BUILD warpgroups. With BV = 64 the registers of the absent STATE warpgroup go to twice as many."""
        return self.K // 64 * (2 if self.BV == 64 else 1)

    @property
    def span(self) -> int:
        """Tokens a BUILD warp turns into operands, for 64 channels."""
        return BT * self.K // 64 // (4 * self.builders)

    @property
    def batch(self) -> int:
        """Tokens a BUILD thread holds as operands at once: fp16 and fp32 gates take registers for themselves."""
        tight = (self.K, self.BV) == (128, 128) and (self.io == "float16" or self.wide_g)
        return 1 if tight else 2

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
        """Of a BUILD and of a STATE thread."""
        by_tile = {(128, 128): (64, 192), (128, 64): (72, 192), (64, 128): (88, 208), (64, 64): (128, 240)}
        return by_tile[self.K, self.BV]

    @property
    def reads_q(self) -> bool:
        """Whether the kernel wants qE."""
        return True

    @property
    def threads(self) -> int:
        return self.build.threads + self.state.threads

    @property
    def raw_bytes(self) -> int:
        """q, k, g of a chunk."""
        return BT * self.K * (2 + 2 * self.reads_q + (4 if self.wide_g else 2))

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
        self.raw = Pipe(c.raw_stages, c.state, (c.state,), tx_bytes=c.raw_bytes)
        self.built = Pipe(c.raw_stages, c.build)

    def fields(self) -> dict[str, Any]:
        """Storage: the small arrays, then the tiles."""
        c = self.config
        small = {"beta": vector(Float32, BT * c.raw_stages)}
        if c.l2norm:
            small["rstd"] = vector(Float32, 2 * c.span * c.build.warps)
        if c.reads_q:
            small["q"] = self.Q.field()
        return {**small, "k": self.Q.field(), "g": self.G.field()}

    def atoms(self, mQ: Any, mK: cute.Tensor, mG: cute.Tensor) -> tuple[Any, ...]:
        """TMA atom and coordinates of k, g and, if it is read, q."""
        tensors = ((self.Q, mK), (self.G, mG), *(((self.Q, mQ),) if self.config.reads_q else ()))
        return tuple(x for tile, m in tensors for x in tile.loader(tokens_first(m)))

    def loads(self, chain: Chain, atoms: Any, st: Any, hv: Any, G: Any) -> Any:
        """TMA copies of g, k and q; value head hv reads head hv / G of q and k."""
        found = (
            chain.load(*atoms[2:4], hv, self.G, st.g),
            chain.load(*atoms[:2], hv // G, self.Q, st.k),
        )
        if not self.config.reads_q:
            return found
        return *found, chain.load(*atoms[4:], hv // G, self.Q, st.q)

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
        self, st, rings, padded, scalars, head, scale: Float32, warpgroup: Int32, length: Int32, NT: Int32,
    ):  # fmt: skip
        """One pair of channels over ``span`` tokens of each chunk a thread.

        ``rings``: raw, built, row. ``padded``: names and tiles of what of row must read as 0 past the end of a
        sequence; TMA sees to it in a dense batch. ``scalars``: beta, q_rstd and k_rstd [B, T, heads], then b, first
        token, value head and query head. ``head``: what :meth:`head` gives.
        """
        c = self.config
        raw, built, row = rings
        gate, gBias = head
        half = warpgroup * 4 // (BT // c.span)
        part = pipe.index_of_warp() % (BT // c.span)
        sBeta = st.beta.get_tensor(cute.make_layout((BT, c.raw_stages)))
        bias = cute.make_rmem_tensor(2, Float32)
        bias.fill(0.0)
        if const_expr(c.has_dt_bias):
            cute.autovec_copy(cute.local_tile(gBias, (2,), (half * 32 + cute.arch.lane_idx(),)), bias)
            for e in cutlass.range_constexpr(
                2
            ):  # arrived before the loop, whose first use would else wait each time
                bias[e] = cute.arch.shuffle_sync_bfly(bias[e], offset=0)
        at_raw, at_row = raw.read_cursor(), row.read_cursor()
        rstd, beta = Float32(0.0), self.beta(0.0)
        if NT > 0:
            rstd, beta = self.row_scalars(scalars, self.at(0, NT) * BT, length)
        for i in cutlass.range(NT, unroll=1):
            raw.wait_full(at_raw)
            rstd, beta = self.operands(
                st, (row, at_row, padded), sBeta[None, at_raw.index], at_raw.index, (bias, gate), (rstd, beta),
                scalars, scale, (half, part), self.at(i + 1, NT) * BT, length, length - self.at(i, NT) * BT,
            )  # fmt: skip
            built.publish(at_raw)
            at_raw.advance()
            at_row.advance()

    @cute.jit
    def operands(
        self, st, rows, sBeta: cute.Tensor, slot: Int32, decays, own_scalars, scalars, scale: Float32, place,
        token_after: Int32, length: Int32, left: Int32,
    ):  # fmt: skip
        """q, k, g of one slot become qE, kR, kE. Returns the row scalars of the chunk at ``token_after``, on their way.

        32-bit words of the tiles: a pair of channels each, 32 a row of 128 bytes. The 128-byte swizzle puts the
        word of row t at ``word ^ 4 (t % 8)``.
        """
        c, span = self.config, self.config.span
        (bias, gate), (half, part) = decays, place
        thread = pipe.thread_again()  # addresses are made anew for every chunk: registers hold the decays
        lane, warp = thread % 32, thread // 32
        wK, wE = self.Q.words(st.k, Int32), self.E.words(st.g, Int32)
        wQ = self.Q.words(st.q, Int32) if c.reads_q else None
        own = half * (BT * 32) + part * (span * 32) + lane
        word = own + slot * (self.Q.stage_bytes // 4)
        word_E = own + slot * (self.G.stage_bytes // 4)
        at = lambda base, t: (base ^ (4 * (t % 8))) + 32 * t

        # a; the words of g that hold the part's product once they have been read
        if const_expr(c.wide_g):
            wG = self.G.words(st.g, Int64)
            word_G = (half * 2 + lane // 16) * (BT * 16) + part * (span * 16) + lane % 16
            word_G = word_G + slot * (self.G.stage_bytes // 8)
            exchange = (2 * word_G, 2 * word_G + 1)
        else:
            wG, word_G = wE, word_E
            exchange = (at(word_E, 0), at(word_E, 1))
        a = cute.make_rmem_tensor((span, 2), Float32)
        step = 4 if c.wide_g else span
        for first in cutlass.range_constexpr(0, span, step):
            g = self.gates(wG, word_G, range(first, first + step))
            for t in cutlass.range_constexpr(step):
                for e in cutlass.range_constexpr(2):
                    x = g[t][e]
                    if const_expr(c.has_dt_bias):
                        x = x + bias[e]
                    a[first + t, e] = gate.decay(x)
        if left < BT:
            for t in cutlass.range_constexpr(span):
                if part * span + t >= left:
                    a[t, 0] = Float32(1.0)
                    a[t, 1] = Float32(1.0)
                    if const_expr(c.reads_q):
                        wQ[at(word, t)] = Int32(0)
                    wK[at(word, t)] = Int32(0)
            if const_expr(c.is_packed):
                row, at_row, padded = rows
                row.wait_full(at_row)
                self.clear(st, padded, at_row.index, (half, part, lane), left)

        # the part's product, and those of the parts before and after
        D = [a[0, 0], a[0, 1]]
        for t in cutlass.range_constexpr(1, span):
            for e in cutlass.range_constexpr(2):
                D[e] = D[e] * a[t, e]
        wD = self.E.words(st.g, Float32)
        for e in cutlass.range_constexpr(2):
            wD[exchange[e]] = D[e]
        (rstd, beta), scales = own_scalars, None
        r = part * span + lane % span
        if const_expr(c.l2norm):
            sRstd = st.rstd.get_tensor(cute.make_layout((2 * span, c.build.warps)))
            if const_expr(span == 16) or lane < 2 * span:
                sRstd[lane, warp] = rstd * select(lane < span, scale, Float32(-1.0))
            scales = sRstd[None, warp]
        if lane < span:  # by the warps of both halves, each for itself
            sBeta[r] = select(r < left, self.activated(beta.to(Float32)), Float32(0.0))
        # asked for here, half a chunk before anything needs them; no branch, which would wait for the values
        ahead = self.row_scalars(scalars, token_after, length)
        self.meet(half)
        E = [Float32(1.0), Float32(1.0)]
        R = [Float32(-1.0), Float32(-1.0)]  # k^ comes with a minus sign, for kE's sake
        for u in cutlass.range_constexpr(BT // span):
            for e in cutlass.range_constexpr(2):
                x = wD[exchange[e] + (u - part) * (span * 32)]
                if const_expr(u < BT // span - 1):
                    E[e] = E[e] * select(u < part, x, Float32(1.0))
                if const_expr(u > 0):
                    R[e] = R[e] * select(u > part, x, Float32(1.0))
        self.meet(half)

        # forwards: qE, kE; then backwards: kR. Words are read a batch ahead: no load may pass a store
        size = c.batch
        batches = span // size
        q, k = self.words(wQ, word, 0) if c.reads_q else None, self.words(wK, word, 0)
        sq, sk = self.rstds(scales, 0, scale), self.rstds(scales, batches, Float32(-1.0))
        own_beta = cute.local_tile(sBeta, (span,), (part,))
        sb = self.rstds(own_beta, 0, None)
        for b in cutlass.range_constexpr(batches):
            xQ, xK = [], []
            for t in cutlass.range_constexpr(size):
                pk, fk = unpack(k[t], self.io), sk[t] * sb[t]
                pq = unpack(q[t], self.io) if c.reads_q else None
                for e in cutlass.range_constexpr(2):
                    E[e] = E[e] * a[size * b + t, e]
                    if const_expr(c.reads_q):
                        xQ.append(pq[e] * sq[t] * E[e])
                    xK.append(pk[e] * fk * E[e])
            last = b
            if const_expr(b + 1 < batches):
                last = b + 1
                if const_expr(c.reads_q):
                    q, sq = self.words(wQ, word, last), self.rstds(scales, last, scale)
                sb = self.rstds(own_beta, last, None)
            k, sk = self.words(wK, word, last), self.rstds(scales, batches + last, Float32(-1.0))
            for t in cutlass.range_constexpr(size):
                if const_expr(c.reads_q):
                    wQ[at(word, size * b + t)] = pack(xQ[2 * t], xQ[2 * t + 1], self.io)
                wE[at(word_E, size * b + t)] = pack(xK[2 * t], xK[2 * t + 1], self.io)
        for b in cutlass.range_constexpr(batches - 1, -1, -1):
            xK = [None] * (2 * size)
            for t in cutlass.range_constexpr(size - 1, -1, -1):
                pk = unpack(k[t], self.io)
                for e in cutlass.range_constexpr(2):
                    xK[2 * t + e] = pk[e] * sk[t] * R[e]
                    R[e] = R[e] * a[size * b + t, e]
            if const_expr(b > 0):
                k, sk = self.words(wK, word, b - 1), self.rstds(scales, batches + b - 1, Float32(-1.0))
            for t in cutlass.range_constexpr(size):
                wK[at(word, size * b + t)] = pack(xK[2 * t], xK[2 * t + 1], self.io)
        return ahead

    def row_scalars(self, scalars: Any, token: Any, length: Any) -> tuple[Any, Any]:
        """As they are in memory: a lane's q_rstd or, from lane ``span`` on, k_rstd of the chunk at ``token``, and beta.

        Of the nearest token where the chunk has none.
        """
        mBeta, mQr, mKr, b, start, hv, h = scalars
        c, span = self.config, self.config.span
        thread = pipe.thread_again()
        lane, part = thread % 32, thread // 32 % (BT // span)
        t = start + cutlass.max(cutlass.min(token + part * span + lane % span, length - 1), 0)
        rstd = Float32(0.0)
        if c.l2norm:
            which = Int64(cutlass.select_(lane < span, mQr.iterator.toint(), mKr.iterator.toint()))
            pointer = cute.make_ptr(Float32, which, cute.AddressSpace.gmem, assumed_align=4)
            rstd = cute.make_tensor(pointer, mQr.layout)[b, t, h]
        return rstd, mBeta[b, t, hv]

    @cute.jit
    def meet(self, half: Int32):
        """Barrier of the warps of a half of the channels, which exchange their products.

        Of both halves where the operand lies under the other's fp32 gates. The numbers are known at compile time.
        """
        c = self.config
        if const_expr(c.wide_g or c.K == 64):
            cute.arch.barrier(barrier_id=BARRIER, number_of_threads=c.build.threads)
        elif half == 0:
            cute.arch.barrier(barrier_id=BARRIER, number_of_threads=c.build.threads // 2)
        else:
            cute.arch.barrier(barrier_id=BARRIER + 1, number_of_threads=c.build.threads // 2)

    @cute.jit
    def clear(self, st, padded, slot: Int32, place, left: Int32):
        """Zero the rows past the end of the padded tiles, 64 x 64 blocks of them shared by the halves."""
        c, span = self.config, self.config.span
        half, part, lane = place
        blocks = [
            (getattr(st, name), tile, u)
            for name, tile in padded
            for u in range(tile.rows * tile.cols // BT**2)
        ]
        for i in cutlass.range_constexpr(len(blocks)):
            field, tile, u = blocks[i]
            words = tile.words(field, Int32)
            base = slot * (tile.stage_bytes // 4) + u * (BT * 32) + part * (span * 32) + lane
            if half == i % (c.K // 64):
                for t in cutlass.range_constexpr(span):
                    if part * span + t >= left:
                        words[base + 32 * t] = Int32(0)

    def words(self, wX: cute.Tensor, word: Any, batch: int) -> list[Any]:
        """A batch of this thread's words."""
        size = self.config.batch
        rows = range(size * batch, size * batch + size)
        return [wX[(word ^ (4 * (row % 8))) + 32 * row] for row in rows]

    def rstds(self, scales: Any, batch: int, constant: Any) -> Any:
        """The scale of each token of a batch."""
        size = self.config.batch
        if scales is None:
            return [constant] * size
        rstd = cute.make_rmem_tensor(size, Float32)
        cute.autovec_copy(cute.local_tile(scales, (size,), (batch,)), rstd)
        return rstd

    def gates(self, wG: cute.Tensor, word: Any, tokens: range) -> list[Any]:
        """This thread's raw gates: per token of the part, the two channels."""
        if not self.config.wide_g:
            return [unpack(wG[(word ^ (4 * (t % 8))) + 32 * t], self.io) for t in tokens]
        pairs = []
        for t in tokens:
            both = cute.make_rmem_tensor(1, Int64)
            both[0] = wG[(word ^ (2 * (t % 8))) + 16 * t]
            pairs.append(cute.make_tensor(cute.recast_ptr(both.iterator, dtype=Float32), cute.make_layout(2)))
        return pairs

    @cute.jit
    def activated(self, beta: Float32):
        """beta as the recurrence uses it; sigmoid is 0 and 1 at its ends."""
        if const_expr(self.config.beta_mode != "raw"):
            beta = cute.arch.rcp_approx(1.0 + cute.math.exp2(beta * -LOG2E, fastmath=True))
        if const_expr(self.config.beta_mode == "sigmoid2"):
            beta = 2.0 * beta
        return beta

"""The operands both scans read of a chunk, built in shared memory over the caller's q, k, g.

Per chunk of BT = 64 tokens, a = 2^(log2 decay) [BT, K], one exponential per token and channel:

    E[t] = a[0] ... a[t]      R[t] = a[t+1] ... a[63]      fp32, products only: exact for a gate of -inf
    qE = io(scale q^ E)       kE = io(-beta k^ E)          kR = io(k^ R)

q^, k^ are q, k times their rstd. A BUILD warp has a block of BC = 16 tokens and 64 channels; the decays of the chunk
before its block and after it come from fwd_intra, so that no warp waits for another. In bf16 the scale and decay of qE
and kE are rounded before they meet q or k; not those of kR, whose errors the state keeps. qE is written over q, kR over k, kE over g. Rows past the end of a sequence get q = k
= beta = 0 and a gate without decay before anything reads them: what follows them in memory, NaN included, enters no
product.

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

from kernel_fun._cute import pipe
from kernel_fun._cute.compile import DTYPES
from kernel_fun._cute.decay import LOG2E, NO_DECAY, cut, exp2, magnitude
from kernel_fun._cute.pipe import Pipe
from kernel_fun._cute.tile import Tile, tokens_first, vector
from kernel_fun._cute.warp import load_relaxed, pack, product, select, store_relaxed, unpack
from kernel_fun.kda._kernels.sm90.scan_config import BC, BLOCKS, BT, Chain, ScanConfig

BARRIER = 1
"""The named barrier of BUILD."""
STATE_BARRIER = 3
"""First of the named barriers a kernel may use in STATE."""


def at(word: Any, t: int) -> Any:
    """The word of row t from that of row 0 of a block."""
    return (word ^ (4 * (t % 8))) + 32 * t


LOG1P = {
    "bfloat16": (0.9996068754356341, -0.48641328873619527, 0.2540239853640637, -0.07434290223157722),
    "float16": (
        0.9999915957450867, -0.4993613660335541, 0.32520660758018494, -0.21004845201969147, 0.10122201591730118,
        -0.023869045078754425,
    ),
}  # fmt: skip
"""P(e) = log1p(e) / e on [0, 1], lowest power first; relative error 4e-4 and 8.5e-6. Of a decay E that is an error of
at most 1.5e-4 and 3e-6, a tenth of what io rounds it by."""


@dataclass
class BlockDecay:
    """The decay a of a token within its block, from its raw gate; see :class:`kernel_fun._cute.decay.Gate`.

    As close as the operands it enters are rounded; the decays around a block come from fwd_intra. ``slope`` brings
    a raw gate and its bias to y, the argument of the first exponential, and ``rate`` what is made of it to log2 a.
    A softplus below 2^-126 counts as 0, whatever exp(A_log) is: l is off by exp(A_log - 87) at most.
    """

    kind: str
    slope: Any
    rate: Any = None
    log1p: tuple[float, ...] = ()

    @classmethod
    def of_head(cls, config: ScanConfig, A_log: Any, lower_bound: Any) -> BlockDecay:
        """``A_log``: fp32 value of the head, None for 0. ``lower_bound``: fp32, for bounded alone."""
        if config.gate == "log":
            return cls("log", Float32(LOG2E))
        rate = exp2(cut((Float32(0.0) if A_log is None else A_log) * LOG2E))
        if config.gate == "bounded":
            return cls("bounded", rate * -LOG2E, lower_bound * LOG2E)
        return cls("softplus", Float32(LOG2E), -rate, tuple(c * LOG2E for c in LOG1P[config.io]))

    def of(self, g: Any, shift: Any) -> Any:
        """a of a raw gate; ``shift``: its bias times slope."""
        y = g * self.slope + shift
        if self.kind == "log":
            return exp2(y)
        if self.kind == "bounded":
            return exp2(self.rate * cute.arch.rcp_approx(exp2(y) + 1.0))
        e = exp2(-magnitude(y))
        P = Float32(self.log1p[-1])
        for c in self.log1p[-2::-1]:
            P = P * e + c
        return exp2((P * e + cutlass.max(y, Float32(0.0))) * self.rate)


class Builder:
    """BUILD. ``reverse``: from the last chunk of a chain to the first. ``follows``: behind fwd_intra, of which the
    chunk after the one in the slots is written, see :mod:`overlap`."""

    def __init__(self, config: ScanConfig, *, reverse: bool, follows: bool = False) -> None:
        self.config = c = config
        self.reverse, self.follows = reverse, follows
        self.io, self.g, self.beta = (getattr(cutlass, DTYPES[name]) for name in (c.io, c.g, c.beta))
        self.Q = Tile(self.io, BT, c.K, c.raw_stages)
        self.G = Tile(self.g, BT, c.K, c.raw_stages)
        self.E = Tile(self.io, BT, c.K, c.raw_stages, pitch_bytes=self.G.stage_bytes)
        self.raw = Pipe(c.raw_stages, c.state, (c.state,), tx_bytes=c.raw_bytes)
        self.built = Pipe(c.raw_stages, c.build)

    def fields(self) -> dict[str, Any]:
        """Storage: the small arrays, then the tiles."""
        c = self.config
        small = {"beta": vector(Float32, BT * c.betas)}
        if c.l2norm:
            small["rstd"] = vector(Float32, 2 * BC * c.build.warps)
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
        """The decay of a head and its dt_bias."""
        mALog, mBias = parameters
        c = self.config
        decay = BlockDecay.of_head(c, mALog[hv] if c.has_A_log else None, lower_bound)
        return decay, mBias[hv, None] if c.has_dt_bias else None

    def at(self, step: Any, NT: Any) -> Any:
        """Chunk of the chain that is visited at a step."""
        return NT - 1 - step if self.reverse else step

    @cute.jit
    def run(
        self, st, rings, padded, scalars, table, head, scale: Float32, length: Int32, NT: Int32,
    ):  # fmt: skip
        """One block of tokens of each chunk a warp, one pair of channels a lane.

        ``rings``: raw, built, row. ``padded``: names and tiles of what of row must read as 0 past the end of a
        sequence; TMA sees to it in a dense batch. ``scalars``: beta, q_rstd and k_rstd [B, T, heads], then b, first
        token, value head and query head. ``table``: what fwd_intra calls total, by chunk of the chain. ``head``:
        what :meth:`head` gives.
        """
        c = self.config
        raw, built, row = rings
        decay, gBias = head
        warp = pipe.index_of_warp()
        place = warp // BLOCKS, warp % BLOCKS
        sBeta = st.beta.get_tensor(cute.make_layout((BT, c.betas)))
        shift = cute.make_rmem_tensor(2, Float32)
        shift.fill(0.0)
        if const_expr(c.has_dt_bias):
            cute.autovec_copy(cute.local_tile(gBias, (2,), (place[0] * 32 + cute.arch.lane_idx(),)), shift)
            for e in cutlass.range_constexpr(
                2
            ):  # arrived before the loop, whose first use would else wait each time
                shift[e] = cute.arch.shuffle_sync_bfly(shift[e], offset=0) * decay.slope
        at_raw, at_row = raw.read_cursor(), row.read_cursor()
        rstd, beta = Float32(0.0), self.beta(0.0)
        around = cute.make_rmem_tensor((2, 2), Float32)
        around.fill(1.0)
        if NT > 0:
            if const_expr(self.follows):
                raw.wait_full(at_raw)
            rstd, beta = self.row_scalars(scalars, place, self.at(0, NT) * BT, length)
            for side in cutlass.range_constexpr(2):
                self.ask_around(table, around, place, self.at(0, NT), side)
        for i in cutlass.range(NT, unroll=1):
            left = length - self.at(i, NT) * BT
            following = cutlass.max(cutlass.min(self.at(i + 1, NT), NT - 1), 0)
            raw.wait_full(at_raw)
            if left < BT:
                self.blank(st, at_raw.index, place, left)
                if const_expr(c.is_packed):
                    row.wait_full(at_row)
                    self.clear(st, padded, at_row.index, place, left)
            own_beta = sBeta[None, at_raw.index if const_expr(c.reads_beta) else place[0]]
            self.put_scalars(st, own_beta, place, rstd, beta, scale, left)
            # asked for here, a chunk before anything needs them; no branch, which would wait for the values
            rstd, beta = self.row_scalars(scalars, place, following * BT, length)
            cute.arch.sync_warp()  # no load moves down past it
            a, k = self.forwards(st, own_beta, at_raw.index, place, (shift, decay), scale, around[None, 0])
            self.ask_around(table, around, place, following, 0)
            cute.arch.sync_warp()
            self.backwards(st, at_raw.index, place, a, k, around[None, 1])
            built.publish(at_raw)
            self.ask_around(table, around, place, following, 1)
            at_raw.advance()
            at_row.advance()

    def ask_around(self, table: cute.Tensor, around: cute.Tensor, place: Any, n: Int32, side: int) -> None:
        """Decay of a chunk before (side 0) or after the warp's block, of the lane's channels."""
        half, block = place
        pairs = self.config.K // 2
        at = (1 + side * BLOCKS + block) * pairs + half * 32 + (pipe.thread_again() & 31)
        cute.autovec_copy(cute.local_tile(table[n, None], (2,), (at,)), around[None, side])

    @cute.jit
    def blank(self, st, slot: Int32, place, left: Int32):
        """Rows of the warp's block past the end of a sequence: q and k 0, g without decay, whatever TMA brought."""
        c = self.config
        half, block = place
        wQ, wK, wE, word, word_E = self.words(st, slot, place)
        for t in cutlass.range(cutlass.max(left - block * BC, 0), BC, unroll=1):
            wK[word + 32 * t] = Int32(0)
            if const_expr(c.reads_q):
                wQ[word + 32 * t] = Int32(0)
            no_decay = Float32(NO_DECAY[c.gate])
            if const_expr(c.wide_g):
                wG = self.G.words(st.g, Float32)
                for u in cutlass.range_constexpr(2):
                    wG[word_E + 32 * t + (half + u) * (BT * 32)] = no_decay
            else:
                wE[word_E + 32 * t] = pack(no_decay, no_decay, self.io)
        cute.arch.sync_warp()

    @cute.jit
    def put_scalars(self, st, sBeta: cute.Tensor, place, rstd: Float32, beta, scale: Float32, left: Int32):
        """The scales of a warp's tokens to shared memory, and beta, for STATE too where it reads it.

        The warps of both halves store the same beta there, each before it reads it: no plain stores and loads.
        """
        c = self.config
        lane = pipe.thread_again() & 31
        if const_expr(c.l2norm):
            self.own_scales(st)[lane] = rstd * select(lane < BC, scale, Float32(1.0))
        r = place[1] * BC + (lane & (BC - 1))
        active = select(r < left, self.activated(beta.to(Float32)), Float32(0.0))
        if lane < BC:
            store_relaxed((sBeta.iterator + r).toint(), active)

    def own_scales(self, st: Any) -> cute.Tensor:
        """The warp's factors of q, then of k, by token of its block."""
        return st.rstd.get_tensor(cute.make_layout((2 * BC, self.config.build.warps)))[
            None, pipe.index_of_warp()
        ]

    def words(self, st: Any, slot: Any, place: Any) -> Any:
        """Words of q, k and E, and this thread's first one in q and k, and in E.

        32-bit words of the tiles: a pair of channels each, 32 a row of 128 bytes. The 128-byte swizzle puts the
        word of row t at ``word ^ 4 (t % 8)``.
        """
        half, block = place
        own = half * (BT * 32) + block * (BC * 32) + (pipe.thread_again() & 31)
        wQ = self.Q.words(st.q, Int32) if self.config.reads_q else None
        wK, wE = self.Q.words(st.k, Int32), self.E.words(st.g, Int32)
        return wQ, wK, wE, own + slot * (self.Q.stage_bytes // 4), own + slot * (self.G.stage_bytes // 4)

    @cute.jit
    def forwards(
        self, st, sBeta: cute.Tensor, slot: Int32, place, decays, scale: Float32, E: cute.Tensor,
    ):  # fmt: skip
        """q and g of a block of tokens and 64 channels of one slot become qE and kE; returns its a, and k if at hand.

        E: decay of the chunk before the block. Words are read ahead where registers are left: no load may pass a
        store.
        """
        c, n = self.config, self.config.batch
        shift, decay = decays
        wQ, wK, wE, word, word_E = self.words(st, slot, place)
        sScale = self.own_scales(st) if const_expr(c.l2norm) else None
        own_beta = cute.local_tile(sBeta, (BC,), (place[1],))
        step = BC // 2 if const_expr(c.is_tight and not c.wide_g) else BC
        a = cute.make_rmem_tensor((BC, 2), Float32)
        k = q = None
        for first in cutlass.range_constexpr(0, BC, step):
            for t in cutlass.range_constexpr(first, first + step, 4):
                g = self.gates(st, slot, place, range(t, t + 4))
                for u in cutlass.range_constexpr(4):
                    for e in cutlass.range_constexpr(2):
                        a[t + u, e] = decay.of(g[u][e], shift[e])
            if const_expr(c.wide_g):
                self.meet()
            if const_expr(not c.is_tight):
                k = [wK[at(word, t)] for t in range(BC)]
                q = [wQ[at(word, t)] for t in range(BC)] if const_expr(c.reads_q) else None
            for b in cutlass.range_constexpr(first, first + step, n):
                kb, sk = self.batch_of(k, wK, word, b), self.scales(sScale, BC + b, Float32(1.0))
                sb = load_relaxed((own_beta.iterator + b).toint(), n)
                if const_expr(c.reads_q):
                    qb, sq = self.batch_of(q, wQ, word, b), self.scales(sScale, b, scale)
                for u in cutlass.range_constexpr(n):
                    for e in cutlass.range_constexpr(2):
                        E[e] = E[e] * a[b + u, e]
                    wE[at(word_E, b + u)] = self.scaled(kb[u], -(sk[u] * sb[u]), E)
                    if const_expr(c.reads_q):
                        wQ[at(word, b + u)] = self.scaled(qb[u], sq[u], E)
        return a, k

    @cute.jit
    def backwards(self, st, slot: Int32, place, a: cute.Tensor, k, R: cute.Tensor):
        """k of a block becomes kR; R: decay of the chunk after the block."""
        n = self.config.batch
        _, wK, _, word, _ = self.words(st, slot, place)
        sScale = self.own_scales(st) if const_expr(self.config.l2norm) else None
        read = lambda b: (self.batch_of(k, wK, word, b), self.scales(sScale, BC + b, Float32(1.0)))
        ahead = read(BC - n)
        for b in cutlass.range_constexpr(BC - n, -1, -n):
            kb, sk = ahead
            kR = [None] * n
            for u in cutlass.range_constexpr(n - 1, -1, -1):
                kR[u] = self.scaled(kb[u], sk[u], R, exact=True)
                for e in cutlass.range_constexpr(2):
                    R[e] = R[e] * a[b + u, e]
            if const_expr(b > 0):
                ahead = read(b - n)
            for u in cutlass.range_constexpr(n):
                wK[at(word, b + u)] = kR[u]

    def batch_of(self, words: Any, wX: cute.Tensor, word: Any, first: int) -> list[Any]:
        """The words of a batch of tokens, read here unless they are at hand."""
        tokens = range(first, first + self.config.batch)
        return [wX[at(word, t)] if words is None else words[t] for t in tokens]

    def scaled(self, word: Any, scale: Any, x: Any, *, exact: bool = False) -> Any:
        """A pair of channels times a scale and a pair of decays, rounded; in bf16 their product is rounded before,
        unless ``exact``."""
        if self.io is cutlass.BFloat16 and not exact:
            return product(word, pack(x[0] * scale, x[1] * scale, self.io), self.io)
        u = unpack(word, self.io)
        return pack(*(u[e] * scale * x[e] for e in range(2)), self.io)

    def row_scalars(self, scalars: Any, place: Any, token: Any, length: Any) -> tuple[Any, Any]:
        """As they are in memory: a lane's q_rstd or, from lane 16 on, k_rstd of the chunk at ``token``, and beta.

        Of the nearest token where the chunk has none.
        """
        mBeta, mQr, mKr, b, start, hv, h = scalars
        c = self.config
        lane = pipe.thread_again() & 31
        t = token + place[1] * BC + (lane & (BC - 1))
        t = start + cutlass.max(cutlass.min(t, length - 1), 0)
        rstd = Float32(0.0)
        if c.l2norm:
            which = Int64(cutlass.select_(lane < BC, mQr.iterator.toint(), mKr.iterator.toint()))
            pointer = cute.make_ptr(Float32, which, cute.AddressSpace.gmem, assumed_align=4)
            rstd = cute.make_tensor(pointer, mQr.layout)[b, t, h]
        return rstd, mBeta[b, t, hv]

    @cute.jit
    def meet(self):
        """Barrier of BUILD: fp32 gates have been read where the operand of the other half of the channels will lie."""
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=self.config.build.threads)

    @cute.jit
    def clear(self, st, padded, slot: Int32, place, left: Int32):
        """Zero the warp's rows past the end of the padded tiles, 64 x 64 parts of them shared by the halves."""
        c = self.config
        half, block = place
        lane = pipe.thread_again() & 31
        blocks = [
            (getattr(st, name), tile, u)
            for name, tile in padded
            for u in range(tile.rows * tile.cols // BT**2)
        ]
        for i in cutlass.range_constexpr(len(blocks)):
            field, tile, u = blocks[i]
            words = tile.words(field, Int32)
            base = slot * (tile.stage_bytes // 4) + u * (BT * 32) + block * (BC * 32) + lane
            if half == i % (c.K // 64):
                for t in cutlass.range_constexpr(BC):
                    if block * BC + t >= left:
                        words[base + 32 * t] = Int32(0)

    def scales(self, sScale: Any, first: int, constant: Any) -> list[Any]:
        """Of a batch of tokens; the constant where there are none."""
        n = self.config.batch
        if sScale is None:
            return [constant] * n
        found = cute.make_rmem_tensor(n, Float32)
        cute.autovec_copy(cute.local_tile(sScale, (n,), (first // n,)), found)
        return [found[i] for i in range(n)]

    def gates(self, st: Any, slot: Any, place: Any, tokens: range) -> list[Any]:
        """This thread's raw gates: per token of the block, the two channels."""
        if not self.config.wide_g:
            _, _, wE, _, word_E = self.words(st, slot, place)
            return [unpack(wE[at(word_E, t)], self.io) for t in tokens]
        half, block = place
        lane = pipe.thread_again() & 31
        wG = self.G.words(st.g, Int64)
        word = (half * 2 + (lane >> 4)) * (BT * 16) + block * (BC * 16) + (lane & 15)
        word = word + slot * (self.G.stage_bytes // 8)
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

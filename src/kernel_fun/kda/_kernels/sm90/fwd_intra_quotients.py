"""Scores as quotients of decays, for gates with a bound: the passes and blocks of fwd_intra, from raw words to Aqk and L.

Maths, tokens i >= j of 64 in blocks I, J of 16:

    f_i     = a[16 I] ... a[i]                           fp32, in [2^-116, 1]: see LEAST_BOUND
    S[i, j] = sum_c (x_ic f_i) (P_IJ k_jc / f_j),  x = q or k
    P_IJ    = a[16 J] ... a[16 I - 1]                    the decay from the start of J to that of I; 1 if I = J

Each product of an input with f or 1 / f is fp32 and rounded once, P and its product with k / f once each. f and 1 / f of a
token are of it and of tokens before it, so what a row is does not depend on later ones. A block is one product, where
:mod:`fwd_intra_products` needs one a level: that its factors may not exceed 1 is what gates without a bound cost.

f and P are carried times MIDDLE, k / f over it, so that q f and k / f are between 2^-87 and 2^87 times q and k, and P may fall
to 2^-155 before it is 0: a decay between two tokens that is lost is below 2^-39. The sums of far blocks are times MIDDLE, their
rows' factors over it. Elements above the diagonal of a block have no bound and may be inf; nothing reads them.

Plain methods are Python, traced inline; the others hold branches of the kernel.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from kernel_fun._cute.decay import Gate
from kernel_fun._cute.warp import (
    bits_of,
    load2,
    load4,
    matrices,
    mma,
    pack,
    put_global,
    put_word,
    select,
    store2,
    unpack,
    word_at,
)
from kernel_fun.kda._kernels.sm90.fwd_intra_config import (
    BC,
    BT,
    HALF_WORDS,
    PASS,
    ROW_WORDS,
    SLOT_WORDS,
    SOLVERS,
)
from kernel_fun.kda._kernels.sm90.fwd_intra_scores import Scores, decays_of

LEAST_BOUND = -5.0
"""Of gates: 16 decays of e^-5 are 2^-115.5."""
BLOCK = 16
BLOCKS = BT // BLOCK
MIDDLE = 2.0**29


class Quotients(Scores):
    """A warp has a block of 16 tokens and half of the channels; a lane two neighbouring channels of all 16."""

    def begin(self) -> None:
        """Nothing of an item comes before its tiles."""

    def block(self) -> Int32:
        return self.warp & (BLOCKS - 1)

    def half(self) -> Int32:
        return self.warp // BLOCKS

    def own_rows(self) -> tuple[Int32, int, list[Any], list[Any]]:
        own: list[Any] = [self.half() * HALF_WORDS]
        return BLOCK * self.block(), BLOCK, own, own

    def scores(self, gate: Gate, scale: Float32, valid: Int32) -> tuple[()]:
        """Norms and operands of the warp's block and channels."""
        c, p, block = self.c, self.half(), self.block()
        slot = p * HALF_WORDS + block * (2 * SLOT_WORDS)
        acc = cute.make_rmem_tensor(6, Float32)
        acc.fill(0.0)
        for n in range(2):
            self.norms(slot + n * SLOT_WORDS, acc, 3 * n)
        self.put_sums(acc)
        bias = (
            load2(self.parameters.iterator.toint() + 4 * (p * PASS + 2 * self.lane))
            if c.has_dt_bias
            else None
        )
        # address of channels 2 lane, 2 lane + 1 in row i: 16-byte unit u of a row stands at u ^ (i mod 8)
        first = self.at + 4 * (slot + self.lane)
        rows = [(first ^ (i % BC * (4 * ROW_WORDS + 16))) + i // BC * (4 * SLOT_WORDS) for i in range(BLOCK)]
        g, q, k = ([word_at(row, 4 * at) for row in rows] for at in (c.g_words, 0, c.k_words))
        cute.arch.sync_warp()  # every row has been read for its norms
        decays = decays_of(gate, bias)
        f = [Float32(MIDDLE)] * 2
        for i, row in enumerate(rows):
            raw = unpack(g[i], self.g_tile.dtype)
            f = [x * decay(y) for x, decay, y in zip(f, decays, raw, strict=True)]
            r = [cute.arch.rcp_approx(x) for x in f]
            for at, word, by in ((0, q[i], f), (c.k_words, k[i], f), (c.g_words, k[i], r)):
                x, y = unpack(word, self.io)
                put_word(row, 4 * at, pack(x * by[0], y * by[1], self.io))
        D = [bits_of(x * (1 / MIDDLE)) for x in f]
        store2(self.D.iterator.toint() + 4 * (block * c.K + p * PASS + 2 * self.lane), D)
        return ()

    @cute.jit
    def put_sums(self, acc: cute.Tensor):
        """The sums of :meth:`norms` over the warp's channels, for :meth:`near` to add."""
        scales = self.scales
        if (self.r >> 1) == self.t:
            at = self.half() * (3 * BT) + BLOCK * self.block() + self.r
            for n in cutlass.range_constexpr(3):
                for half in cutlass.range_constexpr(2):
                    scales[at + n * BT + BC * half] = acc[3 * half + n]

    def put_block(self) -> None:
        """No block is done before all warps are."""

    def near(self, scale: Float32, valid: Int32):
        """The 16 x 16 block of Aqk and L on the diagonal, by its warp: its eights (0, 0), (1, 0) and (1, 1)."""
        row, scales = BLOCK * self.warp + (self.lane & (BLOCK - 1)), self.scales
        self.settle_beta(row)
        diagonal = self.scale_of_row(row, scale, valid)
        cute.arch.sync_warp()
        acc = cute.make_rmem_tensor(12, Float32)
        acc.fill(0.0)
        eights = (0, 0), (1, 0), (1, 1)
        a_at, b_at = ([at(2 * self.warp + n) for n in range(2)] for at in (self.rows_of, self.columns_of))
        for p in range(self.c.passes):
            for step in range(PASS // 32):
                to, on = 64 * step, 4 * HALF_WORDS * p
                b = [matrices((b_at[n] ^ to) + on) for n in range(2)]
                for half in range(2):
                    a = [matrices((a_at[n] ^ (to + 32 * half)) + on) for n in range(2)]
                    for n, (i, j) in enumerate(eights):
                        mma(acc, 4 * n, a[i], b[j][2 * half : 2 * half + 2], self.io)
        i, j = BLOCK * self.warp + self.r, BLOCK * self.warp + 2 * self.t
        rows = [[scales[m * BT + i + BC * n] for m in range(2)] for n in range(2)]
        columns = [self.column_scales(j + BC * n) for n in range(2)]
        below = [self.r > 2 * self.t + e for e in range(2)]
        self.Aqk_words[self.Aqk_word(i, j + BC)] = Int32(0)
        for n, (I, J) in enumerate(eights):
            x = [acc[4 * n + e] for e in range(4)]
            if I == J:
                x = [select(below[e], x[e], Float32(0.0)) for e in range(2)] + x[2:]
            self.put_q(i + BC * I, j + BC * J, x[0], x[1], rows[I][0], columns[J])
            self.put_k(i + BC * I, j + BC * J, x[2], x[3], rows[I][1], columns[J])
        cute.arch.sync_warp()
        self.put_diagonal(row, diagonal)

    @cute.jit
    def decays_between(self, mTotal: cute.Tensor):
        """P of every far block, and the rows of total, by 128 threads.

        A thread has two channels: of the second half for P of the last block and what comes after each block, of the
        first half for the rest. Words of 32 channels stand in the order of B operands: lane t of a row finds its four
        words of two products together.
        """
        c, pairs = self.c, self.c.K // 2
        thread = 32 * (self.warp - SOLVERS) + self.lane
        pair = thread % pairs
        at = self.D.iterator.toint() + 8 * pair
        D = [load2(at + 4 * c.K * b) for b in range(BLOCKS)]
        word = (pair & ~15) + 4 * (pair & 3) + ((pair >> 2) & 3)
        to, row = mTotal.iterator.toint() + 8 * pair, 4 * c.K
        if thread >= pairs:
            self.put_decays(word, D, BLOCKS - 1)
            x = [Float32(1.0), Float32(1.0)]
            for b in cutlass.range_constexpr(BLOCKS - 1, -1, -1):
                put_global(to + row * (1 + BLOCKS + b), [bits_of(y) for y in x])
                x = [y * d for y, d in zip(x, D[b], strict=True)]
        else:
            for I in cutlass.range_constexpr(1, BLOCKS - 1):
                self.put_decays(word, D, I)
            x = [Float32(1.0), Float32(1.0)]
            for b in cutlass.range_constexpr(BLOCKS):
                put_global(to + row * (1 + b), [bits_of(y) for y in x])
                x = [y * d for y, d in zip(x, D[b], strict=True)]
            put_global(to, [bits_of(y) for y in x])

    def put_decays(self, word: Int32, D: list[Any], I: int) -> None:
        """P of the far blocks (I, J): warps of :meth:`blocks` have the first one, the next two, the last three."""
        between = self.between
        x = [Float32(MIDDLE), Float32(MIDDLE)]
        for J in range(I - 1, -1, -1):
            x = [y * d for y, d in zip(x, D[J], strict=True)]
            between[word + (I * (I - 1) // 2 + J) * (self.c.K // 2)] = pack(x[0], x[1], self.io)

    def block_decays(self, f_at: Int32, p: int, j: int) -> list[Any]:
        """Of 32 channels: P, for both blocks of eight on the right."""
        return [load4(f_at + p * (2 * PASS) + 64 * j)] * 2

    def sums_of_row(self, row: Int32) -> list[Float32]:
        return [self.scales[n * BT + row] + self.scales[(3 + n) * BT + row] for n in range(3)]

    def far_row(self, n: int, i: Int32) -> Float32:
        return self.scales[n * BT + i] * (1 / MIDDLE)

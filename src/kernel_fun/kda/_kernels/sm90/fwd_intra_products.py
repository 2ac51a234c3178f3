"""Scores as products of decays, for any gate: the passes and blocks of fwd_intra, from raw words to Aqk and L.

    f_s, r_s = running products of a in aligned groups of s tokens    fp32, see kernel_fun._cute.scan
    S[i, j]  = sum_c (x_ic f_s[i]) (k_jc r_s[j]),  x = q or k         i right, j left in a group of 2 s; s = 1, 2, 4
    S[i, j]  = sum_c (x_ic f_8[i]) (k_jc r_8[j] P)                    i, j of blocks I > J of 8 tokens; P is the
                                                                      decay of the blocks between them
               f, r, P and their products rounded to io, fp32 accumulators; no factor is above 1

    warp b    tokens 8 b .. 8 b + 7, its block; a lane has two neighbouring channels of all 8
    pass      level 1 from registers, as diagonals of products; levels 2 and 4 in one product of operands over the raw
              rows, then q f_8 where q was, k f_8 where k was, k r_8 where g was
    blocks    warps 0-3: the 8 x 8 block below each 16 x 16 diagonal;  4-7: P of every other pair
              warps 0-5: 16 x 16 blocks, P times k r_8 in registers

Plain methods are Python, traced inline; the others hold branches of the kernel.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from kernel_fun._cute import scan, trisolve
from kernel_fun._cute.warp import (
    as_float,
    bits_of,
    load2,
    load4,
    matrices,
    mma,
    mma_k8,
    pack,
    product,
    put_global,
    put_word,
    row_of_matrix,
    select,
    store2,
    store4,
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
    WARPS,
)
from kernel_fun.kda._kernels.sm90.fwd_intra_scores import Scores, decays_of


class Products(Scores):
    """A warp has a block of eight tokens; a lane two neighbouring channels of all eight."""

    def begin(self) -> None:
        """What of an item does not wait for its tiles."""
        self.settle_beta(self.own_row())
        self.clear_diagonal()

    def own_row(self) -> Int32:
        """A row of the warp, by eight lanes."""
        return BC * self.warp + (self.lane & 7)

    def own_rows(self) -> tuple[Int32, int, list[Any], list[Any]]:
        """The warp's first row and how many; words to what it reads of a row of q or k, and of g."""
        halves = self.c.passes, self.g_tile.smem_bytes // (4 * HALF_WORDS)
        return BC * self.warp, BC, *([p * HALF_WORDS for p in range(n)] for n in halves)

    @cute.jit
    def scores(self, gate: cutlass.Constexpr[Any], scale: Float32, valid: Int32):
        """Levels 1, 2 and 4 of Aqk and L, which stay in registers, and the operands of all wider blocks."""
        acc = cute.make_rmem_tensor(4 + 3 + BC, Float32)  # levels 2 and 4, three norms, traces of level 1
        acc.fill(0.0)
        for p in cutlass.range_constexpr(self.c.passes):
            self.one_pass(p, gate, acc)
        self.put_sums(acc)
        pair = self.sum_of_traces()
        row = self.own_row()
        self.put_diagonal(row, self.scale_of_row(row, scale, valid))
        return acc, pair

    def clear_diagonal(self) -> None:
        """Zeros to the warp's rows of its 16 x 16 block of Aqk, of which those above the diagonal remain."""
        i, unit = BC * self.warp + (self.lane & 7), (self.warp & 6) + ((self.lane >> 3) & 1)
        store4(self.Aqk_words.iterator.toint() + i * 128 + ((unit ^ (i & 7)) << 4), [Int32(0)] * 4)

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
        self.norms(slot, acc, 4)
        # address of channels 2 lane, 2 lane + 1 in row i: 16-byte unit u of a row stands at u ^ i
        first = self.at + 4 * (slot + self.lane)
        self.row = [first ^ (i * (4 * ROW_WORDS + 16)) for i in range(BC)]
        decays = decays_of(gate, bias)
        a = []
        for i in cutlass.range_constexpr(BC):
            a.append([decay(x) for decay, x in zip(decays, self.raw_gate(p, i), strict=True)])
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
        # a row is 32 channels: the first 32 of the pass for every token, then the others; unit u of row i stands at u ^ i
        half = (2 * p + (self.lane >> 4)) * HALF_WORDS + self.warp * SLOT_WORDS + 2 * (self.lane & 15)
        return load2((self.at + 4 * (half + self.c.g_words)) ^ (i * (4 * ROW_WORDS + 16)))

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

    @cute.jit
    def near(self, scale: Float32, valid: Int32):
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

    def block_decays(self, f_at: Int32, p: int, j: int) -> Any:
        """Of 32 channels: the decays between two blocks and two."""
        return [load4(f_at + p * (2 * PASS) + n * (2 * self.c.K) + 64 * j) for n in range(4)]

    def sums_of_row(self, row: Int32) -> list[Float32]:
        return [self.scales[n * BT + row] for n in range(3)]

    def far_row(self, n: int, i: Int32) -> Float32:
        """Factor of row i of :meth:`blocks`: of q (n = 0) or k."""
        return self.scales[n * BT + i]


def place_of(even: int, J: int) -> int:
    """Place of the pair of blocks (even, J) among the decays between blocks; (even + 1, J) is two behind.

    A warp has four neighbours: 0 (2-3, 0-1);  1, 2 (4-5, 0-1), (4-5, 2-3);  3, 4, 5 (6-7, 0-1), (6-7, 2-3), (6-7, 4-5).
    """
    warp = {2: 0, 4: 1, 6: 3}[even] + J // 2
    return 4 * warp + J % 2


def pairwise(x: list[Float32]) -> Float32:
    """The sum of a power of two of values."""
    return x[0] if len(x) == 1 else pairwise([y + z for y, z in zip(x[::2], x[1::2], strict=True)])

"""What both forms of fwd_intra's scores share, as its file names it: norms, scales, blocks, where elements go.

The forms are :mod:`fwd_intra_products` and :mod:`fwd_intra_quotients`. Plain methods are Python, traced inline; the others
hold branches of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from kernel_fun._cute import trisolve
from kernel_fun._cute.compile import DTYPES
from kernel_fun._cute.decay import FLT_MAX, LOG2E, NO_DECAY, Gate, cut, exp2
from kernel_fun._cute.tile import Tile
from kernel_fun._cute.warp import (
    as_float,
    bits_of,
    load2,
    matrices,
    mma,
    mma_k8,
    pack,
    product,
    row_of_matrix,
    select,
    unpack,
)
from kernel_fun.kda._kernels.sm90.fwd_intra_config import (
    BC,
    BT,
    FAR,
    HALF_WORDS,
    PASS,
    ROW_WORDS,
    SLOT_WORDS,
)

EPS = 1e-6
LARGEST_RATE = 2.0**80
"""Of bounded: exp(A_log) log2 e."""
SMALLEST_BOUND = 2.0**-100
"""Of bounded, in place of 0: its decays are 1 in fp32 as well, and its inverse is finite."""


class Scores:
    """Of a kernel with a config ``c``, a dtype ``io``, a tile of g, and views of shared memory: its ``lanes``."""

    c: Any
    io: Any
    g_tile: Tile
    warp: Int32
    lane: Int32
    r: Int32
    t: Int32
    at: Int32
    words: cute.Tensor
    L: cute.Tensor
    D: cute.Tensor
    beta: cute.Tensor
    parameters: cute.Tensor
    place: cute.Tensor
    between: cute.Tensor
    Aqk_words: cute.Tensor
    Aqk_values: cute.Tensor
    scales: cute.Tensor

    def own_rows(self) -> tuple[Int32, int, list[Any], list[Any]]:
        """The warp's first row and how many; words to what it reads of a row of q or k, and of g."""
        raise NotImplementedError

    def sums_of_row(self, row: Int32) -> list[Float32]:
        """What :meth:`norms` gave of a row over all channels."""
        raise NotImplementedError

    def block_decays(self, f_at: Int32, p: int, j: int) -> list[Any]:
        """Of 32 channels: the decays between two blocks and two, of four pairs or of two blocks on the right."""
        raise NotImplementedError

    def far_row(self, n: int, i: Int32) -> Float32:
        """Factor of row i of :meth:`blocks`: of q (n = 0) or k."""
        raise NotImplementedError

    def settle_beta(self, row: Int32) -> None:
        """beta of a row of the warp, from what is in memory to its fp32 value."""
        beta = self.beta
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
    def blank(self, valid: Int32):
        """Rows of the warp past the last token: q and k 0, g without decay, whatever TMA brought."""
        c, words = self.c, self.words
        row, rows, of_x, of_g = self.own_rows()
        no_decay = self.no_decay_word()
        for i in cutlass.range(cutlass.max(valid - row, 0), rows, unroll=1):
            at = (row + i) * ROW_WORDS + self.lane
            for n in cutlass.range_constexpr(len(of_x)):
                words[at + of_x[n]] = Int32(0)
                words[at + of_x[n] + c.k_words] = Int32(0)
            for n in cutlass.range_constexpr(len(of_g)):
                words[at + of_g[n] + c.g_words] = no_decay
        cute.arch.sync_warp()

    def no_decay_word(self) -> Int32:
        """One or two raw gates of no decay."""
        x = Float32(NO_DECAY[self.c.gate])
        return bits_of(x) if self.c.g == "float32" else pack(x, x, self.g_tile.dtype)

    def norms(self, slot: Int32, acc: cute.Tensor, to: int) -> None:
        """q.k, q.q and k.k of the rows of a slot over the channels of a pass, added to acc[to : to + 3].

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
        for n, e in enumerate((0, 4, 2), to):
            acc[n] = acc[n] + self.diagonal(sums, e)

    def diagonal(self, sums: cute.Tensor, e: int) -> Float32:
        """Element (r, r) of the 8 x 8 product whose first row of fragments is sums[e : e + 2], if t = r / 2."""
        return select((self.r & 1) == 1, sums[e + 1], sums[e])

    def scale_of_row(self, row: Int32, scale: Float32, valid: Int32) -> Float32:
        """Factors of row and column ``row`` to where its sums were, q_rstd to the place of beta. Gives Aqk[row, row]."""
        scales = self.scales
        exists = row < valid
        beta = as_float(self.beta[row])
        qk, qq, kk = self.sums_of_row(row)
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
        return qk * of_q * column

    def put_diagonal(self, row: Int32, x: Float32) -> None:
        self.Aqk_values[2 * self.Aqk_word(row, row) + (row & 1)] = x.to(self.io)

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

    def rows_of(self, block: Int32) -> Int32:
        """Address for ldmatrix of an A operand: q f of a block's tokens, then k f, 16 channels."""
        m = self.lane >> 3
        slot = self.at + block * (4 * SLOT_WORDS)
        return slot + (m & 1) * (4 * self.c.k_words) + row_of_matrix(self.lane, m >> 1)

    def columns_of(self, block: Int32) -> Int32:
        """Address for ldmatrix of two B operands: k r of a block's tokens, 32 channels."""
        slot = self.at + 4 * self.c.g_words + block * (4 * SLOT_WORDS)
        return slot + row_of_matrix(self.lane, self.lane >> 3)

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
        f_at = self.between.iterator.toint() + w * (4 * c.between_words // FAR) + 16 * self.t
        columns = [self.column_scales(BC * (left + n) + 2 * self.t) for n in range(2)]
        rows = [[self.far_row(m, BC * (top + n) + self.r) for m in range(2)] for n in range(2)]
        steps = [(p, j) for p in range(c.passes) for j in range(PASS // 32)]
        ahead = *operands, self.block_decays(f_at, *steps[0])
        for i in cutlass.range_constexpr(len(steps)):
            a, b, f = ahead
            if cutlass.const_expr(i + 1 < len(steps)):
                ahead = (
                    *self.block_operands(a_at, b_at, *steps[i + 1]),
                    self.block_decays(f_at, *steps[i + 1]),
                )
            self.multiply(acc, a, b, f)
        for n in cutlass.range_constexpr(4):
            i, j = BC * (top + (n >> 1)) + self.r, BC * (left + (n & 1)) + 2 * self.t
            self.put_q(i, j, acc[4 * n], acc[4 * n + 1], rows[n >> 1][0], columns[n & 1])
            self.put_k(i, j, acc[4 * n + 2], acc[4 * n + 3], rows[n >> 1][1], columns[n & 1], far=True)

    def multiply(self, acc: cute.Tensor, a: Any, b: Any, f: Any) -> None:
        """Two blocks times two over 32 channels. ``f``: decays of the four pairs, or of the two blocks of ``b``."""
        y: list[Any] = []
        for n in range(4):
            if n < len(f):
                y.append([product(x, bits_of(z), self.io) for x, z in zip(b[n & 1], f[n], strict=True)])
            for half in range(2):
                mma(acc, 4 * n, a[n >> 1][half], y[n % len(f)][2 * half : 2 * half + 2], self.io)

    def block_operands(self, a_at: Int32, b_at: Int32, p: int, j: int) -> tuple[Any, Any]:
        """Of 32 channels: A of two blocks and B of two."""
        at, slot = 4 * HALF_WORDS * p, 4 * SLOT_WORDS
        a = [
            [matrices((a_at ^ (64 * j + 32 * half)) + (slot * n + at)) for half in range(2)] for n in range(2)
        ]
        b = [matrices((b_at ^ (64 * j)) + (slot * n + at)) for n in range(2)]
        return a, b


def decays_of(gate: Gate, bias: Any) -> list[Callable[[Float32], Float32]]:
    """From raw gates of two channels, ``bias`` theirs or None, to a.

    In bounded bias and slope are one shift, and log2 a is 1 / (e / bound + 1 / bound): two instructions fewer. The
    shift's rounding is one of the bias. The rate is cut where a product with it would overflow, far beyond where it
    makes a step of the gate, and the shift so that a gate of -inf meets no infinity of the other sign.
    """
    if gate.kind != "bounded":
        return [lambda x, e=e: gate.decay(x if bias is None else x + bias[e]) for e in range(2)]
    inverse = cute.arch.rcp_approx(cutlass.min(gate.bound, Float32(-SMALLEST_BOUND)))

    def decay(x: Float32, e: int) -> Float32:
        y = x * rate if bias is None else x * rate + shifts[e]
        return exp2(cute.arch.rcp_approx(exp2(y) * inverse + inverse))

    rate = cut(gate.rate, LARGEST_RATE)
    shifts = [] if bias is None else [cut(b * rate, FLT_MAX) for b in bias]
    return [lambda x, e=e: decay(x, e) for e in range(2)]

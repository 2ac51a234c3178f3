"""The gradient sweeps of one chunk over its dyadic levels, channels on rows and tokens on columns.

A warp owns 16 channels and walks the 64 tokens in blocks of 16. Fragment of a block, lane = 4 r + c, value
e = p + 2 row + 4 tile: channel r + 8 row, token 2 c + p + 8 tile; two values with p = 0, 1 make the word
row + 2 tile. That is the accumulator of ``mma.sync`` m16n8k16 (tile 0, 1) and, rounded, its A operand.

At a level of group size s every token is right (query side) or left (key side) in its group of 2 s. With the
rounded operands Q = io(q f), B = io(beta k f) of right tokens and K = io(k r) of left ones, and dAqk, dAkk
strictly lower,

    Pq = K dAqk^T, Pk = K dAkk^T     at right tokens        Pc = Q dAqk + B dAkk     at left tokens
    dq += f Pq      rk += f Pk       dg += Q Pq + B Pk                               at right tokens
    dk += r Pc                       dg -= K Pc                                      at left tokens

dg takes the operands as the tensor core saw them: each pair of tokens then enters it twice with the same value,
once with either sign, and leaves a sum over both exactly.

Plain Python, traced inline; ``None`` in a list of values stands for 0 (sums) or 1 (factors).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, cute

from kernel_fun._cute.scan import times
from kernel_fun._cute.warp import PTX_TYPE, matrices, pack, select, unpack

BLOCK = 16
VALUES = 8
"""Values of a block in one lane."""
ROW_BYTES = 128
BLOCK_BYTES = BLOCK * ROW_BYTES
"""A block of 16 tokens in a tile with rows of 128 bytes, one row a token."""

Values = list[Any]


def token(e: int) -> int:
    """Which of the lane's four tokens of a block value e belongs to: p + 2 tile."""
    return e % 2 + 2 * (e // 4)


def row(e: int) -> int:
    return e // 2 % 2


def add(acc: Any, x: Any) -> Any:
    """acc + x, where None stands for 0."""
    return x if acc is None else acc + x


def fma(acc: Any, x: Any, y: Any) -> Any:
    """acc + x y, where None stands for 0 in acc and for 1 in the factors."""
    return add(acc, times(x, y))


def matrices_transposed(address: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """:func:`kernel_fun._cute.warp.matrices`, each 8 x 8 matrix transposed."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def put_matrices_transposed(address: Int32, words: Sequence[Int32]) -> None:
    """The inverse of :func:`matrices_transposed`."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def put_matrices(address: Int32, words: Sequence[Int32]) -> None:
    """The inverse of :func:`kernel_fun._cute.warp.matrices`."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def load_word(address: Int32) -> Int32:
    ptx = "ld.shared.b32 {$w0}, [{$r0}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[address])


def load2(address: Int32) -> tuple[Float32, Float32]:
    """8 bytes of shared memory as two fp32 values."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[address]
    )


def load_words(address: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """16 bytes of shared memory as four words."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def put2(address: Int32, x: Sequence[Any]) -> None:
    """Two fp32 values to 8 bytes of shared memory."""
    cute.arch.inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *x])


def put4(address: Int32, x: Sequence[Any]) -> None:
    """Four fp32 values to 16 bytes of shared memory."""
    cute.arch.inline_ptx(
        "st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *x]
    )


def mma_k8(c: Sequence[Any], a: Sequence[Int32], b: Int32, dtype: Any) -> tuple[Any, ...]:
    """c + A B, m16n8k8 of 16-bit operands: words a of one tile, one word b."""
    kind = PTX_TYPE[dtype]
    ptx = (
        f"mma.sync.aligned.m16n8k8.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        "{{$r0}, {$r1}}, {{$r2}}, {{$r3}, {$r4}, {$r5}, {$r6}};"
    )
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32] * 4, read_only_args=[*a, b, *c])


def mma_k16(c: Sequence[Any], a: Sequence[Int32], b: Sequence[Int32], dtype: Any) -> tuple[Any, ...]:
    """c + A B, m16n8k16 of 16-bit operands."""
    kind = PTX_TYPE[dtype]
    ptx = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
    )
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *c])


def zeros() -> tuple[Any, ...]:
    return (Float32(0.0),) * 4


def pack_values(x: Values, dtype: Any) -> list[Int32]:
    """A block's values rounded to four words."""
    return [pack(x[2 * w], x[2 * w + 1], dtype) for w in range(VALUES // 2)]


def unpack_values(words: Sequence[Int32], dtype: Any) -> Values:
    return [x for w in words for x in unpack(w, dtype)]


class Lanes:
    """What a lane keeps of its place; addresses are bytes to a 1024-byte aligned tile of rows of 128 bytes."""

    def __init__(self, lane: Int32) -> None:
        self.lane, self.r, self.c = lane, lane // 4, lane % 4
        m, i = lane // 8, lane % 8
        self.odd = (self.c % 2 == 1, self.c // 2 == 1)
        """Is the lane's pair of tokens right at level 2, at level 4?"""
        one = [select(x, Float32(1.0), Float32(0.0)) for x in self.odd]
        self.right = tuple(one)
        self.left = tuple(Float32(1.0) - x for x in one)
        self.sign = tuple(select(x, Int32(0), Int32(-0x7FFF8000)) for x in self.odd)
        """Flips both values of a word at left tokens."""
        self.masks = tuple(self.mask(s) for s in (1, 2))
        self.rows_first = self.unit(8 * (m // 2) + i, m % 2)
        """Tokens, then 16-byte units: (0-7, u), (0-7, u + 1), (8-15, u), (8-15, u + 1)."""
        self.units_first = self.unit(8 * (m % 2) + i, m // 2)
        """Units, then tokens."""
        below = 2 * self.c + 1
        self.pair = below * ROW_BYTES + below * 16 + 4 * self.c
        """Word of elements (2 c + 1, 2 c) and (2 c + 1, 2 c + 1) of an 8 x 8 matrix on the diagonal."""

    @staticmethod
    def unit(i: Int32, unit: Int32) -> Int32:
        return i * ROW_BYTES + (unit ^ (i % 8)) * 16

    def mask(self, shift: int) -> Int32:
        """Elements of a B word (k = 2 c + p, n = r) in different halves of a group of 2^(shift + 1) tokens."""
        low, high = (((2 * self.c + p) ^ self.r) >> shift == 1 for p in (0, 1))
        return select(low, Int32(0xFFFF), Int32(0)) | select(high, Int32(-0x10000), Int32(0))


def factors(a: Values, lanes: Lanes) -> tuple[Values, Values, Values]:
    """f and r of size 16 of a block, and its group's product by channel row."""
    f, r, D = list(a), [None] * VALUES, [[None, None], [None, None]]
    for pair in PAIRS:
        D[pair[2]][pair[3]] = double_pair(f, r, *pair[:2])
    for n in range(2):
        for pair in PAIRS:
            t, w = pair[2:]
            D[t][w] = double_lanes(f, r, D[t][w], n, pair, lanes)
    return f, r, double_tiles(f, r, D)


PAIRS = tuple((4 * t + 2 * w, 4 * t + 2 * w + 1, t, w) for t in range(2) for w in range(2))
"""(left value, right value, tile, row) of the pairs of tokens in one lane."""


def double_pair(f: Values, r: Values, left: int, right: int) -> Any:
    """Factors of size 1 to 2; returns the pair's product."""
    r[left] = f[right]
    f[right] = f[right] * f[left]
    return f[right]


def double_lanes(f: Values, r: Values, D: Any, n: int, pair: Any, lanes: Lanes) -> Any:
    """Factors of size 2 to 4 (n = 0) or 4 to 8 (n = 1); returns the group's product."""
    other = cute.arch.shuffle_sync_bfly(D, offset=n + 1)
    for_f = select(lanes.odd[n], other, Float32(1.0))
    for_r = select(lanes.odd[n], Float32(1.0), other)
    for e in pair[:2]:
        f[e], r[e] = f[e] * for_f, times(r[e], for_r)
    return D * other


def double_tiles(f: Values, r: Values, D: list[Any]) -> Values:
    """Factors of size 8 to 16; returns the block's product by channel row."""
    for e in range(4):
        f[4 + e], r[e] = f[4 + e] * D[0][row(e)], times(r[e], D[1][row(e)])
    return [D[0][w] * D[1][w] for w in range(2)]


def diagonal_block(address: Int32, b: Any, lanes: Lanes) -> dict[tuple[int, int], Int32]:
    """B words (n tile, k tile) of the symmetric dA + dA^T of block (b, b) of a strictly lower tile."""
    at = address + b * BLOCK_BYTES
    n = matrices((at + lanes.rows_first) ^ (32 * b))
    t = matrices_transposed((at + lanes.units_first) ^ (32 * b))
    return {(0, 0): n[0] | t[0], (0, 1): t[1], (1, 0): n[2], (1, 1): n[3] | t[3]}


def rows_block(address: Int32, R: Any, L: Any, lanes: Lanes) -> tuple[Sequence[Int32], Sequence[Int32]]:
    """B words of block (R, L), n = its rows; one pair of words for each tile of eight of them."""
    x = matrices((address + R * BLOCK_BYTES + lanes.rows_first) ^ (32 * L))
    return x[:2], x[2:]


def columns_block(address: Int32, R: Any, L: Any, lanes: Lanes) -> tuple[Sequence[Int32], Sequence[Int32]]:
    """B words of block (R, L), n = its columns; one pair of words for each tile of eight of them."""
    x = matrices_transposed((address + R * BLOCK_BYTES + lanes.units_first) ^ (32 * L))
    return x[:2], x[2:]


class Block:
    """Levels 1, 2, 4, 8 of one block of 16 tokens.

    ``q``, ``k``: fp32 values. ``beta``: of the lane's four tokens. ``a``: decays. ``dq``, ``dk``, ``dg``: what the
    levels are added to; afterwards with them, and ``rk`` what they add to rk; ``f``, ``r`` are then the factors of
    size 16, ``D`` the block's product by channel row.
    """

    def __init__(
        self,
        q: Values,
        k: Values,
        beta: Values,
        a: Values,
        dq: Values,
        dk: Values,
        dg: Values,
        lanes: Lanes,
        dtype: Any,
    ) -> None:
        self.q, self.k, self.beta, self.lanes, self.dtype = q, k, beta, lanes, dtype
        self.f: Values = list(a)
        self.r: Values = [None] * VALUES
        self.dq, self.dk, self.dg = list(dq), list(dk), list(dg)
        self.rk: Values = [None] * VALUES
        self.D: Values = []

    def sweep(self, dAqk: Int32, dAkk: Int32, b: Any) -> None:
        """``dAqk``, ``dAkk``: addresses of strictly lower (64, 64) tiles."""
        f, r = self.f, self.r
        D = [[None, None], [None, None]]  # [tile][row]
        self.level_1(dAqk, dAkk, b)
        for pair in PAIRS:
            D[pair[2]][pair[3]] = double_pair(f, r, *pair[:2])
        S1, S2 = (diagonal_block(x, b, self.lanes) for x in (dAqk, dAkk))
        for n in range(2):
            self.level_of_lanes(n, S1, S2)
            for pair in PAIRS:
                t, w = pair[2:]
                D[t][w] = double_lanes(f, r, D[t][w], n, pair, self.lanes)
        self.level_8(S1, S2)
        self.D = double_tiles(f, r, D)

    def operand_B(self, f: Values, at: Any) -> list[Int32]:
        """beta k f of values ``at``, rounded."""
        x = [self.k[e] * (self.beta[token(e)] * f[e]) for e in at]
        return [pack(x[i], x[i + 1], self.dtype) for i in range(0, len(x), 2)]

    def level_1(self, dAqk: Int32, dAkk: Int32, b: Any) -> None:
        """The two tokens of a pair: no products of matrices, no rounding."""
        q, k, f = self.q, self.k, self.f
        for t in range(2):
            at = self.lanes.pair + b * BLOCK_BYTES + t * 8 * ROW_BYTES
            aq, ak = (unpack(load_word((x + at) ^ (16 * (2 * b + t))), self.dtype)[0] for x in (dAqk, dAkk))
            for w in range(2):
                L, R = 4 * t + 2 * w, 4 * t + 2 * w + 1
                Pc = f[R] * (q[R] * aq + k[R] * (self.beta[token(R)] * ak))
                term = k[L] * Pc
                self.dq[R] = fma(self.dq[R], f[R], k[L] * aq)
                self.rk[R] = fma(self.rk[R], f[R], k[L] * ak)
                self.dk[L] = add(self.dk[L], Pc)
                self.dg[R] = add(self.dg[R], term)
                self.dg[L] = add(self.dg[L], -term)

    def level_of_lanes(self, n: int, S1: dict[Any, Int32], S2: dict[Any, Int32]) -> None:
        """Level 2 (n = 0) or 4 (n = 1), where the lane decides which tokens are right."""
        lanes, dtype = self.lanes, self.dtype
        odd, right, left = lanes.odd[n], lanes.right[n], lanes.left[n]
        u = [select(odd, self.f[e], Float32(1.0) if self.r[e] is None else self.r[e]) for e in range(VALUES)]
        X1 = pack_values([select(odd, self.q[e], self.k[e]) * u[e] for e in range(VALUES)], dtype)
        beta = [x * right for x in self.beta]
        X2 = pack_values([self.k[e] * (u[e] * beta[token(e)]) for e in range(VALUES)], dtype)
        for t in range(2):
            s1, s2 = S1[t, t] & lanes.masks[n], S2[t, t] & lanes.masks[n]
            x1, x2 = X1[2 * t : 2 * t + 2], X2[2 * t : 2 * t + 2]
            P1 = mma_k8(mma_k8(zeros(), x1, s1, dtype), x2, s2, dtype)
            P2 = mma_k8(zeros(), x1, s2, dtype)
            y1 = [y for w in x1 for y in unpack(w ^ lanes.sign[n], dtype)]
            y2 = [y for w in x2 for y in unpack(w, dtype)]
            for i in range(4):
                e = 4 * t + i
                x = u[e] * P1[i]
                self.dq[e] = fma(self.dq[e], right, x)
                self.dk[e] = fma(self.dk[e], left, x)
                self.rk[e] = fma(self.rk[e], u[e] * right, P2[i])
                self.dg[e] = fma(fma(self.dg[e], y1[i], P1[i]), y2[i], P2[i])

    def level_8(self, S1: dict[Any, Int32], S2: dict[Any, Int32]) -> None:
        """Tile 0 is left, tile 1 right."""
        dtype = self.dtype
        K = [pack(*(times(self.r[2 * w + p], self.k[2 * w + p]) for p in (0, 1)), dtype) for w in (0, 1)]
        Q = [pack(*(self.q[2 * w + p] * self.f[2 * w + p] for p in (0, 1)), dtype) for w in (2, 3)]
        B = self.operand_B(self.f, range(4, 8))
        Pq, Pk = (mma_k8(zeros(), K, S[1, 0], dtype) for S in (S1, S2))
        Pc = mma_k8(mma_k8(zeros(), Q, S1[0, 1], dtype), B, S2[0, 1], dtype)
        right_terms(self, range(4, 8), [self.f[e] for e in range(4, 8)], Q, B, Pq, Pk)
        left_terms(self, range(4), self.r[:4], K, Pc)


def right_terms(
    into: Any, at: Any, f: Values, Q: Sequence[Int32], B: Sequence[Int32], Pq: Any, Pk: Any
) -> None:
    """dq, rk, dg of four right values."""
    q, bk = ([y for w in words for y in unpack(w, into.dtype)] for words in (Q, B))
    for i, e in enumerate(at):
        into.dq[e] = fma(into.dq[e], f[i], Pq[i])
        into.rk[e] = fma(into.rk[e], f[i], Pk[i])
        into.dg[e] = fma(fma(into.dg[e], q[i], Pq[i]), bk[i], Pk[i])


def left_terms(into: Any, at: Any, r: Values, K: Sequence[Int32], Pc: Any) -> None:
    """dk, dg of four left values."""
    k = [y for w in K for y in unpack(w, into.dtype)]
    for i, e in enumerate(at):
        into.dk[e] = fma(into.dk[e], r[i], Pc[i])
        into.dg[e] = add(into.dg[e], -(k[i] * Pc[i]))


class Wide:
    """What a level of 16 or 32 adds to one block of 16 tokens."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.dq: Values = [None] * VALUES
        self.dk: Values = [None] * VALUES
        self.rk: Values = [None] * VALUES
        self.dg: Values = [None] * VALUES

    def right(
        self, R: Any, f: Values, Q: Sequence[Int32], B: Sequence[Int32], K: Sequence[Any],
        dAqk: Int32, dAkk: Int32, lanes: Lanes,
    ) -> None:  # fmt: skip
        """Block R on the right of the blocks of K, (block, operand)."""
        Pq, Pk = [zeros(), zeros()], [zeros(), zeros()]
        for L, words in K:
            for P, address in ((Pq, dAqk), (Pk, dAkk)):
                b = rows_block(address, R, L, lanes)
                for t in range(2):
                    P[t] = mma_k16(P[t], words, b[t], self.dtype)
        for t in range(2):
            part = slice(2 * t, 2 * t + 2)
            right_terms(self, range(4 * t, 4 * t + 4), f[4 * t : 4 * t + 4], Q[part], B[part], Pq[t], Pk[t])

    def left(
        self, L: Any, r: Values, K: Sequence[Int32], QB: Sequence[Any], dAqk: Int32, dAkk: Int32, lanes: Lanes
    ) -> None:
        """Block L on the left of the blocks of QB, (block, (Q, B))."""
        P = [zeros(), zeros()]
        for R, operands in QB:
            for words, address in zip(operands, (dAqk, dAkk), strict=True):
                b = columns_block(address, R, L, lanes)
                for t in range(2):
                    P[t] = mma_k16(P[t], words, b[t], self.dtype)
        for t in range(2):
            part = slice(4 * t, 4 * t + 4)
            left_terms(self, range(4 * t, 4 * t + 4), r[part], K[2 * t : 2 * t + 2], P[t])


def rotate(x: Any, n: int, size: int) -> None:
    """x[i] = x[i + n], around: a loop over parts of an array of registers works on its first part."""
    values = [x[(i + n) % size] for i in range(size)]
    for i in range(size):
        x[i] = values[i]


def sum_rows(x: Values, lane: Int32) -> list[Float32]:
    """Sums over the eight lanes of equal lane mod 4.

    ``x``: 8 m values; lane 4 r + c ends with the sums of values m r' .. m r' + m - 1, r' = r with its bits reversed.
    """
    for bit in (4, 8, 16):
        upper = lane // bit % 2 == 1
        half = len(x) // 2
        kept = [select(upper, x[n + half], x[n]) for n in range(half)]
        sent = [select(upper, x[n], x[n + half]) for n in range(half)]
        x = [y + cute.arch.shuffle_sync_bfly(z, offset=bit) for y, z in zip(kept, sent, strict=True)]
    return x


def sum_quad(x: Float32) -> Float32:
    """Sum over the four lanes of equal lane / 4."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


def suffix_sums(x: list[tuple[Any, Any]], carry: Float32, lanes: Lanes) -> tuple[list[tuple[Any, Any]], Any]:
    """Per row of channels: for each token the sum of ``x`` over it and every later token, and ``carry``.

    ``x``: the pair of values of the lane in each tile of eight tokens. Returns the carry of what comes before, too.
    """
    out: list[tuple[Any, Any]] = [(None, None)] * len(x)
    for n in range(len(x) - 1, -1, -1):
        first, second = x[n]
        pair = first + second
        one = cute.arch.shuffle_sync_bfly(pair, offset=1)
        both = pair + one
        two = cute.arch.shuffle_sync_bfly(both, offset=2)
        later = select(lanes.odd[0], Float32(0.0), one) + select(lanes.odd[1], Float32(0.0), two)
        second = second + (later + carry)
        out[n] = (first + second, second)
        carry = carry + (both + two)
    return out, carry

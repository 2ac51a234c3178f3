"""The gradient sweeps of one chunk, channels on rows and tokens on columns, by eights of tokens.

Factors. With decays a_0 .. a_7 in an eight, none below :data:`LEAST_DECAY`, and relative to the fifth token,

    w_i = a_5 .. a_i (i > 4),  1 (i = 4),  1 / (a_{i+1} .. a_4) (i < 4)        2^-72 to 2^96
    s = a_0 .. a_4,  e = a_5 a_6 a_7,  t = e of an eight times s of the next   2^-120, 2^-72, 0 to 1

the decay from token j to token i is w_i / w_j in one eight, and w_i s .. t .. e / w_j from an eight to a later one. So
a token has one query factor and one key factor for all its partners, and what lies between two eights scales an
accumulator by one number a channel. Where t underflows, nothing gets past the later of its two eights; into it, something
may (1 / w_j is large then), so that the last step to an eight multiplies by e and by s.

Sweeps. With operands rounded to bf16, Q = q w, B = beta k w, K = k / w of an eight, dAqk and dAkk strictly lower,

    Pq = ((dq s + dAqk K) t + dAqk K) t .. + dAqk K      over the eights up to a token's own; dq as against the state
    Pk = the same of rk and dAkk                         at the chunk's start, rk likewise
    Pc = ((dk e + Q dAqk + B dAkk) t + ..) t ..          from the last eight down to its own; dk as against the
    dq = w Pq,  dk = w beta Pk + Pc / w                  gradient of the state at the chunk's end
    dg = Q Pq + B Pk - K Pc

dg takes the operands as the tensor core saw them: each pair of tokens then enters it twice with the same value, once
with either sign, and leaves a sum over both but for fp32 rounding. Of the roundings, that of dAqk would be the largest in
dA_log: dAqk is there as two bf16 numbers, its rounding to bf16 and what that leaves, to 2^-17 in all.

Fragment of an eight, lane = 4 r + c, value e = p + 2 row: channel r + 8 row of the warp's 16, token 2 c + p. That is
the accumulator of ``mma.sync`` m16n8, and two values p = 0, 1, rounded, are the word ``row`` of its A operand.

Plain Python, traced inline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import BFloat16, Float32, Int32, cute

from kernel_fun._cute.warp import PTX_TYPE, matrices, pack, select, unpack

EIGHT = 8
VALUES = 4
"""Values of an eight in one lane."""
LEAST_DECAY = 2.0**-24
"""Of a token. What it multiplies is below half an fp32 rounding of what a decay of 1 leaves."""
ROW_BYTES = 128
EIGHT_BYTES = EIGHT * ROW_BYTES
"""Eight tokens in a tile with rows of 128 bytes, one row a token."""
REST_BYTES = 3 * EIGHT * EIGHT_BYTES
"""From the tile of dAqk to that of what rounding left of it; what is read with it lies past it and is not used."""
CHANNEL_BYTES = 256
"""64 fp32 values of a channel."""

Values = list[Any]


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


def mma(c: Sequence[Any], a: Sequence[Int32], b: Sequence[Int32], dtype: Any) -> tuple[Any, ...]:
    """c + A B of 16-bit operands: m16n8k8 (two words of A, one of B) or m16n8k16 (four and two)."""
    kind, n, m = PTX_TYPE[dtype], len(a), len(b)
    names = [", ".join(f"{{$r{i}}}" for i in range(*x)) for x in ((n,), (n, n + m), (n + m, n + m + 4))]
    ptx = (
        f"mma.sync.aligned.m16n8k{4 * n}.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        f"{{{names[0]}}}, {{{names[1]}}}, {{{names[2]}}};"
    )
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *c])


def pack_values(x: Values, dtype: Any) -> list[Int32]:
    """Values rounded, two a word."""
    return [pack(x[i], x[i + 1], dtype) for i in range(0, len(x), 2)]


def unpack_values(words: Sequence[Int32], dtype: Any) -> Values:
    return [x for w in words for x in unpack(w, dtype)]


def eight(a: Values) -> tuple[Values, Any, Any]:
    """(w, s, e) of the decays of eight tokens."""
    up, down = [a[4]], [a[5]]
    for i in (3, 2, 1):
        up.append(up[-1] * a[i])
    for i in (6, 7):
        down.append(down[-1] * a[i])
    return [*(cute.arch.rcp_approx(x) for x in reversed(up)), Float32(1.0), *down], a[0] * up[-1], down[-1]


class Lanes:
    """What a lane keeps of its place; bytes relative to a 1024-byte aligned tile with rows of 128 bytes."""

    def __init__(self, lane: Int32) -> None:
        self.lane, self.r, self.c = lane, lane >> 2, lane & 3
        m, i = lane >> 3, lane & 7
        self.rows_first = self.unit(8 * (m >> 1) + i, m & 1)
        """Tokens, then 16-byte units: (0-7, u), (0-7, u + 1), (8-15, u), (8-15, u + 1)."""
        self.units_first = self.unit(8 * (m & 1) + i, m >> 1)
        """Units, then tokens."""
        tile = (m >> 1) * (EIGHT * EIGHT_BYTES)
        self.rows = tile + self.unit(i, m & 1)
        """Eights (0, J), (0, J + 1) of one (64, 64) tile and of the next, J even."""
        self.columns = (m & 1) * (EIGHT * EIGHT_BYTES) + (m >> 1) * EIGHT_BYTES + self.unit(i, 0)
        """Eight (I, 0) of one (64, 64) tile and of the next, then eight (I + 1, 0)."""
        self.exchange = self.r * CHANNEL_BYTES + ((self.c >> 1) ^ spread(self.r)) * 16 + (self.c & 1) * 8
        """Tokens 2 c, 2 c + 1 of channel r of an exchanged (channels, 64) fp32 array."""

    @staticmethod
    def unit(i: Int32, unit: Any) -> Int32:
        return i * ROW_BYTES + (unit ^ (i & 7)) * 16


def spread(channel: Any) -> Any:
    """What the 16-byte units of a channel are permuted by in an exchanged array: no bank conflict on either side."""
    return (channel & 2) * 2 + ((channel ^ (channel >> 2)) & 1) * 2 + ((channel >> 3) & 1)


def of_fragment(base: Any, n: int, row: int) -> Any:
    """Address of an eight's pair of tokens of a lane in an exchanged array; ``base`` includes :attr:`Lanes.exchange`."""
    return (base ^ (32 * n + 16 * row)) + EIGHT * CHANNEL_BYTES * row


def of_tokens(base: Any, odd: int, half: int) -> Any:
    """Address of half an eight of one of a thread's two channels; ``base``: channel and eight, see :func:`walk`."""
    return (base ^ (16 * (half ^ (2 * odd)))) + CHANNEL_BYTES * odd


def walk(pair: Any, n: Any) -> Any:
    """Bytes of eight ``n`` of channels 2 pair, 2 pair + 1 in an exchanged array, for :func:`of_tokens`."""
    return pair * (2 * CHANNEL_BYTES) + ((2 * n) ^ spread(2 * pair)) * 16


def row_words(at: Int32, i: int, j: int, past: int = 0) -> tuple[Int32, ...]:
    """B words of the eights (i, j), (i, j + 1) of dAqk and of dAkk, n = rows; j even. ``at`` includes :attr:`Lanes.rows`.

    ``past``: bytes from these tiles to two others.
    """
    return matrices(((at + EIGHT_BYTES * i) ^ (16 * j)) + past)


def column_words(at: Int32, i: int, j: int, past: int = 0) -> tuple[Int32, ...]:
    """B words of eight (i, j) of dAqk and of dAkk, then of (i + 1, j), n = columns. ``at`` includes :attr:`Lanes.columns`."""
    return matrices_transposed(((at + EIGHT_BYTES * i) ^ (16 * j)) + past)


def scaled(x: Sequence[Any], by: Sequence[Any]) -> list[Any]:
    """Values of an eight times a number a channel row."""
    return [x[e] * by[e // 2] for e in range(VALUES)]


def queries(
    at: Int32, i: int, dq: Values, rk: Values, K: Sequence[Any], s: Any, t: Sequence[Any], near: Any
) -> tuple[Any, Any]:
    """(Pq, Pk) of eight ``i``. ``K``: operands of the eights up to i. ``near``: e of the eight before, s of this one."""
    Pq, Pk = scaled(dq, s), scaled(rk, s)
    words: tuple[Int32, ...] = ()
    rest: tuple[Int32, ...] = ()
    for j in range(i + 1):
        if j:
            for by in (t[j - 1],) if j < i else near:
                Pq, Pk = scaled(Pq, by), scaled(Pk, by)
        if j % 2 == 0:
            words, rest = row_words(at, i, j), row_words(at, i, j, REST_BYTES)[:2]
        Pq = mma(Pq, K[j], rest[j % 2 : j % 2 + 1], BFloat16)
        Pq = mma(Pq, K[j], words[j % 2 : j % 2 + 1], BFloat16)
        Pk = mma(Pk, K[j], words[2 + j % 2 : 3 + j % 2], BFloat16)
    return Pq, Pk


def keys(at: Int32, j: int, dk: Values, QB: Sequence[Any], e: Any, t: Sequence[Any], near: Any) -> Any:
    """Pc of eight ``j``. ``QB``: words of Q and B of every eight. ``near``: s of the eight after, e of this one."""
    last = len(QB) - 1
    Pc: Any = scaled(dk, e)
    words: tuple[Int32, ...] = ()
    rest: tuple[Int32, ...] = ()
    for i in range(last, j - 1, -1):
        if i < last:
            for by in (t[i],) if i > j else near:
                Pc = scaled(Pc, by)
        if i % 2 == 1 or not words:
            words = column_words(at, i - i % 2, j)
            rest = column_words(at, i - i % 2, j, REST_BYTES)[::2]
        Pc = mma(Pc, QB[i][:2], rest[i % 2 : i % 2 + 1], BFloat16)
        Pc = mma(Pc, QB[i], words[i % 2 * 2 : i % 2 * 2 + 2], BFloat16)
    return Pc


def fold(sums: list[tuple[int, Values]], x: Values, lane: Int32) -> None:
    """Sum over the eight lanes of equal lane mod 4, eight after eight: ``x`` of the next eight joins ``sums``.

    After all eight, ``sums`` is one entry, and lane 4 r + c has the sums of eight r.
    """
    level = 0
    while sums and sums[-1][0] == level:
        before, bit = sums.pop()[1], 4 << level
        upper = (lane & bit) != 0
        kept = [select(upper, z, y) for y, z in zip(before, x, strict=True)]
        sent = [select(upper, y, z) for y, z in zip(before, x, strict=True)]
        x = [y + cute.arch.shuffle_sync_bfly(z, offset=bit) for y, z in zip(kept, sent, strict=True)]
        level += 1
    sums.append((level, x))


def sum_quad(x: Float32) -> Float32:
    """Sum over the four lanes of equal lane / 4."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)

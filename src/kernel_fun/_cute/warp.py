"""Warp-level verbs: packed 16-bit pairs, ldmatrix, mma.sync. Operands are plain 32-bit words.

Fragments of ``mma.sync``, lane = 4 r + c (r in 0..7, c in 0..3), one word = two neighbouring 16-bit values:

    m16n8k16  A  4 words   (row r, k 2c), (r + 8, 2c), (r, 2c + 8), (r + 8, 2c + 8)
              B  2 words   (k 2c, column r), (2c + 8, r)
    m16n8k8   A  4 tf32    (r, c), (r + 8, c), (r, c + 4), (r + 8, c + 4)
    (tf32)    B  2 tf32    (k c, column r), (c + 4, r)
    both      C  4 fp32    (r, 2c), (r, 2c + 1), (r + 8, 2c), (r + 8, 2c + 1)

``ldmatrix`` delivers the word (row r, 2c) of an 8 x 8 matrix of 16-bit values to lane 4 r + c, so rows of a
K-major tile arrive as A and as B words alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import arith

PTX_TYPE = {BFloat16: "bf16", Float16: "f16"}


def pack(lo: Float32, hi: Float32, dtype: Any) -> Int32:
    """Two fp32 values rounded to a pair of 16-bit ones, ``lo`` in the low half."""
    ptx = f"cvt.rn.{PTX_TYPE[dtype]}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[lo, hi])


def unpack(word: Int32, dtype: Any) -> tuple[Float32, Float32]:
    """The two 16-bit values of a word as fp32."""
    if dtype is BFloat16:
        lo = cute.arch.inline_ptx(
            "shl.b32 {$w0}, {$r0}, 16;", write_only_types=[Float32], read_only_args=[word]
        )
        hi = cute.arch.inline_ptx(
            "and.b32 {$w0}, {$r0}, 0xffff0000;", write_only_types=[Float32], read_only_args=[word]
        )
        return lo, hi
    ptx = "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32, Float32], read_only_args=[word])


def select(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds, else ``no``, without a branch."""
    return type(yes)(arith.select(condition.ir_value(), yes.ir_value(), no.ir_value()))


def matrices(address: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Four 8 x 8 matrices of 16-bit values; lane 8 m + i gives the shared address of row i of matrix m."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[address],
    )


def product(x: Int32, y: Int32, dtype: Any) -> Int32:
    """Two pairs of 16-bit values multiplied and rounded."""
    return cute.arch.inline_ptx(
        f"mul.rn.{PTX_TYPE[dtype]}x2 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[x, y],
    )


def load2(address: Int32) -> tuple[Float32, Float32]:
    """8 bytes of shared memory as two fp32 values."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[address]
    )


def load4(address: Int32) -> tuple[Float32, Float32, Float32, Float32]:
    """16 bytes of shared memory as four fp32 values."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


def load_relaxed(address: Int32, n: int) -> list[Float32]:
    """n fp32 values of shared memory, 1, 2 or 4, that other warps may be storing at the time."""
    load = "ld.relaxed.cta.shared"
    if n == 1:
        ptx = f"{load}.f32 {{$w0}}, [{{$r0}}];"
        return [cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[address])]
    names = ", ".join(f"{{$w{i}}}" for i in range(n))
    ptx = f"{load}.v{n}.f32 {{{names}}}, [{{$r0}}];"
    return list(cute.arch.inline_ptx(ptx, write_only_types=[Float32] * n, read_only_args=[address]))


def store_relaxed(address: Int32, x: Float32) -> None:
    """An fp32 value to shared memory, where other warps may be storing or loading at the time."""
    cute.arch.inline_ptx("st.relaxed.cta.shared.f32 [{$r0}], {$r1};", read_only_args=[address, x])


def store2(address: Int32, words: Sequence[Int32]) -> None:
    """Two words to 8 bytes of shared memory."""
    cute.arch.inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *words])


def store4(address: Int32, words: Sequence[Int32]) -> None:
    """Four words to 16 bytes of shared memory."""
    cute.arch.inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words]
    )


def word_at(address: Int32, offset: int) -> Int32:
    """The word of shared memory that many bytes behind an address."""
    ptx = f"ld.shared.b32 {{$w0}}, [{{$r0}}+{offset}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[address])


def put_word(address: Int32, offset: int, word: Int32) -> None:
    """A word to shared memory, that many bytes behind an address."""
    cute.arch.inline_ptx(f"st.shared.b32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, word])


def put_global(address: Int64, words: list[Any], exists: Any = None) -> None:
    """Two or four words to global memory, if ``exists``."""
    names = ", ".join(f"{{$r{n + 1}}}" for n in range(len(words)))
    ptx = f"st.global.v{len(words)}.b32 [{{$r0}}], {{{names}}};"
    given = [address, *words]
    if exists is not None:
        ptx = f"{{ .reg .pred p; setp.ne.b32 p, {{$r{len(given)}}}, 0; @p {ptx} }}"
        given.append(select(exists, Int32(1), Int32(0)))
    cute.arch.inline_ptx(ptx, read_only_args=given)


def row_of_matrix(lane: Int32, unit: Any) -> Int32:
    """ldmatrix: lane 8 m + i names row i of matrix m. Bytes to a 16-byte unit of it, in rows of 128 bytes."""
    i = lane & 7
    return i * 128 + ((unit ^ i) << 4)


def bits_of(x: Float32) -> Int32:
    """The bits of an fp32 value as a word."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def as_float(word: Int32) -> Float32:
    """The bits of a word as fp32."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def mma(acc: cute.Tensor, at: int, a: Sequence[Int32], b: Sequence[Int32], dtype: Any) -> None:
    """acc[at : at + 4] += A B, m16n8k16 of 16-bit operands."""
    kind = PTX_TYPE[dtype]
    _mma(acc, at, a, b, f"m16n8k16.row.col.f32.{kind}.{kind}.f32")


def mma_k8(acc: cute.Tensor, at: int, a: Sequence[Int32], b: Int32, dtype: Any) -> None:
    """acc[at : at + 4] += A B, m16n8k8 of 16-bit operands: the first two words of A, the first of B."""
    kind = PTX_TYPE[dtype]
    _mma(acc, at, a, (b,), f"m16n8k8.row.col.f32.{kind}.{kind}.f32")


def mma_tf32(acc: cute.Tensor, at: int, a: Sequence[Int32], b: Sequence[Int32]) -> None:
    """acc[at : at + 4] += A B, m16n8k8 of :func:`tf32` operands."""
    _mma(acc, at, a, b, "m16n8k8.row.col.f32.tf32.tf32.f32")


def tf32(x: Float32) -> Int32:
    """A finite value rounded to tf32, ties away from 0: the tensor core drops the 13 bits below."""
    return cute.arch.inline_ptx("add.u32 {$w0}, {$r0}, 0x1000;", write_only_types=[Int32], read_only_args=[x])


def _mma(acc: cute.Tensor, at: int, a: Sequence[Int32], b: Sequence[Int32], kind: str) -> None:
    operands, start = [], 0
    for n in (4, len(a), len(b), 4):
        names = ", ".join(f"{{$w{i}}}" if not operands else f"{{$r{start - 4 + i}}}" for i in range(n))
        operands.append(f"{{{names}}}")
        start += n
    new = cute.arch.inline_ptx(
        f"mma.sync.aligned.{kind} {', '.join(operands)};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *(acc[at + i] for i in range(4))],
    )
    for i in range(4):
        acc[at + i] = new[i]

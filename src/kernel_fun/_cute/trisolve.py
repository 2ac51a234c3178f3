"""Inverse of a unit lower triangular 64 x 64 tile in shared memory, by four warps: 16 -> 32 -> 64.

    X_II = (I + L_II)^-1                 16 x 16, by substitution, fp32, two blocks a warp
    X_ba = -X_b (L_ba X_a)               16 -> 32 and 32 -> 64, mma.sync tf32, fp32 accumulators

The tile is fp32, row-major with rows of ``PITCH``, the columns of each group of eight in the order of
:func:`place`: so ldmatrix reads A fragments, and no access of a fragment meets two rows in one bank. Strictly lower
L goes in, :func:`rounded` to tf32 outside its 16 x 16 blocks; no element on or above the diagonal matters. Nothing that another warp may still read is overwritten: X_II takes the place of L_II, X_10 and
X_32 are built in the unused upper triangle, where :func:`shift` finds them. The four steps are plain
Python, traced inline, for whole warps; a barrier of all who take part belongs before and between them. What a
step's ``rows_of`` loads is final one step earlier, so those loads can pass the barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import Float32, Int32, cute

from kernel_fun._cute.warp import load4, matrices, mma_tf32, select, tf32

BLOCK = 16
SIZE = 64
PITCH = 68
"""Elements from row to row: eight rows start 16 bytes apart, and four pairs of rows 32, modulo 128."""

TILE_BYTES = SIZE * PITCH * 4


def invert_blocks(sL: cute.Tensor, warp: Int32, lane: Int32) -> None:
    """The four diagonal blocks, two by each of two warps: a lane solves for one column of one block."""
    first = (2 * warp + (lane >> 4)) * (BLOCK * PITCH + BLOCK)
    base = sL.iterator.toint() + first * 4
    column = lane & (BLOCK - 1)
    y: list[Any] = []
    for i in range(BLOCK):
        units = sorted({place(j) // 4 for j in range(i)})
        row = {u: load4(base + 4 * (i * PITCH + 4 * u)) for u in units}
        x = select(column == i, Float32(1.0), Float32(0.0))
        for j in range(i):
            x = x - row[place(j) // 4][place(j) % 4] * y[j]
        y.append(x)
    cute.arch.sync_warp()
    for i in range(BLOCK):
        sL[first + i * PITCH + place(column)] = y[i]


def merge_16(sL: cute.Tensor, warp: Int32, lane: Int32) -> None:
    """X_10 and X_32, half of the columns of one block to a warp."""
    tile = Fragments(sL, lane)
    a = (warp >> 1) * (2 * BLOCK * (PITCH + 1))
    columns = (warp & 1) * 8
    b, L_ba = a + BLOCK * (PITCH + 1), a + BLOCK * PITCH
    built = a + BLOCK + columns
    T = accumulator()
    for k in (0, 8):
        mma_tf32(T, 0, tile.left(L_ba + k), [tf32(x) for x in tile.right(a + k * PITCH + columns)])
    tile.put(built, T, rounded)
    cute.arch.sync_warp()
    X = accumulator()
    for k in (0, 8):
        mma_tf32(X, 0, [tf32(x) for x in tile.left(b + k)], tile.right(built + k * PITCH))
    cute.arch.sync_warp()
    tile.put(built, X, negated)


def rows_of_L(sL: cute.Tensor, warp: Int32, lane: Int32) -> list[list[Int32]]:
    """What :func:`multiply_32` reads that no merge wrote."""
    tile = Fragments(sL, lane)
    low = (warp >> 1) * (BLOCK * PITCH)
    return [tile.left(2 * BLOCK * PITCH + low + 8 * k) for k in range(4)]


def multiply_32(sL: cute.Tensor, warp: Int32, lane: Int32, L: list[list[Int32]]) -> None:
    """T = L_ba X_a of the 32 x 32 block below the diagonal, a 16 x 16 block to each of four warps."""
    tile = Fragments(sL, lane)
    first, low = (warp & 1) == 0, (warp >> 1) * (BLOCK * PITCH)
    columns = (warp & 1) * BLOCK
    to_X_a = columns + select(first, Int32(BLOCK - BLOCK * PITCH), Int32(0))
    for n in (0, 8):
        X_a = [[select(first, w, Int32(0)) for w in tile.right(k * PITCH + columns + n)] for k in (0, 8)]
        X_a += [tile.right(to_X_a + n + k * PITCH) for k in (16, 24)]
        T = product_of_four(L, [[tf32(x) for x in X] for X in X_a])
        tile.put(columns + n + 2 * BLOCK + low, T, rounded)


def rows_of_X(sL: cute.Tensor, warp: Int32, lane: Int32) -> list[list[Int32]]:
    """What :func:`merge_32` reads that :func:`multiply_32` did not write: of rows 0-15 X_22, of 16-31 X_32 and X_33."""
    tile = Fragments(sL, lane)
    is_low = warp >= 2
    X_22, X_33 = 2 * BLOCK * (PITCH + 1), 3 * BLOCK * (PITCH + 1)
    first = select(is_low, Int32(X_22 + BLOCK), Int32(X_22))
    X_b = [[tf32(x) for x in tile.left(at)] for at in (first, first + 8, X_33, X_33 + 8)]
    return X_b[:2] + [[select(is_low, x, Int32(0)) for x in X] for X in X_b[2:]]


def merge_32(sL: cute.Tensor, warp: Int32, lane: Int32, X_b: list[list[Int32]]) -> None:
    """-X_b T in the place of L_ba, by the four warps of :func:`multiply_32`."""
    tile = Fragments(sL, lane)
    columns, low = (warp & 1) * BLOCK, (warp >> 1) * (BLOCK * PITCH)
    for n in (0, 8):
        X = product_of_four(X_b, [tile.right(columns + n + 2 * BLOCK + 8 * k * PITCH) for k in range(4)])
        tile.put(2 * BLOCK * PITCH + low + columns + n, X, negated)


def product_of_four(left: list[list[Int32]], right: list[list[Int32]]) -> list[Float32]:
    """The sum of four products, by two chains of two."""
    sums = [accumulator(), accumulator()]
    for k in range(4):
        mma_tf32(sums[k & 1], 0, left[k], right[k])
    return [sums[0][e] + sums[1][e] for e in range(4)]


def place(column: Any) -> Any:
    """Where a column stands in its row: of each eight, the even ones and then the odd ones."""
    return (column & ~7) + ((column & 7) >> 1) + ((column & 1) << 2)


def shift(I: int, J: int) -> int:
    """Where block (I, J), J <= I, of the inverse stands: elements to add to its own place in the tile."""
    return BLOCK * (1 - PITCH) if I != J and I // 2 == J // 2 else 0


def accumulator() -> cute.Tensor:
    acc = cute.make_rmem_tensor(4, Float32)
    acc.fill(0.0)
    return acc


def rounded(x: Float32) -> Float32:
    """A finite value whose word :func:`_cute.warp.mma_tf32` takes as it is: see :func:`_cute.warp.tf32`."""
    return cute.arch.inline_ptx(
        "add.u32 {$w0}, {$r0}, 0x1000;", write_only_types=[Float32], read_only_args=[x]
    )


def negated(x: Float32) -> Float32:
    return -x


def word_of(x: Float32) -> Int32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


class Fragments:
    """Fragments of the tile, unrounded, by the flat index of their top left element: layouts of ``warp.py``.

    Element k = c of a lane's operands is row or column 2 c of a product's eight, k = c + 4 is 2 c + 1.
    """

    def __init__(self, sL: cute.Tensor, lane: Int32) -> None:
        r, c = lane >> 2, lane & 3
        self.sL = sL
        self.a = sL.iterator.toint() + 4 * ((lane & 15) * PITCH + ((lane >> 4) << 2))
        self.b, self.c = 2 * c * PITCH + place(r), r * PITCH + c

    def left(self, at: Any) -> list[Int32]:
        """A: 16 rows, 8 columns."""
        return list(matrices(self.a + 4 * at))

    def right(self, at: Any) -> list[Int32]:
        """B: 8 rows, 8 columns."""
        return [word_of(self.sL[self.b + at + i]) for i in (0, PITCH)]

    def put(self, at: Any, acc: Any, of: Callable[[Float32], Float32]) -> None:
        """C: 16 rows, 8 columns, each element through ``of``."""
        for e, i in enumerate((0, 4, 8 * PITCH, 8 * PITCH + 4)):
            self.sL[self.c + at + i] = of(acc[e])

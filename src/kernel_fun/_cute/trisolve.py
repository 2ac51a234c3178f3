"""Inverse of a unit lower triangular 64 x 64 tile in shared memory, by up to eight warps: 16 -> 32 -> 64.

    X_II = (I + L_II)^-1                 16 x 16, by substitution, fp32, two blocks a warp
    X_ba = -X_b (L_ba X_a)               16 -> 32 and 32 -> 64, mma.sync tf32, fp32 accumulators

The tile is fp32, row-major with rows of ``PITCH``; strictly lower L goes in, and no element on or above the
diagonal is read. Nothing that another warp may still read is overwritten: X_II takes the place of L_II, X_10 and
X_32 are built in the unused upper triangle, where :func:`shift` finds them. The four steps are plain
Python, traced inline, for whole warps; a barrier of all who take part belongs before and between them.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute

from kernel_fun._cute.warp import load4, mma_tf32, select, tf32

BLOCK = 16
SIZE = 64
PITCH = 68
"""Elements from row to row: rows are 16-byte aligned, and eight of them start in different banks."""

TILE_BYTES = SIZE * PITCH * 4


def invert_blocks(sL: cute.Tensor, warp: Int32, lane: Int32) -> None:
    """The four diagonal blocks, two by each of two warps: a lane solves for one column of one block."""
    first = (2 * warp + (lane >> 4)) * (BLOCK * PITCH + BLOCK)
    base = sL.iterator.toint() + first * 4
    column = lane & (BLOCK - 1)
    y: list[Any] = []
    for i in range(BLOCK):
        row: list[Float32] = []
        for j in range(0, i, 4):
            row += load4(base + 4 * (i * PITCH + j))
        x = select(column == i, Float32(1.0), Float32(0.0))
        for j in range(i):
            x = x - row[j] * y[j]
        y.append(x)
    cute.arch.sync_warp()
    for i in range(BLOCK):
        sL[first + i * PITCH + column] = y[i]


def merge_16(sL: cute.Tensor, warp: Int32, lane: Int32) -> None:
    """X_10 and X_32, half of the columns of one block to a warp."""
    tile = Fragments(sL, lane)
    a = (warp >> 1) * (2 * BLOCK * (PITCH + 1))
    columns = (warp & 1) * 8
    b, L_ba = a + BLOCK * (PITCH + 1), a + BLOCK * PITCH
    built = a + BLOCK + columns
    T = accumulator()
    for k in (0, 8):
        mma_tf32(T, 0, tile.left(L_ba + k), tile.right(a + k * PITCH + columns))
    tile.put(built, T)
    cute.arch.sync_warp()
    X = accumulator()
    for k in (0, 8):
        mma_tf32(X, 0, tile.left(b + k), tile.right(built + k * PITCH))
    cute.arch.sync_warp()
    tile.put(built, X, negated=True)


def multiply_32(sL: cute.Tensor, warp: Int32, lane: Int32) -> None:
    """T = L_ba X_a of the 32 x 32 block below the diagonal, 16 rows of eight columns to each of eight warps."""
    tile = Fragments(sL, lane)
    columns, low = (warp & 3) * 8, (warp >> 2) * (BLOCK * PITCH)
    in_first_block = columns < BLOCK
    to_X_a = columns + select(in_first_block, Int32(BLOCK - BLOCK * PITCH), Int32(0))
    X_a = [[select(in_first_block, w, Int32(0)) for w in tile.right(k * PITCH + columns)] for k in (0, 8)]
    X_a += [tile.right(to_X_a + k * PITCH) for k in (16, 24)]
    T = accumulator()
    for k in range(4):
        mma_tf32(T, 0, tile.left(2 * BLOCK * PITCH + low + 8 * k), X_a[k])
    tile.put(columns + 2 * BLOCK + low, T)


def merge_32(sL: cute.Tensor, warp: Int32, lane: Int32) -> None:
    """-X_b T in the place of L_ba, by the eight warps of :func:`multiply_32`."""
    tile = Fragments(sL, lane)
    columns, low = (warp & 3) * 8, (warp >> 2) * (BLOCK * PITCH)
    is_low = low > 0
    X_22, X_33 = 2 * BLOCK * (PITCH + 1), 3 * BLOCK * (PITCH + 1)
    # rows 0-15 are X_22 T_0, rows 16-31 X_32 T_0 + X_33 T_1
    first = select(is_low, Int32(X_22 + BLOCK), Int32(X_22))
    X = accumulator()
    for k, at in enumerate((first, first + 8, X_33, X_33 + 8)):
        left = tile.left(at)
        if k >= 2:
            left = [select(is_low, w, Int32(0)) for w in left]
        mma_tf32(X, 0, left, tile.right(columns + 2 * BLOCK + 8 * k * PITCH))
    tile.put(2 * BLOCK * PITCH + low + columns, X, negated=True)


def shift(I: int, J: int) -> int:
    """Where block (I, J), J <= I, of the inverse stands: elements to add to its own place in the tile."""
    return BLOCK * (1 - PITCH) if I != J and I // 2 == J // 2 else 0


def accumulator() -> cute.Tensor:
    acc = cute.make_rmem_tensor(4, Float32)
    acc.fill(0.0)
    return acc


class Fragments:
    """tf32 fragments of the tile by the flat index of their top left element: layouts of ``warp.py``."""

    def __init__(self, sL: cute.Tensor, lane: Int32) -> None:
        r, c = lane >> 2, lane & 3
        self.sL = sL
        self.a, self.b, self.c = r * PITCH + c, c * PITCH + r, r * PITCH + 2 * c

    def left(self, at: Any) -> list[Int32]:
        """A: 16 rows, 8 columns."""
        return [tf32(self.sL[self.a + at + i]) for i in (0, 8 * PITCH, 4, 8 * PITCH + 4)]

    def right(self, at: Any) -> list[Int32]:
        """B: 8 rows, 8 columns."""
        return [tf32(self.sL[self.b + at + i]) for i in (0, 4 * PITCH)]

    def put(self, at: Any, acc: cute.Tensor, *, negated: bool = False) -> None:
        """C: 16 rows, 8 columns."""
        for e, i in enumerate((0, 1, 8 * PITCH, 8 * PITCH + 1)):
            self.sL[self.c + at + i] = -acc[e] if negated else acc[e]

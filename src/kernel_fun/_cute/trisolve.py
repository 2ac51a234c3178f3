"""Inverse of a unit lower triangular 64 x 64 tile in shared memory, by four warps: 16 -> 32 -> 64.

    X_II = (I + L_II)^-1                 16 x 16, by substitution, fp32, two blocks a warp
    X_ba = -X_b (L_ba X_a)               16 -> 32 and 32 -> 64, mma.sync tf32, fp32 accumulators

The tile is fp32, row-major with rows of ``PITCH``; strictly lower L goes in, and no element on or above the
diagonal is read. Nothing that another warp may still read is overwritten: X_II takes the place of L_II, and a
merged block is built in the unused upper triangle, where :func:`shift` finds it. The three steps are plain
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


def merge_32(sL: cute.Tensor, warp: Int32, lane: Int32) -> None:
    """The 32 x 32 block below the diagonal, eight columns to a warp."""
    tile = Fragments(sL, lane)
    columns = warp * 8
    in_first_block = warp < 2
    to_X_a = columns + select(in_first_block, Int32(BLOCK - BLOCK * PITCH), Int32(0))
    L_ba, built = 2 * BLOCK * PITCH, columns + 2 * BLOCK
    X_a = [[select(in_first_block, w, Int32(0)) for w in tile.right(k * PITCH + columns)] for k in (0, 8)]
    X_a += [tile.right(to_X_a + k * PITCH) for k in (16, 24)]
    for m in (0, BLOCK):
        T = accumulator()
        for k in range(4):
            mma_tf32(T, 0, tile.left(L_ba + m * PITCH + 8 * k), X_a[k])
        tile.put(built + m * PITCH, T)
    cute.arch.sync_warp()
    T_k = [tile.right(built + k * PITCH) for k in (0, 8, 16, 24)]
    cute.arch.sync_warp()
    X_22, X_32 = 2 * BLOCK * (PITCH + 1), 2 * BLOCK * (PITCH + 1) + BLOCK
    X_33 = 3 * BLOCK * (PITCH + 1)
    for m, row in ((0, [X_22, X_22 + 8]), (BLOCK, [X_32, X_32 + 8, X_33, X_33 + 8])):
        X = accumulator()
        for at, t in zip(row, T_k, strict=False):
            mma_tf32(X, 0, tile.left(at), t)
        tile.put(built + m * PITCH, X, negated=True)


def shift(I: int, J: int) -> int:
    """Where block (I, J), J <= I, of the inverse stands: elements to add to its own place in the tile."""
    if I == J:
        return 0
    blocks = 1 if I // 2 == J // 2 else 2
    return blocks * BLOCK * (1 - PITCH)


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

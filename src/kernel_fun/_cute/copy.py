"""Copies between registers, shared and global memory whose partition comes from a product's accumulator."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warp

VECTOR_BYTES = 16


def load_transposed(tiled: cute.TiledMma, dtype: Any, tidx: Any) -> Any:
    """ldmatrix.trans into the accumulator layout: a (c, r) tile whose rows r are contiguous arrives as (r, c)."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), dtype)
    return cute.make_tiled_copy_C(atom, tiled).get_slice(tidx)


def store_transposed(tiled: cute.TiledMma, dtype: Any, tidx: Any) -> Any:
    """stmatrix.trans out of the accumulator layout: the inverse of :func:`load_transposed`."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), dtype)
    return cute.make_tiled_copy_C(atom, tiled).get_slice(tidx)


@cute.jit
def rows_out(sX: cute.Tensor, gX: cute.Tensor, rows: Int32, tidx: Int32, threads: cutlass.Constexpr[int]):
    """gX[:, :rows] = sX[:, :rows] for (d, t) tiles with d contiguous: the tail of a sequence, which TMA cannot clip.

    ``threads`` threads share the copy, 16 bytes each; d is a static multiple of a vector.
    """
    width = VECTOR_BYTES * 8 // sX.element_type.width
    across = cute.size(sX.shape[0]) // width
    step = threads // across
    buffer = cute.make_rmem_tensor((width, 1), sX.element_type)
    for i in cutlass.range_constexpr(cute.size(sX.shape[1]) // step):
        t = i * step + tidx // across
        if t < rows:
            cute.autovec_copy(cute.local_tile(sX, (width, 1), (tidx % across, t)), buffer)
            cute.autovec_copy(buffer, cute.local_tile(gX, (width, 1), (tidx % across, t)))

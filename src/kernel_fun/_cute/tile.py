"""Tiles of shared memory as data: what a kernel states once about an operand, and everything that follows from it.

A tile is a (rows, cols) block of one operand in the 128-byte (or 64-, 32-byte) swizzle that TMA writes and
WGMMA reads, repeated ``stages`` times. ``rows_contiguous`` names the mode that is contiguous in memory: False for
a K-major operand ``(n, k)``, True for an MN-major one. The same bytes may be seen through two tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernel_fun._cute.compat import LayoutEnum

SMEM_BYTES = 232448
"""Shared memory a CTA may use on sm_90; a larger kernel compiles without complaint and fails at launch."""

ALIGN_BYTES = 1024
"""Alignment of a swizzled tile: the period of the 128-byte swizzle."""


@dataclass(frozen=True)
class Tile:
    """A swizzled tile of shared memory.

    ``dtype``: cutlass numeric type. ``pitch_bytes``: distance between stages, by default the size of one.
    Layouts can only be made while a kernel is traced, so they are methods.
    """

    dtype: Any
    rows: int
    cols: int
    stages: int = 1
    rows_contiguous: bool = False
    pitch_bytes: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def stage_bytes(self) -> int:
        return self.rows * self.cols * self.dtype.width // 8

    @property
    def smem_bytes(self) -> int:
        return self.stages * (self.pitch_bytes or self.stage_bytes)

    def layout(self) -> Any:
        """Composed layout of one stage, (rows, cols)."""
        major, extent = (
            (LayoutEnum.COL_MAJOR, self.rows) if self.rows_contiguous else (LayoutEnum.ROW_MAJOR, self.cols)
        )
        kind = sm90.get_smem_layout_atom(major, self.dtype, extent)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, self.shape, order=(1, 0) if self.rows_contiguous else (0, 1))

    def field(self) -> Any:
        """Type of the storage field that holds every stage."""
        elements = self.smem_bytes * 8 // self.dtype.width
        return cute.struct.Align[cute.struct.MemRange[self.dtype, elements], ALIGN_BYTES]

    def view(self, field: Any) -> cute.Tensor:
        """Tensor (rows, cols, stages) over a storage field, which may have been declared by another tile."""
        one = self.layout()
        pitch = (self.pitch_bytes or self.stage_bytes) * 8 // self.dtype.width
        outer = cute.make_layout((*one.outer.shape, self.stages), stride=(*one.outer.stride, pitch))
        iterator = cute.recast_ptr(field.data_ptr(), one.inner, dtype=self.dtype)
        return cute.make_tensor(iterator, outer)

    def words(self, field: Any, word: Any, slot: Any = 0) -> cute.Tensor:
        """The bytes of one stage as a flat tensor of unswizzled ``word`` elements."""
        pitch = (self.pitch_bytes or self.stage_bytes) * 8 // word.width
        pointer = cute.recast_ptr(field.data_ptr(), dtype=word)
        return cute.make_tensor(pointer + slot * pitch, cute.make_layout(self.stage_bytes * 8 // word.width))

    def loader(self, mX: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """TMA atom that loads this tile from a tensor with modes (rows, cols, ...), and the tensor's coordinates."""
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, self.layout(), self.shape)

    def storer(self, mX: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """TMA atom that stores this tile to a tensor with modes (rows, cols, ...), and the tensor's coordinates."""
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mX, self.layout(), self.shape)


def storage(**fields: Any) -> Any:
    """Struct of a kernel's shared memory, fields in the order given."""
    return cute.struct(type("Storage", (), {"__annotations__": fields}))


def vector(dtype: Any, elements: int, align_bytes: int = 128) -> Any:
    """Type of a storage field that holds a plain array."""
    return cute.struct.Align[cute.struct.MemRange[dtype, elements], align_bytes]


def tma_parts(atom: cute.CopyAtom, gX: cute.Tensor, sX: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """(tXsX, tXgX) of a TMA copy of whole tiles; each keeps its trailing mode (stage, tile)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )


def words_of(field: Any, words: int) -> cute.Tensor:
    """A storage field, and what follows it, as a flat tensor of 32-bit words."""
    return cute.make_tensor(cute.recast_ptr(field.data_ptr(), dtype=Int32), cute.make_layout(words))


def modes(mX: cute.Tensor, *order: int) -> cute.Tensor:
    """A tensor with these modes, in this order."""
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, list(order)))


def without_batch(mX: cute.Tensor) -> cute.Tensor:
    """[1, tokens, ...] seen as [tokens, ...]."""
    return modes(mX, *range(1, cute.rank(mX)))


def tokens_first(mX: cute.Tensor) -> cute.Tensor:
    """[B, T, HV, D] seen as (T, D, HV, B)."""
    return modes(mX, 1, 3, 2, 0)


def dims_first(mX: cute.Tensor) -> cute.Tensor:
    """[B, T, HV, D] seen as (D, T, HV, B)."""
    return modes(mX, 3, 1, 2, 0)

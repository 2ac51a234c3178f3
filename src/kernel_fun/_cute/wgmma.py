"""WGMMA on sm_90: products whose A operand is in registers, fp32 accumulators.

For 16-bit types the accumulator of a product and the A operand of the next one are the same registers in the same
order, so that a result becomes an operand by rounding alone.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

M = 64
"""Rows of a product: one warpgroup's."""


def mma(dtype: Any, n: int, *, b_rows_contiguous: bool = False) -> cute.TiledMma:
    """(64, n, k) product of one warpgroup: A in registers, B = (n, k) in shared memory, accumulator fp32.

    ``b_rows_contiguous``: n is the contiguous mode of B (MN-major) instead of k.
    """
    b_major = OperandMajorMode.MN if b_rows_contiguous else OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(
        dtype, dtype, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (M, n), warpgroup.OperandSource.RMEM
    )


def accumulator(thr: Any, n: int) -> cute.Tensor:
    """This thread's fp32 elements of a (64, n) result: modes ((2, 2, n / 8), 1, 1) = (pair of columns, row, 8 columns)."""
    return cute.make_rmem_tensor(thr.partition_shape_C((M, n)), Float32)


def operand_a(thr: Any, k: int) -> cute.Tensor:
    """This thread's elements of a (64, k) A operand."""
    return thr.make_fragment_A(thr.partition_shape_A((M, k)))


def operand_b(thr: Any, sB: cute.Tensor) -> cute.Tensor:
    """Descriptors of a B operand (n, k, stages) in shared memory."""
    return thr.make_fragment_B(thr.partition_B(sB))


def as_accumulator(tCrA: cute.Tensor, acc: cute.Tensor) -> cute.Tensor:
    """The registers of an A operand seen with the modes of the accumulator they came from."""
    return cute.make_tensor(tCrA.iterator, acc.layout)


@cute.jit
def round_to(tCrA: cute.Tensor, acc: cute.Tensor):
    """Round an accumulator into an A operand."""
    cute.make_tensor(tCrA.iterator, acc.layout).store(acc.load().to(tCrA.element_type))


@cute.jit
def gemm(
    tiled: cute.TiledMma,
    acc: cute.Tensor,
    tCrA: cute.Tensor,
    tCrB: cute.Tensor,
    accumulate: cutlass.Constexpr[bool],
):
    """acc (+)= A B^T, issued as one group and not awaited."""
    atom = cute.make_mma_atom(tiled.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(tCrA.shape[2])):
        cute.gemm(atom, acc, tCrA[None, None, k], tCrB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def fence() -> None:
    """Registers written by ordinary instructions may be used by the products that follow."""
    warpgroup.fence()


def wait(groups: int) -> None:
    """Wait until at most ``groups`` of the latest groups are in flight.

    Writing an accumulator while a group is in flight makes ptxas drain every group at the next wait, whatever its
    number: do such writes where ``wait(0)`` follows.
    """
    warpgroup.wait_group(groups)


def columns(thr: Any, row: cute.Tensor, n: int, stages: int) -> cute.Tensor:
    """A vector of n per-column values, (n, stages) in shared memory, as this thread's columns: ((2, n / 8), stages).

    Element (e, j) belongs to the accumulator elements (e, r, j) of both rows r.
    """
    spread = cute.make_tensor(row.iterator, cute.make_layout((M, n, stages), stride=(0, 1, n)))
    return thr.partition_C(spread)[(None, 0, None), 0, 0, None]


@cute.jit
def scale_columns(acc: cute.Tensor, factor: cute.Tensor):
    """acc[:, column] *= factor[column], with ``factor`` loaded from :func:`columns`."""
    for j in cutlass.range_constexpr(cute.size(factor.shape[1])):
        for e in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                acc[(e, r, j), 0, 0] = acc[(e, r, j), 0, 0] * factor[e, j]

"""Products of a warpgroup on plain registers: what phases A and B of bwd_grads issue."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kernel_fun._cute import wgmma
from kernel_fun.kda._kernels.sm90.bwd_grads_config import BT

RMEM, SMEM = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def product(io: Any, n: int, source: Any, a_major: Any, b_major: Any) -> cute.TiledMma:
    """(64, n, k) product of one warpgroup."""
    op = warpgroup.MmaF16BF16Op(io, Float32, (wgmma.M, n, 16), source, a_major, b_major)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def as_accumulator(thr: Any, x: cute.Tensor, n: int) -> cute.Tensor:
    """Plain registers with the modes of a (64, n) accumulator."""
    return cute.make_tensor(
        x.iterator, cute.make_rmem_tensor(thr.partition_shape_C((wgmma.M, n)), Float32).layout
    )


def as_operand(thr: Any, words: cute.Tensor, io: Any, k: int = BT) -> cute.Tensor:
    """Packed words in the order of an accumulator with the modes of a (64, k) A operand."""
    like = cute.make_rmem_tensor(thr.partition_shape_A((wgmma.M, k)), io)
    return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=io), like.layout)


@cute.jit
def steps(tiled: cute.TiledMma, acc: cute.Tensor, tA: cute.Tensor, tB: cute.Tensor, accumulate: Any = True):
    """acc (+)= A B^T; issued, not committed."""
    atom = cute.make_mma_atom(tiled.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(tA.shape[2])):
        cute.gemm(atom, acc, tA[None, None, k], tB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)

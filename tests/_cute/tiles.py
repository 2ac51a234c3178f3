"""A kernel of the building blocks alone: load two tiles by TMA, multiply, store the product. Compiled by their tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from kernel_fun._cute import copy, pipe, wgmma
from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.compile import DTYPES, Program, symbol, tensor
from kernel_fun._cute.pipe import Pipe, Role
from kernel_fun._cute.tile import Tile, dims_first, storage, tma_parts, tokens_first, vector

T, K, V = 64, 128, 64


@dataclass(frozen=True)
class Config:
    io: str = "bfloat16"
    stages: int = 2
    clipped: bool = False


class Product:
    """o[t, v] = scale[t] sum_k q[t, k] x[v, k] + v[t, v] per chunk, with x in registers."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.io = getattr(cutlass, DTYPES[config.io])
        self.LOAD, self.MATH = Role(0, 4, 40), Role(4, 4, 232)
        self.Q = Tile(self.io, T, K, config.stages)
        self.V = Tile(self.io, V, T, config.stages, rows_contiguous=True)
        self.O = Tile(self.io, V, T, 1, rows_contiguous=True)
        self.pipe = Pipe(
            config.stages, self.LOAD, (self.MATH,), tx_bytes=self.Q.stage_bytes + self.V.stage_bytes
        )

    @cute.jit
    def __call__(self, mQ: cute.Tensor, mV: cute.Tensor, mX: cute.Tensor, mO: cute.Tensor, stream: Any):
        self.Storage = storage(
            pipe=self.pipe.field(),
            scale=vector(Float32, T),
            q=self.Q.field(),
            v=self.V.field(),
            o=self.O.field(),
        )
        self.product(
            *self.Q.loader(tokens_first(mQ)),
            *self.V.loader(dims_first(mV)),
            *self.O.storer(dims_first(mO)),
            dims_first(mO),
            mX,
            mV.shape[1],
        ).launch(grid=(mV.shape[2], mV.shape[0], 1), block=(256, 1, 1), stream=stream)

    @cute.kernel
    def product(
        self,
        tmaQ: cute.CopyAtom,
        mQ: cute.Tensor,
        tmaV: cute.CopyAtom,
        mV: cute.Tensor,
        tmaO: cute.CopyAtom,
        mO: cute.Tensor,
        rowsO: cute.Tensor,
        mX: cute.Tensor,
        length: Int32,
    ):
        st = SmemAllocator().allocate(self.Storage)
        ring = self.pipe.bind(st.pipe)
        pipe.start()
        head, b, _ = cute.arch.block_idx()
        chunks = (length + T - 1) // T
        sQ, sV, sO = self.Q.view(st.q), self.V.view(st.v), self.O.view(st.o)
        if cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) == 0:
            pipe.take_registers(self.LOAD, pipe.registers_at_entry(256))
            if pipe.index_of_warp() == 0:
                gQ = cute.local_tile(mQ[None, None, head, b], self.Q.shape, (None, 0))
                tQsQ, tQgQ = tma_parts(tmaQ, gQ, sQ)
                tVsV, tVgV = tma_parts(tmaV, cute.local_tile(mV[None, None, head, b], (V, T), (0, None)), sV)
                at = ring.write_cursor()
                for n in cutlass.range(chunks, unroll=1):
                    ring.wait_empty(at)
                    barrier = ring.expect(at)
                    cute.copy(tmaQ, tQgQ[None, n], tQsQ[None, at.index], tma_bar_ptr=barrier)
                    cute.copy(tmaV, tVgV[None, n], tVsV[None, at.index], tma_bar_ptr=barrier)
                    at.advance()
        else:
            pipe.take_registers(self.MATH, pipe.registers_at_entry(256))
            gO, rows = (cute.local_tile(m[None, None, head, b], (V, T), (0, None)) for m in (mO, rowsO))
            self.math(ring, st, sQ, sV, sO, tmaO, gO, rows, mX, chunks, length)

    @cute.jit
    def math(self, ring, st, sQ, sV, sO, tmaO, gO, rows, mX, chunks: Int32, length: Int32):
        tidx = cute.arch.thread_idx()[0] % 128
        tiled = wgmma.mma(self.io, T)
        thr = tiled.get_slice(tidx)
        tCrQ = wgmma.operand_b(thr, sQ)
        acc, rX = wgmma.accumulator(thr, T), wgmma.operand_a(thr, K)
        rV = cute.make_rmem_tensor(acc.layout, self.io)
        load, put = copy.load_transposed(tiled, self.io, tidx), copy.store_transposed(tiled, self.io, tidx)
        row = st.scale.get_tensor(cute.make_layout((T, 1)))
        row[tidx % T, 0] = Float32(2.0)
        cute.arch.barrier(barrier_id=1, number_of_threads=128)
        scale = cute.make_rmem_tensor((2, T // 8), Float32)
        cute.autovec_copy(wgmma.columns(thr, row, T, 1)[None, None, 0], scale)
        whole = wgmma.accumulator(thr, K)
        cute.autovec_copy(thr.partition_C(mX), whole)
        wgmma.round_to(rX, whole)
        tXsX, tXgX = tma_parts(tmaO, gO, sO)
        at = ring.read_cursor()
        for n in cutlass.range(chunks, unroll=1):
            ring.wait_full(at)
            cute.copy(load, load.partition_S(sV)[None, None, None, at.index], load.retile(rV))
            acc.store(rV.load().to(Float32))
            wgmma.fence()
            wgmma.gemm(tiled, acc, rX, tCrQ[None, None, None, at.index], True)
            wgmma.wait(0)
            ring.free(at)
            wgmma.scale_columns(acc, scale)
            rV.store(acc.load().to(self.io))
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            cute.copy(put, put.retile(rV), put.partition_D(sO[None, None, 0]))
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            if const_expr(self.config.clipped):
                copy.rows_out(sO[None, None, 0], rows[None, None, n], length - n * T, tidx, 128)
            elif cute.arch.make_warp_uniform(tidx // 32) == 0:
                cute.copy(tmaO, tXsX[None, 0], tXgX[None, n])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            at.advance()


def build(config: Config) -> Program:
    B, L, H = (symbol() for _ in range(3))
    return Program(
        Product(config),
        (
            tensor(config.io, B, L, H, K),
            tensor(config.io, B, L, H, V),
            tensor("float32", V, K),
            tensor(config.io, B, L, H, V),
        ),
    )

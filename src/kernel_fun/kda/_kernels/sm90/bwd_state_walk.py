"""The STATE role of bwd_state: 64 columns of V of one sequence, chunk after chunk, the last one first.

    dh  = io(dS)                            staged by 64 channels, the first beside do, the second over it
    dv2 = io(Aqk^T do + kR io(dS))          staged over do, once dh has left
    y   = io(A^T dv2)
    dS  = total dS + qE^T do + kE^T y       fp32 registers, transposed as all of it

Its first warp issues the loads, each into a slot that all warpgroups have freed.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from kernel_fun._cute import copy, pipe, wgmma
from kernel_fun._cute.pipe import WARPGROUP
from kernel_fun._cute.tile import Tile, tma_parts
from kernel_fun.kda._kernels.sm90 import overlap
from kernel_fun.kda._kernels.sm90.operands import STATE_BARRIER, Builder
from kernel_fun.kda._kernels.sm90.scan_config import BT
from kernel_fun.kda._kernels.sm90.scan_loads import Loader, Loads

BLOCK = 64
"""Channels of the tiles dh leaves in: as many as dv2's have tokens."""


class Walk(Loader):
    """Of a kernel with a config, operands by ``builder``, and tiles of shared memory."""

    io: Any
    builder: Builder
    A: Tile
    At: Tile
    V: Tile
    H: Tile
    Qt: Tile
    Et: Tile

    @cute.jit
    def walk(
        self, st, rings, loads: Loads, dh, dv2, gDht, gDh0, half: Int32, length: Int32, NT: Int32,
    ):  # fmt: skip
        """STATE: 64 columns of V for the whole sequence, last chunk first. Its first warp issues the loads."""
        c = self.config
        raw, built, row = rings
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        leader = cute.arch.make_warp_uniform(tidx // 32) == 0
        loader = pipe.index_of_warp() == c.state.first_warp
        mma_k = wgmma.mma(self.io, BT)
        mma_t = wgmma.mma(self.io, BT, b_rows_contiguous=True)
        mma_s = wgmma.mma(self.io, c.K, b_rows_contiguous=True)
        thr_k, thr_t, thr_s = (m.get_slice(tidx) for m in (mma_k, mma_t, mma_s))
        tCrR = wgmma.operand_b(thr_k, self.builder.Q.view(st.k))
        tCrA = wgmma.operand_b(thr_t, self.At.view(st.A))
        tCrAqk = wgmma.operand_b(thr_t, self.At.view(st.Aqk))
        tCrQ = wgmma.operand_b(thr_s, self.Qt.view(st.q))
        tCrE = wgmma.operand_b(thr_s, self.Et.view(st.g))
        acc_S, acc_V = wgmma.accumulator(thr_s, c.K), wgmma.accumulator(thr_t, BT)
        rS, rV, rD = (wgmma.operand_a(thr_k, n) for n in (c.K, BT, BT))
        rVc, rDc = wgmma.as_accumulator(rV, acc_V), wgmma.as_accumulator(rD, acc_V)

        blocks = c.K // BLOCK
        block = cute.size(acc_V)
        layout = acc_V.layout
        rSc = cute.make_tensor(
            rS.iterator, cute.make_layout((*layout.shape, blocks), stride=(*layout.stride, block))
        )

        load = copy.load_transposed(mma_t, self.io, tidx)
        put = copy.store_transposed(mma_t, self.io, tidx)
        sD = self.V.view(st.do)
        sH = self.H.view(st.dh)[None, None, half] if const_expr(c.want_dh) else None
        tDsD, tDrD = load.partition_S(sD), load.retile(rDc)
        tTsT = wgmma.columns(thr_s, loads.sTotal, c.K, c.row_stages)
        total = cute.make_rmem_tensor((2, c.K // 8), Float32)

        load_raw, load_row = raw.write_cursor(), row.write_cursor()
        if loader:
            for i in cutlass.range(cutlass.min(NT, c.raw_stages), unroll=1):
                self.load_raw(raw, load_raw, loads, NT - 1 - i)
                load_raw.advance()
                if i < c.row_stages:
                    self.load_row(row, load_row, loads, NT - 1 - i)
                    load_row.advance()
        if const_expr(c.has_dht):
            cute.autovec_copy(thr_s.partition_C(gDht), acc_S)
        else:
            acc_S.fill(0.0)
        at_raw, at_row = raw.read_cursor(), row.read_cursor()
        for i in cutlass.range(NT, unroll=1):
            n = NT - 1 - i
            r, j = at_raw.index, at_row.index
            own = j * c.holders + half
            row.wait_full(at_row)
            built.wait_full(at_raw)
            # dv2 = Aqk^T do + kR dS
            if const_expr(c.has_do):
                cute.copy(load, tDsD[None, None, None, own], tDrD)
            wgmma.round_to(rS, acc_S)
            wgmma.fence()
            if const_expr(c.has_do):
                wgmma.gemm(mma_t, acc_V, rD, tCrAqk[None, None, None, j], False)
            wgmma.gemm(mma_k, acc_V, rS, tCrR[None, None, None, r], c.has_do)
            if const_expr(c.want_dh):
                stages = (sH, sD[None, None, own])
                for b in cutlass.range_constexpr(blocks):
                    self.stage(put, rSc[None, None, None, b], stages[b])
                self.meet(half)
                if leader:
                    for b in cutlass.range_constexpr(blocks):
                        self.send(dh[0], stages[b], dh[1][None, None, b, n])
                    cute.arch.cp_async_bulk_commit_group()
            cute.autovec_copy(tTsT[None, None, j], total)
            wgmma.scale_columns(acc_S, total)
            wgmma.wait(0)
            wgmma.round_to(rV, acc_V)
            # y = A^T dv2, dS = total dS + qE^T do
            wgmma.fence()
            wgmma.gemm(mma_t, acc_V, rV, tCrA[None, None, None, j], False)
            if const_expr(c.has_do):
                wgmma.gemm(mma_s, acc_S, rD, tCrQ[None, None, None, r], True)
            if const_expr(c.want_dh):
                if leader:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.meet(half)
                self.stage(put, rVc, sD[None, None, own])
                self.meet(half)
                self.send_rows(dv2, sD[None, None, own], n, length - n * BT, leader)
            wgmma.wait(1 if c.has_do else 0)
            # dS += kE^T y
            wgmma.round_to(rV, acc_V)
            wgmma.fence()
            wgmma.gemm(mma_s, acc_S, rV, tCrE[None, None, None, r], True)
            wgmma.wait(0)
            raw.free(at_raw)
            if const_expr(c.want_dh):
                if leader:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            row.free(at_row)
            at_raw.advance()
            at_row.advance()
            if loader:
                if n >= c.raw_stages:
                    self.load_raw(raw, load_raw, loads, n - c.raw_stages)
                    load_raw.advance()
                if n >= c.row_stages:
                    self.load_row(row, load_row, loads, n - c.row_stages)
                    load_row.advance()
        if const_expr(c.want_dh0):
            cute.autovec_copy(acc_S, thr_s.partition_C(gDh0))
        if const_expr(c.want_dh):
            cute.arch.cp_async_bulk_wait_group(0)
        if const_expr(c.overlapped):
            overlap.end()

    def stage(self, put, rX: cute.Tensor, sX: cute.Tensor) -> None:
        """A result in accumulator layout to shared memory."""
        cute.copy(put, put.retile(rX), put.partition_D(sX))

    def send(self, tma, sX: cute.Tensor, gX: cute.Tensor) -> None:
        """A staged tile to global memory."""
        tXsX, tXgX = tma_parts(tma, gX, sX)
        cute.copy(tma, tXsX, tXgX)

    @cute.jit
    def send_rows(self, to, sX: cute.Tensor, n: Int32, left: Int32, leader):
        """A staged tile to tile n of ``to``, of which ``left`` tokens are inside the sequence."""
        tma, gX, rows = to
        if const_expr(rows is None):
            if leader:
                self.send(tma, sX, gX[None, None, n])
                cute.arch.cp_async_bulk_commit_group()
        elif left < BT:
            thread = pipe.thread_again() % WARPGROUP  # no address of this rare copy is kept in a register
            copy.rows_out(sX, rows[None, None, n], left, thread, WARPGROUP)
        elif leader:
            self.send(tma, sX, gX[None, None, n])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def meet(self, half: Int32):
        """Barrier of a warpgroup; what it has stored to shared memory may be sent afterwards."""
        cute.arch.fence_view_async_shared()
        if const_expr(self.config.holders == 1):
            cute.arch.barrier(barrier_id=STATE_BARRIER, number_of_threads=WARPGROUP)
        elif half == 0:
            cute.arch.barrier(barrier_id=STATE_BARRIER, number_of_threads=WARPGROUP)
        else:
            cute.arch.barrier(barrier_id=STATE_BARRIER + 1, number_of_threads=WARPGROUP)

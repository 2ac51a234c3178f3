"""The STATE role of fwd_state: 64 columns of V of one sequence, chunk after chunk.

    h     = io(S)                           before the chunk
    t     = io(beta v + kE S)               the accumulator is preset to beta v
    v_new = io(A t)
    o     = io(qE S + Aqk v_new)            sent while the next chunk's t is computed
    S     = total S + kR^T v_new            fp32 registers, transposed as all of it

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
from kernel_fun.kda._kernels.sm90.scan_config import BT, ROWS
from kernel_fun.kda._kernels.sm90.scan_loads import Loader, Loads


class Walk(Loader):
    """Of a kernel with a config, operands by ``builder``, and tiles of shared memory."""

    io: Any
    builder: Builder
    R: Tile
    A: Tile
    V: Tile

    @cute.jit
    def walk(
        self, st, rings, loads: Loads, ready, results, gH0, gHt, half: Int32, length: Int32, NT: Int32,
    ):  # fmt: skip
        """STATE: 64 columns of V for the whole sequence. Its first warp issues the loads."""
        c = self.config
        raw, built, row = rings
        o, v_new, h = results
        tidx = cute.arch.thread_idx()[0] % WARPGROUP
        loader = pipe.index_of_warp() == c.state.first_warp
        mma_t = wgmma.mma(self.io, BT)
        mma_s = wgmma.mma(self.io, c.K, b_rows_contiguous=True)
        thr_t, thr_s = mma_t.get_slice(tidx), mma_s.get_slice(tidx)
        tCrE = wgmma.operand_b(thr_t, self.builder.E.view(st.g))
        tCrR = wgmma.operand_b(thr_s, self.R.view(st.k))
        tCrA = wgmma.operand_b(thr_t, self.A.view(st.A))
        acc_S, acc_V = wgmma.accumulator(thr_s, c.K), wgmma.accumulator(thr_t, BT)
        rS, rV = wgmma.operand_a(thr_t, c.K), wgmma.operand_a(thr_t, BT)
        tCrQ = tCrAqk = acc_O = rO = None
        if const_expr(c.want_o):
            tCrQ = wgmma.operand_b(thr_t, self.builder.Q.view(st.q))
            tCrAqk = wgmma.operand_b(thr_t, self.A.view(st.Aqk))
            acc_O = wgmma.accumulator(thr_t, BT)
            rO = cute.make_rmem_tensor(acc_O.layout, self.io)

        sV = cute.local_tile(self.V.view(st.v), (ROWS, BT, c.row_stages), (half, 0, 0))
        load = copy.load_transposed(mma_t, self.io, tidx)
        rVc = wgmma.as_accumulator(rV, acc_V)
        tVsV, tVrV = load.partition_S(sV), load.retile(rVc)
        put_t = copy.store_transposed(mma_t, self.io, tidx)
        put_s = copy.store_transposed(mma_s, self.io, tidx)
        sBeta = st.beta.get_tensor(cute.make_layout((BT, c.raw_stages)))
        tBsB = wgmma.columns(thr_t, sBeta, BT, c.raw_stages)
        tTsT = wgmma.columns(thr_s, loads.sTotal, c.K, c.row_stages)
        beta = cute.make_rmem_tensor((2, BT // 8), Float32)
        total = cute.make_rmem_tensor((2, c.K // 8), Float32)

        load_raw, load_row = raw.write_cursor(), row.write_cursor()
        seen = cute.make_rmem_tensor(1, Int32)
        seen.fill(0)
        if loader:
            for n in cutlass.range(cutlass.min(NT, c.raw_stages - 1), unroll=1):
                self.load_next(raw, load_raw, loads, ready, n, seen)
                load_raw.advance()
                if n < c.row_stages - 1:
                    self.load_row(row, load_row, loads, n)
                    load_row.advance()
        if const_expr(c.has_h0):
            cute.autovec_copy(thr_s.partition_C(gH0), acc_S)
        else:
            acc_S.fill(0.0)
        at_raw, at_row = raw.read_cursor(), row.read_cursor()
        for n in cutlass.range(NT, unroll=1):
            # a chunk goes into the slots that the chunk before this one has left
            if loader:
                if n + c.raw_stages - 1 < NT:
                    self.load_next(raw, load_raw, loads, ready, n + c.raw_stages - 1, seen)
                    load_raw.advance()
                if n + c.row_stages - 1 < NT:
                    self.load_row(row, load_row, loads, n + c.row_stages - 1)
                    load_row.advance()
            i, j = at_raw.index, at_row.index
            left = length - n * BT
            row.wait_full(at_row)
            built.wait_full(at_raw)
            # t = beta v + kE S, o = qE S
            cute.copy(load, tVsV[None, None, None, j], tVrV)
            cute.autovec_copy(tBsB[None, None, i], beta)
            acc_V.store(rVc.load().to(Float32))
            wgmma.scale_columns(acc_V, beta)
            wgmma.round_to(rS, acc_S)
            wgmma.fence()
            wgmma.gemm(mma_t, acc_V, rS, tCrE[None, None, None, i], True)
            if const_expr(c.want_o):
                wgmma.gemm(mma_t, acc_O, rS, tCrQ[None, None, None, i], False)
                if n > 0:
                    self.send(o, n - 1, Int32(BT), half, tidx)
            if const_expr(c.want_h):
                self.vacate(half, tidx)
                self.stage(put_s, wgmma.as_accumulator(rS, acc_S), h)
                self.send(h, n, Int32(BT), half, tidx)
            wgmma.wait(0)
            # v_new = A t
            wgmma.round_to(rV, acc_V)
            wgmma.fence()
            wgmma.gemm(mma_t, acc_V, rV, tCrA[None, None, None, j], False)
            cute.autovec_copy(tTsT[None, None, j], total)
            wgmma.scale_columns(acc_S, total)
            wgmma.wait(0)
            wgmma.round_to(rV, acc_V)
            # S = total S + kR^T v_new, o += Aqk v_new
            wgmma.fence()
            wgmma.gemm(mma_s, acc_S, rV, tCrR[None, None, None, i], True)
            if const_expr(c.want_o):
                wgmma.gemm(mma_t, acc_O, rV, tCrAqk[None, None, None, j], True)
            if const_expr(c.want_v_new):
                self.vacate(half, tidx)
                self.stage(put_t, rVc, v_new)
                self.send(v_new, n, left, half, tidx)
            if const_expr(c.want_o):
                self.vacate(half, tidx)
            wgmma.wait(0)
            raw.free(at_raw)
            row.free(at_row)
            if const_expr(c.want_o):
                rO.store(acc_O.load().to(self.io))
                self.stage(put_t, rO, o)
            at_raw.advance()
            at_row.advance()
        if const_expr(c.want_o):
            if NT > 0:
                self.send(o, NT - 1, length - (NT - 1) * BT, half, tidx)
        if const_expr(c.want_ht):
            cute.autovec_copy(acc_S, thr_s.partition_C(gHt))
        cute.arch.cp_async_bulk_wait_group(0)
        if const_expr(c.overlapped):
            overlap.end()

    @cute.jit
    def load_next(self, raw, at, loads: Loads, ready, n: Int32, seen: cute.Tensor):
        """q, k, g of chunk n. They also say that fwd_intra has written chunk n + 1: BUILD asks for what it needs of that
        once it has these."""
        if const_expr(self.config.overlapped):
            own, leader, NT = ready
            overlap.follow(own, leader, seen, cutlass.min(n + 2, NT), NT)
        self.load_raw(raw, at, loads, n)

    @cute.jit
    def vacate(self, half: Int32, tidx: Int32):
        """Wait until the store whose staging tile is written next has left it: all but the other kinds' latest ones."""
        c = self.config
        if cute.arch.make_warp_uniform(tidx // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(c.want_o + c.want_h + c.want_v_new - 1, read=True)
        self.meet(half)

    def stage(self, put, rX: cute.Tensor, to) -> None:
        """A result in accumulator layout to this warpgroup's staging tile of ``to``."""
        cute.copy(put, put.retile(rX), put.partition_D(to[2]))

    @cute.jit
    def send(self, to, n: Int32, left: Int32, half: Int32, tidx: Int32):
        """The staging tile to tile n of ``to``, of which ``left`` tokens are inside the sequence."""
        tma, gX, sX, rows = to
        leader = cute.arch.make_warp_uniform(tidx // 32) == 0
        cute.arch.fence_view_async_shared()
        self.meet(half)
        if const_expr(rows is not None):
            if left < BT:
                thread = pipe.thread_again() % WARPGROUP  # no address of this rare copy is kept in a register
                copy.rows_out(sX, rows[None, None, n], left, thread, WARPGROUP)
        if leader:
            if const_expr(rows is None):
                self.send_tile(tma, sX, gX[None, None, n])
            elif left >= BT:
                self.send_tile(tma, sX, gX[None, None, n])
            cute.arch.cp_async_bulk_commit_group()

    def send_tile(self, tma, sX: cute.Tensor, gX: cute.Tensor) -> None:
        tXsX, tXgX = tma_parts(tma, gX, sX)
        cute.copy(tma, tXsX, tXgX)

    @cute.jit
    def meet(self, half: Int32):
        """Barrier of a warpgroup. The numbers are known at compile time."""
        if const_expr(self.config.holders == 1):
            cute.arch.barrier(barrier_id=STATE_BARRIER, number_of_threads=WARPGROUP)
        elif half == 0:
            cute.arch.barrier(barrier_id=STATE_BARRIER, number_of_threads=WARPGROUP)
        else:
            cute.arch.barrier(barrier_id=STATE_BARRIER + 1, number_of_threads=WARPGROUP)

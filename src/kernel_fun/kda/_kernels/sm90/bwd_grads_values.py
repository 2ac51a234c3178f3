"""Phase A of bwd_grads: all that is contracted over values, 64 a turn of the ring.

    dAqk = do v_new^T,  dM = dv2 v^T                        [64, 64] fp32, a warpgroup each
    dq^T = S do^T,  dw^T = -S dv2^T,  dk^T = dS v_new^T     [K, 64] fp32, a warp 16 channels; S and dS are read once
    dvb  = A^T dv2,  dv = io(beta dvb),  dbeta = dvb . v    [64, V]; a warpgroup half of the values
    s    = sum_v S dS                                       [K] fp32

The sign of dw is given where it is rounded, in phase B.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from kernel_fun._cute import sweep, wgmma
from kernel_fun._cute.warp import matrices, pack, unpack
from kernel_fun.kda._kernels.sm90.bwd_grads_config import BT, BV, DO, DV2, HALF_BYTES, MATH, V_NEW, Barrier
from kernel_fun.kda._kernels.sm90.bwd_grads_products import (
    K_MAJOR,
    MN_MAJOR,
    RMEM,
    SMEM,
    as_accumulator,
    as_operand,
    product,
    steps,
)
from kernel_fun.kda._kernels.sm90.bwd_grads_thread import Thread, load_float, put_word


class Values(Thread):
    """Phase A."""

    @cute.jit
    def products(
        self, st, ring, at, mDv, dq, dk, dw, square, states, seen, dvb_v, first: Int32, valid: Int32, hv: Int32,
        NV: Int32,
    ):  # fmt: skip
        """A: all that is contracted over values. ``square``: dAqk (warpgroup 0), dM (1). ``dw`` without its sign.

        states: s of the thread's two channels, over its own values. seen: bits of S of these channels.
        dvb_v: dvb . v of the thread's two tokens, over its own values. Returns the ring's cursor.
        """
        rs = product(self.io, BT, RMEM, K_MAJOR, K_MAJOR)
        ss = product(self.io, BT, SMEM, K_MAJOR, K_MAJOR)
        through = product(self.io, BV // 2, SMEM, MN_MAJOR, MN_MAJOR)
        thr, thr_ss, thr_through = (x.get_slice(self.tidx) for x in (rs, ss, through))
        sRow = self.row.view(st.row)
        sDv2 = cute.local_tile(self.row_t.view(st.row), (BV // 2, BT, 4 * self.c.stages), (self.wg, 0, 0))
        bRow = thr.make_fragment_B(thr.partition_B(sRow))
        aRow, bRow_ss = (
            thr_ss.make_fragment_A(thr_ss.partition_A(sRow)), thr_ss.make_fragment_B(thr_ss.partition_B(sRow)),
        )  # fmt: skip
        aA = thr_through.make_fragment_A(thr_through.partition_A(self.square_t.view(st.A)))
        bDv2 = thr_through.make_fragment_B(thr_through.partition_B(sDv2))
        wH, wDh = (cute.make_rmem_tensor(16, Int32) for _ in range(2))
        rH, rDh = (as_operand(thr, x, self.io) for x in (wH, wDh))
        acc_q, acc_k, acc_w, acc_s = (as_accumulator(thr, x, BT) for x in (dq, dk, dw, square))
        dvb = cute.make_rmem_tensor(16, Float32)
        acc_v = as_accumulator(thr_through, dvb, BV // 2)
        for x in (states, dvb_v):
            x.fill(0.0)
        seen.fill(0)
        tile = 2 * self.wg
        token_0 = self.first_row + self.lane.r
        beta = [load_float(self.at["beta"] + 4 * token_0 + 32 * w) for w in range(2)]
        wDv = cute.recast_tensor(mDv, Int32)
        place = self.wg * (BV // 4) + self.lane.c
        for n in cutlass.range(NV, unroll=1):
            ring.wait_full(at)
            s = at.index
            if valid < BT:
                for i in cutlass.range_constexpr(4):
                    at_row = (4 * s + i) * (HALF_BYTES // 4)
                    self.blank(self.row_words, at_row, valid, Int32(0))
                self.publish(Barrier.MATH, MATH.threads)
            do, v_new, dv2 = (bRow[None, None, None, 4 * s + i] for i in (DO, V_NEW, DV2))
            wgmma.fence()
            steps(
                ss, acc_s, aRow[None, None, None, 4 * s + DO + tile], bRow_ss[None, None, None, 4 * s + V_NEW + tile],
                n > 0,
            )  # fmt: skip
            steps(through, acc_v, aA[None, None, None, 0], bDv2[None, None, None, 4 * s + DV2], False)
            warpgroup.commit_group()
            for k in cutlass.range_constexpr(4):
                at_h = (self.h_at + 4 * HALF_BYTES * s) ^ (32 * k)
                h, dh = matrices(at_h), matrices(at_h + 2 * HALF_BYTES)
                for i in cutlass.range_constexpr(4):
                    wH[4 * k + i], wDh[4 * k + i] = h[i], dh[i]
            wgmma.fence()
            for a, acc, x in ((rH, acc_q, do), (rH, acc_w, dv2), (rDh, acc_k, v_new)):
                steps(rs, acc, a, x, n > 0)
            warpgroup.commit_group()
            for i in cutlass.range_constexpr(16):
                h, dh = unpack(wH[i], self.io), unpack(wDh[i], self.io)
                for p in cutlass.range_constexpr(2):
                    states[i % 2] = states[i % 2] + h[p] * dh[p]
                seen[i % 2] = seen[i % 2] | wH[i]
            warpgroup.wait_group(1)
            # dv = beta dvb of 32 values, dbeta += dvb . v
            dv = []
            for j in cutlass.range_constexpr(2):
                words = matrices((self.v_at + 4 * s * HALF_BYTES) ^ (32 * j))
                for i in cutlass.range_constexpr(4):
                    w, tile_n = i % 2, 2 * j + i // 2
                    x, y = dvb[4 * tile_n + 2 * w], dvb[4 * tile_n + 2 * w + 1]
                    v = unpack(words[i], self.io)
                    dvb_v[w] = dvb_v[w] + (x * v[0] + y * v[1])
                    dv.append(pack(x * beta[w], y * beta[w], self.io))
            for w in cutlass.range_constexpr(2):
                if token_0 + 8 * w < valid:
                    row_dv = wDv[first + token_0 + 8 * w, hv, None]
                    for i in cutlass.range_constexpr(4):
                        row_dv[n * (BV // 2) + place + 4 * i] = dv[2 * i + w]
            warpgroup.wait_group(0)
            ring.free(at)
            at.advance()
        return at

    @cute.jit
    def put_dvb_v(self, dvb_v: cute.Tensor):
        """dvb . v over a warpgroup's values to shared memory."""
        for w in cutlass.range_constexpr(2):
            x = sweep.sum_quad(dvb_v[w])
            if self.lane.c == 0:
                put_word(self.at["dvb_v"] + 4 * (self.wg * BT + self.first_row + self.lane.r + 8 * w), x)

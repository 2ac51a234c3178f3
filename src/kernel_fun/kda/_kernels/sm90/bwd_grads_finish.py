"""Phase D of bwd_grads: sums over warps, the derivatives of norm, beta and gate, stores.

    dq, dk = rstd (dy - (dy . y) y)                              y = q^, k^; without l2norm dy; of shared heads rstd dy
    dbeta  = (dvb . v + rk . k^) times the sigmoid's derivative  rk . k^ = (beta k^ . rk) / beta
    dg, and sums over the chunk for dA_log and d dt_bias         see :mod:`bwd_grads_gate`

Whole chunks leave by TMA, from where q, k and g were; the rows of a short one are stored here, as are the shares of dq and
dk of heads that have several value heads.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from kernel_fun._cute import sweep
from kernel_fun._cute.sweep import Lanes
from kernel_fun._cute.warp import load4, select
from kernel_fun.kda._kernels.sm90.bwd_grads_config import (
    BLOCK_BYTES,
    BT,
    CHANNELS,
    EIGHTS,
    HALF_BYTES,
    MATH,
    Barrier,
)
from kernel_fun.kda._kernels.sm90.bwd_grads_gate import Gates
from kernel_fun.kda._kernels.sm90.bwd_grads_thread import load_float, not_zero, put_word, sigmoid


class Finish(Gates):
    """Phase D."""

    @cute.jit
    def finish(
        self, st, out_qk, at_out_qk, A_log, lower_bound: Float32, bias, dq, dk, dg,
        sums: cutlass.Constexpr[Any], mBeta, mQ_rstd, mDq, mDk, mDg, mDbeta, mDA, mDbias, chunk: Int32, hv: Int32,
        first: Int32, valid: Int32, h: Int32,
    ):  # fmt: skip
        """D: sums over channels and tokens, the derivatives of gate, norm and beta, stores."""
        c = self.c
        normal = c.l2norm and not c.shared
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        self.put_sums(sums[: 3 if normal else 1], dg)
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        self.sum_warps(mBeta, mQ_rstd, mDbeta, first, valid, hv, h)
        self.put_quarter_sums()
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        if cutlass.const_expr(c.shared):
            self.store_shares(dq, mDq, first, valid, hv)
            self.store_shares(dk, mDk, first, valid, hv)
        else:
            self.put_rows(dq, self.q_at, "q_factor")
            self.put_rows(dk, self.k_at, "b_factor")
        if valid == BT:
            out_qk.publish(at_out_qk)
        carry = cute.make_rmem_tensor(2, Float32)
        base, seen = (sweep.load2(self.at[name] + 8 * self.pair) for name in ("base", "seen"))
        for odd in cutlass.range_constexpr(2):
            carry[odd] = base[odd]
        for i in cutlass.range_constexpr(1, 4):
            later = sweep.load2(self.at["Y"] + 6144 + 512 * i + 8 * self.pair)
            for odd in cutlass.range_constexpr(2):
                carry[odd] = carry[odd] + select(self.quarter < i, later[odd], Float32(0.0))
        out = cute.make_rmem_tensor(3, Float32)
        out.fill(0.0)
        gate = self.gate(A_log, lower_bound)
        for n in cutlass.range(2, unroll=1):
            self.gate_eight(gate, lower_bound, bias, carry, seen, out, 1 - n)
        if cutlass.const_expr(mDA is not None):
            dA = out[0]
            for i in cutlass.range_constexpr(5):
                dA = dA + cute.arch.shuffle_sync_bfly(dA, offset=1 << i)
            sDA = st.dA.get_tensor(cute.make_layout(MATH.warps))
            if self.lane.lane == 0:
                sDA[self.warp] = dA
        if cutlass.const_expr(mDbias is not None):
            sweep.put2(self.at["Y"] + 512 * self.quarter + 8 * self.pair, [out[1], out[2]])
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        if valid < BT:
            self.store_rows(self.at["g"], mDg, first, valid, hv)
            if cutlass.const_expr(not c.shared):
                self.store_rows(self.at["q"], mDq, first, valid, h)
                self.store_rows(self.at["k"], mDk, first, valid, h)
            out_qk.publish(at_out_qk)
        if cutlass.const_expr(mDbias is not None):
            if self.tid < c.K:
                parts = [load_float(self.at["Y"] + 512 * i + 4 * self.tid) for i in range(4)]
                mDbias[chunk, hv, self.tid] = (parts[0] + parts[1]) + (parts[2] + parts[3])
        if cutlass.const_expr(mDA is not None):
            if self.tid == CHANNELS:
                dA = sDA[0]
                for i in cutlass.range_constexpr(1, MATH.warps):
                    dA = dA + sDA[i]
                mDA[chunk, hv] = dA

    def put_sums(self, sums: list[list[Any]], dg: Any) -> None:
        """Sums over the warp's channels to its row in Y, dg to X."""
        for kind, x in enumerate(sums):
            sweep.put2(self.Y_at + 2048 * kind + 256 * self.warp + 32 * self.lane.r + 8 * self.lane.c, x)
        for n in range(EIGHTS):
            for row in range(2):
                sweep.put2(
                    sweep.of_fragment(self.exchange, n, row), [dg[4 * n + 2 * row + p] for p in range(2)]
                )

    @cute.jit
    def sum_warps(self, mBeta, mQ_rstd, mDbeta, first: Int32, valid: Int32, hv: Int32, h: Int32):
        """dbeta to global, and -(dy . y) rstd^2 of the norms to shared memory."""
        c = self.c
        normal = cutlass.const_expr(c.l2norm and not c.shared)
        t, kind = self.tid & (BT - 1), self.tid >> 6
        if kind < (3 if normal else 1):
            x = self.sum_of_warps(t, kind)
            if kind == 0:
                if t < valid:
                    x = x * cute.arch.rcp_approx(not_zero(load_float(self.at["beta"] + 4 * t)))
                    dvb_v = [load_float(self.at["dvb_v"] + 4 * (t + BT * i)) for i in range(2)]
                    x = x + (dvb_v[0] + dvb_v[1])
                    if cutlass.const_expr(c.beta_mode != "raw"):
                        top = 2.0 if c.beta_mode == "sigmoid2" else 1.0
                        beta = mBeta[first + t, hv].to(Float32)
                        x = x * (top * sigmoid(beta) * sigmoid(-beta))
                    mDbeta[first + t, hv] = x.to(mDbeta.element_type)
            elif kind == 1:
                if cutlass.const_expr(normal):
                    if t < valid:
                        rstd = mQ_rstd[first + t, h]
                        put_word(self.at["q_factor"] + 4 * t, -x * rstd * rstd)
            else:
                rstd = load_float(self.at["k_factor"] + 4 * t)
                put_word(self.at["b_factor"] + 4 * t, -(x + self.sum_of_warps(t, 0)) * rstd * rstd)

    def sum_of_warps(self, t: Any, kind: Any) -> Any:
        """Over the warps, of sums over their channels."""
        x = [load_float(self.at["Y"] + 4 * t + 2048 * kind + 256 * i) for i in range(MATH.warps)]
        return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))

    def put_quarter_sums(self) -> None:
        """dg over the thread's 16 tokens, past the sums over warps in Y."""
        out = []
        for odd in range(2):
            at = [sweep.of_tokens(self.walk ^ (32 * n), odd, half) for n in range(2) for half in range(2)]
            x = [y for address in at for y in load4(address)]
            while len(x) > 1:
                x = [x[i] + x[i + 1] for i in range(0, len(x), 2)]
            out += x
        sweep.put2(self.Y_at + 6144 + 512 * self.quarter + 8 * self.pair, out)

    def put_rows(self, dx: Any, at: Int32, dot: str) -> None:
        """dq or dk, rounded, over q or k; with l2norm less what the norm takes."""
        for b in range(BT // 16):
            words = sweep.matrices_transposed(at + BLOCK_BYTES * b)
            out = []
            for n in (2 * b, 2 * b + 1):
                y = [dx[4 * n + i] for i in range(4)]
                if self.c.l2norm:
                    x, by = (
                        sweep.unpack_values(words[n % 2 * 2 : n % 2 * 2 + 2], self.io),
                        self.of_tokens(dot, n),
                    )
                    y = [y[i] + by[i % 2] * x[i] for i in range(4)]
                out += sweep.pack_values(y, self.io)
            sweep.put_matrices_transposed(at + BLOCK_BYTES * b, out)

    @cute.jit
    def store_rows(self, tile: Int32, mX: cute.Tensor, first: Int32, valid: Int32, head: Int32):
        """Valid rows of a tile to global memory, 16 bytes a thread and turn."""
        width = 128 // mX.element_type.width
        across = CHANNELS // width
        down = MATH.threads // across
        unit, i = self.tid & (across - 1), self.tid >> (across.bit_length() - 1)
        words = cute.make_rmem_tensor(4, Int32)
        values = cute.make_tensor(
            cute.recast_ptr(words.iterator, dtype=mX.element_type), cute.make_layout(width)
        )
        at = tile + (unit >> 3) * HALF_BYTES + Lanes.unit(i, unit & 7)
        for n in cutlass.range(BT // down, unroll=1):
            t = i + down * n
            if t < valid and unit < self.c.K // width:
                x = sweep.load_words(at + n * (down * sweep.ROW_BYTES))
                for e in cutlass.range_constexpr(4):
                    words[e] = x[e]
                cute.autovec_copy(values, cute.local_tile(mX[first + t, head, None], (width,), (unit,)))

    @cute.jit
    def store_shares(self, x: cute.Tensor, mX: cute.Tensor, first: Int32, valid: Int32, hv: Int32):
        """fp32 values of the thread to global memory."""
        for n in cutlass.range_constexpr(EIGHTS):
            for e in cutlass.range_constexpr(4):
                t = 8 * n + 2 * self.lane.c + e % 2
                channel = self.channel + 8 * (e // 2)
                if t < valid and channel < self.c.K:
                    mX[first + t, hv, channel] = x[4 * n + e]

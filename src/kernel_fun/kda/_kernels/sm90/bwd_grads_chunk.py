"""Phase B of bwd_grads: through A, from gradients of what A was applied to, to those of scores.

    D    = tril_-1(dM beta_j + io(dw) io(beta k^ E)^T)      [64, 64]; E: product of a up to a token
    Z    = io(D) A^T,  dAkk = -tril_-1(A^T io(Z))           bf16
    rk^T = io(dw^T) A                                       without E, which the sweeps give
    Q    = bf16(scale q^ w),  B = bf16(beta k^ w)

Warpgroup 0 holds dAqk, and leaves tril_-1 of it as a sum of two bf16 numbers, its diagonal in fp32; warpgroup 1 holds dM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from kernel_fun._cute import sweep, wgmma
from kernel_fun._cute.pipe import WARPGROUP
from kernel_fun._cute.tile import Tile
from kernel_fun._cute.warp import select
from kernel_fun.kda._kernels.sm90.bwd_grads_config import BLOCK_BYTES, BT, EIGHTS, HALF_BYTES, MATH, Barrier
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
from kernel_fun.kda._kernels.sm90.bwd_grads_thread import Thread, put_word


class Chunk(Thread):
    """Phase B, but for the gate."""

    def eights(self, at: Int32) -> Iterator[list[Any]]:
        """q or k in fp32, by eights."""
        for b in range(BT // 16):
            words = sweep.matrices_transposed(at + BLOCK_BYTES * b)
            for n in range(2):
                yield sweep.unpack_values(words[2 * n : 2 * n + 2], self.io)

    def queries(self, w: list[Any]) -> list[list[Int32]]:
        """Words of Q by eights."""
        out = []
        for n, q in enumerate(self.eights(self.q_at)):
            factor = self.of_tokens("q_factor", n)
            x = [q[e] * (w[4 * n + e] * factor[e % 2]) for e in range(sweep.VALUES)]
            out.append(sweep.pack_values(x, BFloat16))
        return out

    def betas(self, w: list[Any], s: Any, t: list[Any]) -> list[list[Int32]]:
        """Words of B by eights; beta k^ E to shared memory."""
        out, E, kE = [], s, []
        for n, k in enumerate(self.eights(self.k_at)):
            if n % 2 == 0:
                cute.arch.sync_warp()
            factor = self.of_tokens("b_factor", n)
            x = [k[e] * (w[4 * n + e] * factor[e % 2]) for e in range(sweep.VALUES)]
            out.append(sweep.pack_values(x, BFloat16))
            kE += sweep.pack_values(sweep.scaled(x, E), self.io)
            if n % 2:
                at = self.X_own + 2 * HALF_BYTES + BLOCK_BYTES * (n // 2)
                sweep.put_matrices_transposed(at, kE)
                kE = []
            if n < EIGHTS - 1:
                E = [E[row] * t[n][row] for row in range(2)]
        return out

    @cute.jit
    def through_A(self, st, dq, dk, dw, square, w: cutlass.Constexpr[Any], between: cutlass.Constexpr[Any]):
        """B: dAqk, dAkk to shared memory; ``dw`` becomes rk without E. Returns the words of Q and B by eights."""
        io = self.io
        s, _, t = between
        words_w = cute.make_rmem_tensor(16, Int32)
        for b in cutlass.range_constexpr(4):
            x = sweep.pack_values([-dw[8 * b + e] for e in range(8)], io)
            for i in cutlass.range_constexpr(4):
                words_w[4 * b + i] = x[i]
            sweep.put_matrices_transposed(self.X_own + BLOCK_BYTES * b, x)
        B = self.betas(w, s, t)
        # without a branch, which would keep WGMMA from running ahead
        for n in cutlass.range_constexpr(EIGHTS):
            beta = [select(self.wg == 1, x, Float32(1.0)) for x in self.of_tokens("beta", n)]
            for e in cutlass.range_constexpr(4):
                square[4 * n + e] = square[4 * n + e] * beta[e % 2]
        self.publish(Barrier.MATH, MATH.threads)

        rs_n = product(io, BT, RMEM, K_MAJOR, MN_MAJOR)
        thr_n = rs_n.get_slice(self.tidx)
        bA_n = thr_n.make_fragment_B(thr_n.partition_B(self.square_t.view(st.A)))
        acc_w = as_accumulator(thr_n, dw, BT)
        acc_s = as_accumulator(thr_n, square, BT)
        wgmma.fence()
        steps(rs_n, acc_w, as_operand(thr_n, words_w, io), bA_n[None, None, None, 0], False)
        warpgroup.commit_group()
        if self.wg == 1:
            ss = product(io, BT, SMEM, K_MAJOR, K_MAJOR)
            thr_ss = ss.get_slice(self.tidx)
            sX = self.xx.view(st.X)
            aX = thr_ss.make_fragment_A(thr_ss.partition_A(sX))
            bX = thr_ss.make_fragment_B(thr_ss.partition_B(sX))
            steps(ss, acc_s, aX[None, None, None, 0], bX[None, None, None, 1])
            warpgroup.commit_group()
        warpgroup.wait_group(0)
        Q = self.queries(w)
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        if self.wg == 1:
            self.through_inverse(st, square)
        else:
            self.put_diagonal(square)
            self.put_square(square, self.X_at, self.X_at + sweep.REST_BYTES)
        cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
        return [[*Q[n], *B[n]] for n in range(EIGHTS)]

    @cute.jit
    def through_inverse(self, st, square):
        """dAkk = -tril_-1(A^T tril_-1(square) A^T), warpgroup 1."""
        io = self.io
        words = cute.make_rmem_tensor(16, Int32)
        x = sweep.pack_values(self.lower(square), io)
        for i in cutlass.range_constexpr(16):
            words[i] = x[i]
        rs = product(io, BT, RMEM, K_MAJOR, K_MAJOR)
        thr = rs.get_slice(self.tidx)
        bA = thr.make_fragment_B(thr.partition_B(self.square.view(st.A)))
        acc = as_accumulator(thr, square, BT)
        wgmma.fence()
        steps(rs, acc, as_operand(thr, words, io), bA[None, None, None, 0], False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        # over dw, which is dead
        Z = self.X_at + 2 * HALF_BYTES
        for j in cutlass.range_constexpr(4):
            x = sweep.pack_values([square[8 * j + e] for e in range(8)], io)
            sweep.put_matrices((Z + self.own_rows) ^ (32 * j), x)
        self.publish(Barrier.HALF, WARPGROUP)
        ss = product(io, BT, SMEM, MN_MAJOR, MN_MAJOR)
        thr_ss = ss.get_slice(self.tidx)
        aA = thr_ss.make_fragment_A(thr_ss.partition_A(self.square_t.view(st.A)))
        sZ = Tile(io, BT, BT, 4, rows_contiguous=True).view(st.X)
        bZ = thr_ss.make_fragment_B(thr_ss.partition_B(sZ))
        wgmma.fence()
        steps(ss, acc, aA[None, None, None, 0], bZ[None, None, None, 2], False)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for e in cutlass.range_constexpr(32):
            square[e] = -square[e]
        self.put_square(square, self.X_at + HALF_BYTES)

    def lower(self, square: Any) -> list[Any]:
        """The strictly lower triangle, in accumulator order."""
        row_less_column = self.first_row + self.lane.r - 2 * self.lane.c
        column_less_row = [8 * (i // 4) + i % 2 - 8 * (i // 2 % 2) for i in range(32)]
        return [select(row_less_column > column_less_row[i], square[i], Float32(0.0)) for i in range(32)]

    def put_square(self, square: Any, address: Int32, rest: Int32 | None = None) -> None:
        """The strictly lower triangle, rounded, to shared memory; what rounding left of it to ``rest``."""
        lower = self.lower(square)
        for j in range(4):
            x = lower[8 * j : 8 * j + 8]
            words = sweep.pack_values(x, BFloat16)
            sweep.put_matrices((address + self.own_rows) ^ (32 * j), words)
            if rest is not None:
                y = sweep.unpack_values(words, BFloat16)
                left = sweep.pack_values([x[e] - y[e] for e in range(8)], BFloat16)
                sweep.put_matrices((rest + self.own_rows) ^ (32 * j), left)

    @cute.jit
    def put_diagonal(self, square):
        """The diagonal to shared memory."""
        w, odd = self.first_row >> 4, (self.lane.r & 1) != 0
        for row in cutlass.range_constexpr(2):
            x = [select(odd, square[8 * i + 6 * row + 1], square[8 * i + 6 * row]) for i in range(4)]
            y = select(w < 2, select(w == 0, x[0], x[1]), select(w == 2, x[2], x[3]))
            if self.lane.r >> 1 == self.lane.c:
                put_word(self.at["diagonal"] + 4 * (self.first_row + self.lane.r + 8 * row), y)

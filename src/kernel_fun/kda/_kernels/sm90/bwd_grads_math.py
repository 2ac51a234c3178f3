"""The MATH role of bwd_grads: the phases of one item after another, and the scalars of tokens an item ahead."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from kernel_fun._cute.warp import select
from kernel_fun.kda._kernels.sm90.bwd_grads_chunk import Chunk
from kernel_fun.kda._kernels.sm90.bwd_grads_config import BT, HALF_BYTES, MATH, Barrier
from kernel_fun.kda._kernels.sm90.bwd_grads_finish import Finish
from kernel_fun.kda._kernels.sm90.bwd_grads_moves import place
from kernel_fun.kda._kernels.sm90.bwd_grads_sweeps import Sweeps
from kernel_fun.kda._kernels.sm90.bwd_grads_thread import load_bits, not_zero, of_bits, put_word, sigmoid
from kernel_fun.kda._kernels.sm90.bwd_grads_values import Values


class Math(Values, Chunk, Sweeps, Finish):
    """All phases of an item, on the same thread."""

    @cute.jit
    def math(
        self, st, rings, outs, mBeta: cute.Tensor, mRstds, parameters, mTable, results, sizes, scalars,
    ):  # fmt: skip
        """MATH: the phases of one item after another."""
        ring, qk, gates, one = rings
        out_qk, out_g = outs
        mDq, mDk, mDv, mDg, mDbeta, mDA, mDbias = results
        T, items, HV, G, NV = sizes
        scale, lower_bound = scalars
        self.lanes(st)
        at_ring, at_qk, at_g, at_one = (x.read_cursor() for x in (ring, qk, gates, one))
        at_out_qk, at_out_g = out_qk.write_cursor(), out_g.write_cursor()
        dq, dk, dw, square = (cute.make_rmem_tensor(32, Float32) for _ in range(4))
        states, dvb_v = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        seen, bias = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Float32)
        A_log = cute.make_rmem_tensor(1, Float32)
        for x in (bias, A_log):
            x.fill(0.0)
        rstds = cute.make_rmem_tensor(2, Float32)
        raw_beta = cute.make_rmem_tensor(1, Int32)
        raw_beta.fill(0)
        grid, item_0 = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        chunk, hv, first, valid = place(item_0, mTable, T, HV)
        self.read_scalars(mBeta, mRstds, raw_beta, rstds, first, valid, hv, self.query_head(hv, G))
        for item in cutlass.range(item_0, items, grid, unroll=1):
            following = cutlass.min(item + grid, items - 1)
            if valid > 0:
                self.put_scalars(mBeta, raw_beta, rstds, valid, scale)
                self.again(st).read_head(*parameters, hv, A_log, bias)
                one.wait_full(at_one)
                if valid < BT:
                    self.blank(self.A_words, Int32(0), valid, Int32(0))
                self.publish(Barrier.MATH, MATH.threads)
                # A: over values
                at_ring = self.again(st).products(
                    st, ring, at_ring, mDv, dq, dk, dw, square, states, seen, dvb_v, first, valid, hv, NV
                )
                qk.wait_full(at_qk)
                gates.wait_full(at_g)
                if valid < BT:
                    for words, halves, x in (
                        (self.q_words, 2, Int32(0)),
                        (self.k_words, 2, Int32(0)),
                        (self.g_words, self.g.width // 8, self.no_decay_word()),
                    ):
                        for half in cutlass.range_constexpr(halves):
                            self.blank(words, Int32(half * (HALF_BYTES // 4)), valid, x)
                    self.publish(Barrier.MATH, MATH.threads)
                # B: the gate, then through A
                self.again(st).scan(self.gate(A_log, lower_bound), bias)
                cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
                there = self.again(st)
                w, between = there.factors(), there.between()
                there.put_dvb_v(dvb_v)
                cute.arch.barrier(barrier_id=Barrier.MATH, number_of_threads=MATH.threads)
                QB = there.through_A(st, dq, dk, dw, square, w, between)
                # C: within the chunk
                here = self.again(st)
                sums, k_dk = here.sweeps(w, QB, between, dq, dk, dw)
                cute.arch.fence_view_async_shared()  # TMA writes A where w waited
                one.free(at_one)
                at_one.advance()
                here.put_states(states, seen, between, k_dk)
                # D: derivatives and stores; the scalars of the next item are asked for
                last = self.again(st)
                now = chunk, hv, first, valid
                chunk, hv, first, valid = place(following, mTable, T, HV)
                last.read_scalars(mBeta, mRstds, raw_beta, rstds, first, valid, hv, self.query_head(hv, G))
                last.read_head(*parameters, now[1], A_log, bias)
                last.finish(
                    st, out_qk, at_out_qk, A_log, lower_bound, bias, dq, dk, dw, sums, mBeta, mRstds[0], mDq, mDk, mDg, mDbeta, mDA, mDbias,
                    *now, self.query_head(now[1], G),
                )  # fmt: skip
                out_g.publish(at_out_g)
                at_qk.advance()
                at_g.advance()
                at_out_qk.advance()
                at_out_g.advance()
            else:
                chunk, hv, first, valid = place(following, mTable, T, HV)
                self.read_scalars(mBeta, mRstds, raw_beta, rstds, first, valid, hv, self.query_head(hv, G))

    def query_head(self, hv: Int32, G: Int32) -> Int32:
        return hv // G if self.c.shared else hv

    @cute.jit
    def read_scalars(self, mBeta, mRstds, raw_beta, rstds, first: Int32, valid: Int32, hv: Int32, h: Int32):
        """beta and the reciprocal norms of a token to registers, an item ahead."""
        rstds.fill(1.0)
        if self.tid < valid:
            raw_beta[0] = load_bits(mBeta, (first + self.tid, hv))
            if cutlass.const_expr(self.c.l2norm):
                for i in cutlass.range_constexpr(2):
                    rstds[i] = mRstds[i][first + self.tid, h]

    @cute.jit
    def put_scalars(self, mBeta, raw_beta, rstds, valid: Int32, scale: Float32):
        """beta, activated, and the factors of a token to shared memory."""
        if self.tid < BT:
            beta = of_bits(raw_beta[0], mBeta.element_type)
            if cutlass.const_expr(self.c.beta_mode != "raw"):
                top = 2.0 if self.c.beta_mode == "sigmoid2" else 1.0
                beta = top * sigmoid(beta)
            beta = select(self.tid < valid, beta, Float32(0.0))
            q, k = rstds[0], rstds[1]
            for name, x in (
                ("beta", beta),
                ("q_factor", scale * q),
                ("b_factor", not_zero(beta) * k),
                ("k_factor", k),
            ):
                put_word(self.at[name] + 4 * self.tid, x)

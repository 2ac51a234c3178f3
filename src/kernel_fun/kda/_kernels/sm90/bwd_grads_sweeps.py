"""Phase C of bwd_grads: what the tokens of a chunk give each other, by eights, see :mod:`kernel_fun._cute.sweep`.

    K    = bf16(k^ / w)
    dq, dk, dg = sweeps from dq, rk, dk with Q, B, K, dAkk and dAqk, whose diagonal is in fp32
    base = total s + sum_t k^ (R dk)                        of every dl of a channel

R: product of a after a token; total: of the chunk.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from kernel_fun._cute import sweep
from kernel_fun._cute.warp import load4, select
from kernel_fun.kda._kernels.sm90.bwd_grads_config import BLOCK_BYTES, EIGHTS, HALF_BYTES
from kernel_fun.kda._kernels.sm90.bwd_grads_thread import Thread, put_word


class Sweeps(Thread):
    """Phase C."""

    def sweeps(
        self, w: Any, QB: Any, between: Any, dq: Any, dk: Any, rk: Any
    ) -> tuple[list[list[Any]], list[Any]]:
        """C: dq, dk of the chunk, in place; ``rk`` becomes dg.

        Returns sums over the warp's channels of beta k^ rk, q^ dq and k^ (dk - beta rk), of two tokens of eight r in
        lane 4 r + c, and sum_t k^ (R dk) of the thread's two channels and 16 tokens.
        """
        s, e, t = between
        # half of w waits where Z and A were
        parked = [
            x + 16 * self.tid + 4096 * i for x in (self.X_at + 2 * HALF_BYTES, self.at["A"]) for i in range(2)
        ]
        for i in range(4):
            sweep.put4(parked[i], w[16 + 4 * i : 20 + 4 * i])
        w = w[:16]
        rows, columns = self.X_at + self.lane.rows, self.X_at + self.lane.columns
        K: list[list[Int32]] = []
        sums: list[list[tuple[int, list[Any]]]] = [[], [], []]
        k_dk: list[Any] = []
        words: Any = ()
        for n in range(EIGHTS):
            own = range(4 * n, 4 * n + 4)
            cute.arch.sync_warp()
            if n >= 4:
                w += load4(parked[n - 4])
            if n % 2 == 0:
                words = sweep.matrices_transposed(self.k_at + BLOCK_BYTES * (n // 2))
            k = sweep.unpack_values(words[n % 2 * 2 : n % 2 * 2 + 2], self.io)
            by_q, by_b, by_k = (self.of_tokens(x, n) for x in ("q_factor", "b_factor", "k_factor"))
            v = [cute.arch.rcp_approx(w[i]) * by_k[i % 2] for i in own]
            K.append(sweep.pack_values([k[i] * v[i] for i in range(4)], BFloat16))
            k = sweep.unpack_values(K[n], BFloat16)
            against = [
                k[2 * row] * dk[own[2 * row]] + k[2 * row + 1] * dk[own[2 * row + 1]] for row in range(2)
            ]
            k_dk = against if n == 0 else [k_dk[row] * t[n - 1][row] + against[row] for row in range(2)]
            before, here, after = (self.ends(i) if 0 <= i < EIGHTS else None for i in (n - 1, n, n + 1))
            near = (before[1] if before else None, here[0])
            Pq, Pk = sweep.queries(rows, n, [dq[i] for i in own], [rk[i] for i in own], K, s, t, near)
            near = (after[0] if after else None, here[1])
            Pc = sweep.keys(columns, n, [dk[i] for i in own], QB, e, t, near)
            qb, diagonal = sweep.unpack_values(QB[n], BFloat16), self.of_tokens("diagonal", n)
            Pq = [Pq[i] + diagonal[i % 2] * k[i] for i in range(4)]
            Pc = [Pc[i] + diagonal[i % 2] * qb[i] for i in range(4)]
            terms = [[qb[4 + i] * Pk[i] for i in range(4)], [qb[i] * Pq[i] for i in range(4)]]
            terms.append([k[i] * Pc[i] for i in range(4)])
            for i in range(4):
                at = own[i]
                dq[at] = Pq[i] * (w[at] * by_q[i % 2])
                dk[at] = Pk[i] * (w[at] * by_b[i % 2]) + Pc[i] * v[i]
                rk[at] = terms[1][i] + (terms[0][i] - terms[2][i])
            for kind in range(3):
                sweep.fold(
                    sums[kind], [terms[kind][p] + terms[kind][2 + p] for p in range(2)], self.lane.lane
                )
        return [x[0][1] for x in sums], [k_dk[row] * e[row] for row in range(2)]

    def of_states(self, states: Any, k_dk: list[Any], between: Any) -> list[Any]:
        """What every dl of a channel gets from the states: total s + sum_t k^ (R dk), by channel row."""
        s, e, t = between
        out = []
        for row in range(2):
            total = s[row] * e[row]
            for x in t:
                total = total * x[row]
            out.append(sweep.sum_quad(states[row] * total + k_dk[row]))
        return out

    @cute.jit
    def put_states(self, states, seen, between: cutlass.Constexpr[Any], k_dk: cutlass.Constexpr[Any]):
        """That, and whether S has anything of a channel, to shared memory."""
        x = self.of_states(states, k_dk, between)
        for row in cutlass.range_constexpr(2):
            some = seen[row]
            for i in cutlass.range_constexpr(2):
                some = some | cute.arch.shuffle_sync_bfly(some, offset=1 << i)
            if self.lane.c == 0:
                put_word(self.at["base"] + 4 * self.channel + 32 * row, x[row])
                y = select(some == 0, Float32(0.0), Float32(1.0))
                put_word(self.at["seen"] + 4 * self.channel + 32 * row, y)

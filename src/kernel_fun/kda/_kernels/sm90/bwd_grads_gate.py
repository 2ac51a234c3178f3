"""The gate of bwd_grads, on threads of its own kind: two channels of 16 tokens each.

    a = exp(gate(g));  w, s, e = its products by eights of tokens, fp32     phase B, see :mod:`kernel_fun._cute.sweep`
    dl_t = base + sum_{i >= t} dg_i                                         phase D; 0 where a = 0
    dg, dA_log, d dt_bias = dl times the gate's derivative                  dg over g; the others: sums over tokens

Before the first token of a chunk with S = 0, dl is 0.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from kernel_fun._cute import sweep
from kernel_fun._cute.decay import LOG2E, NO_DECAY, Gate, exp2, magnitude
from kernel_fun._cute.warp import bits_of, load4, pack, select, unpack
from kernel_fun.kda._kernels.sm90.bwd_grads_config import CHANNELS
from kernel_fun.kda._kernels.sm90.bwd_grads_thread import Thread, put_bits

LOG1P = (
    0.9999432772835241,
    -0.4969777852044154,
    0.3063008299427745,
    -0.15742704909129315,
    0.04134722378502642,
)
"""P(e) = log1p(e) / e on [0, 1], lowest power first, relative error below 6e-5: for dA_log, a weighted sum of decays."""
LN2 = 0.6931471805599453
FLT_MAX = 3.4028234663852886e38
LEAST_LOG2 = -126.0
"""Below 2 to this, a decay is 0."""


class Gates(Thread):
    """What the gate's threads do, forwards and backwards."""

    @cute.jit
    def read_head(self, mA_log, mDt_bias, hv: Int32, A_log: cute.Tensor, bias: cute.Tensor):
        """A_log of the head and its biases of the thread's two channels to registers, without waiting for them."""
        if cutlass.const_expr(self.c.has_A_log):
            A_log[0] = mA_log[hv]
        if cutlass.const_expr(self.c.has_dt_bias):
            if 2 * self.pair < self.c.K:
                for i in cutlass.range_constexpr(2):
                    bias[i] = mDt_bias[hv * self.c.K + 2 * self.pair + i]

    def gate(self, A_log: cute.Tensor, lower_bound: Float32) -> Gate:
        return Gate.of_head(self.c.gate, A_log[0] if self.c.has_A_log else None, lower_bound)

    def no_decay_word(self) -> Int32:
        x = Float32(NO_DECAY[self.c.gate])
        return bits_of(x) if self.g.width == 32 else pack(x, x, self.g)

    def gate_inputs(self, bias: Any, n: Any) -> list[list[Any]]:
        """Raw gates of eight ``n`` of the thread's two, dt_bias added: for each of its channels, by token."""
        rows = []
        for i in range(sweep.EIGHT):
            at = self.at_gate(n, i)
            rows.append(sweep.load2(at) if self.g.width == 32 else unpack(sweep.load_word(at), self.g))
        return [[x[odd] + bias[odd] if self.c.has_dt_bias else x[odd] for x in rows] for odd in range(2)]

    @cute.jit
    def scan(self, gate: cutlass.Constexpr[Any], bias: cute.Tensor):
        """B: the gate's w, s, e to X and Y."""
        for n in cutlass.range(2, unroll=1):
            self.scan_eight(gate, bias, n)

    def scan_eight(self, gate: Gate, bias: Any, n: Any) -> None:
        """w, s, e of eight ``n`` of the thread's two, to X and Y."""
        ends = []
        for odd, x in enumerate(self.gate_inputs(bias, n)):
            w, s, e = sweep.eight([cutlass.max(gate.decay(y), Float32(sweep.LEAST_DECAY)) for y in x])
            for half in range(2):
                at = sweep.of_tokens(self.walk ^ (32 * n), odd, half)
                sweep.put4(at, w[4 * half : 4 * half + 4])
            ends += [s, e]
        sweep.put4(self.Y_at + 16 * self.pair + (2 * self.quarter + n) * (8 * CHANNELS), ends)

    def gate_eight(
        self, gate: Gate, lower_bound: Any, bias: Any, carry: Any, seen: Any, out: Any, n: Any
    ) -> None:
        """dg of eight ``n`` of the thread's two, over g; ``carry``: dl of the token after it."""
        dx = []
        for odd, x in enumerate(self.gate_inputs(bias, n)):
            at = self.walk ^ (32 * n)
            dl = [y for half in range(2) for y in load4(sweep.of_tokens(at, odd, half))]
            of_channel: list[Any] = [None] * sweep.EIGHT
            for i in range(sweep.EIGHT - 1, -1, -1):
                carry[odd] = carry[odd] + dl[i]
                y = carry[odd]
                if i == 0:
                    y = select(2 * self.quarter + n == 0, y * seen[odd], y)
                of_channel[i], dA = derivative(gate, x[i], y, lower_bound)
                out[1 + odd] = out[1 + odd] + of_channel[i]
                if dA is not None:
                    out[0] = out[0] + dA
            dx.append(of_channel)
        for i in range(sweep.EIGHT):
            at, pair = self.at_gate(n, i), (dx[0][i], dx[1][i])
            if self.g.width == 32:
                sweep.put2(at, pair)
            else:
                put_bits(at, pack(*pair, self.g))

    def at_gate(self, n: Any, i: int) -> Any:
        """Address of token i of eight ``n`` of the thread's two."""
        return ((self.g_at + sweep.EIGHT_BYTES * n) ^ (16 * i)) + sweep.ROW_BYTES * i


def derivative(gate: Gate, x: Float32, dl: Float32, lower_bound: Any) -> tuple[Any, Any]:
    """Gradient of the raw gate and its share of dA_log, from that of the natural-log decay; x with its bias.

    A token whose decay is 0 has none. What may be infinite is cut to a finite number, so that times 0 it is 0.
    """
    if gate.kind == "log":
        return select(x < LEAST_LOG2 * LN2, Float32(0.0), dl), None
    if gate.kind == "softplus":
        # l = -A softplus(x), dl/dx = -A sigmoid(x), A = exp(A_log); e = exp(-|x|)
        e = exp2(magnitude(x) * -LOG2E)
        P = Float32(LOG1P[-1])
        for c in LOG1P[-2::-1]:
            P = P * e + c
        softplus = e * P + cutlass.min(cutlass.max(x, Float32(0.0)), Float32(FLT_MAX))
        dl = select(softplus > gate.inverse * -LEAST_LOG2, Float32(0.0), dl * (gate.rate * -LN2))
        return dl * (select(x < 0.0, e, Float32(1.0)) * cute.arch.rcp_approx(1.0 + e)), dl * softplus
    # l = lower_bound sigmoid(z), z = exp(A_log) x = -LN2 y; e = exp(-|z|)
    y = cutlass.max(cutlass.min(x * gate.rate, Float32(FLT_MAX)), Float32(-FLT_MAX))
    e = exp2(-magnitude(y))
    p = cute.arch.rcp_approx(1.0 + e)
    log2_a = gate.bound * select(y > 0.0, e * p, p)
    dz = select(log2_a < LEAST_LOG2, Float32(0.0), dl * lower_bound) * (e * p * p)
    return dz * (gate.rate * -LN2), dz * (y * -LN2)

"""The decay a = 2^(l log2 e) of one token and channel from its raw gate, on fp32 registers.

    log        l = g
    softplus   l = -exp(A_log) softplus(g + dt_bias)
    bounded    l = lower_bound sigmoid(exp(A_log) (g + dt_bias))

l is a natural-log decay <= 0, so the only exponential whose result leaves this file is of a number <= 0: a is
in [0, 1], exact for -inf, and every other factor of a kernel is a product of a's, or a quotient of products where a
bound keeps them from 0.

softplus(x) = max(x, 0) + log1p(e), e = exp(-|x|), with log1p(e) = e P(e). exp(A_log) e is one exponential of
A_log - |x|, so that a large A_log and a far tail meet as a sum, never as inf times 0; the tail keeps its
relative accuracy because P has no 1 + e in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, cute

LOG2E = 1.4426950408889634
LOG2_LOG2E = 0.5287663729448977
FLT_MAX = 3.4028234663852886e38
LARGEST = 126.0
"""Magnitude of exponents a parameter may reach."""


LOG1P = (
    0.9999915957450867,
    -0.4993613660335541,
    0.32520660758018494,
    -0.21004845201969147,
    0.10122201591730118,
    -0.023869045078754425,
)
"""P(e) = log1p(e) / e on [0, 1], lowest power first; relative error below 8.5e-6 in fp32."""

GATES = ("log", "softplus", "bounded")

NO_DECAY = {"log": 0.0, "softplus": -math.inf, "bounded": -math.inf}
"""The raw gate whose decay is 1, whatever the head's parameters: what a row past the last token holds."""


def exp2(x: Float32) -> Float32:
    """2^x, one instruction; results below 2^-126 are 0."""
    ptx = "ex2.approx.ftz.f32 {$w0}, {$r0};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[x])


def cut(x: Float32, limit: float = LARGEST) -> Float32:
    """x cut to [-limit, limit]; NaN stays NaN. Within :data:`LARGEST` powers of 2 are normal numbers, times log2 e too."""
    ptx = "{ .reg .f32 x; min.NaN.f32 x, {$r0}, {$r1}; max.NaN.f32 {$w0}, x, {$r2}; }"
    limits = Float32(limit), Float32(-limit)
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[x, *limits])


def part(x: Float32, y: Float32) -> Float32:
    """x y cut to [0, 1], one instruction; NaN is 0."""
    ptx = "mul.sat.f32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[x, y])


def magnitude(x: Float32) -> Float32:
    """|x|, free where the instruction that reads it can take it."""
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


@dataclass
class Gate:
    """The gate of one value head. ``kind`` is static; the rest are fp32 values of the running kernel.

    ``rate``: exp(A_log) log2 e (softplus) or -exp(A_log) log2 e (bounded), finite and not 0. ``log_rate``:
    log2 of rate before it is cut, finite. ``inverse``: 1 / rate, finite and not 0. ``bound``: lower_bound log2 e.
    """

    kind: str
    rate: Any = None
    log_rate: Any = None
    inverse: Any = None
    bound: Any = None

    @classmethod
    def of_head(cls, kind: str, A_log: Any, lower_bound: Any) -> Gate:
        """``A_log``: fp32 value of the head, None for 0. ``lower_bound``: fp32, for bounded alone."""
        if kind == "log":
            return cls(kind)
        A_log = Float32(0.0) if A_log is None else A_log
        if kind == "bounded":
            return cls(kind, rate=exp2(cut(A_log * LOG2E)) * -LOG2E, bound=lower_bound * LOG2E)
        log_rate = cut(A_log * LOG2E + LOG2_LOG2E, FLT_MAX)
        return cls(kind, rate=exp2(cut(log_rate)), log_rate=log_rate, inverse=exp2(-cut(log_rate)))

    def log2_decay(self, x: Float32) -> Float32:
        """l log2 e of a raw gate with its bias added."""
        if self.kind == "log":
            return x * LOG2E
        if self.kind == "bounded":
            return self.bound * cute.arch.rcp_approx(exp2(x * self.rate) + 1.0)
        positive = cutlass.max(x, Float32(0.0))
        tail = exp2(magnitude(x) * -LOG2E + self.log_rate)
        # beyond the limits of inverse e is wrong where l is below -2^100 and a is 0, but still in [0, 1]
        e = part(tail, self.inverse)
        P = Float32(LOG1P[-1])
        for c in LOG1P[-2::-1]:
            P = P * e + c
        return -(tail * P + positive * self.rate)

    def decay(self, x: Float32) -> Float32:
        """a of a raw gate with its bias added."""
        return exp2(self.log2_decay(x))

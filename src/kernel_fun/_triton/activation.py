"""Activations on fp32 blocks."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def sigmoid(b_z):
    """1 / (1 + 2^(-z log2(e))) with the hardware's exponential and reciprocal, each within 2 ulp."""
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-b_z))
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.ftz.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.ftz.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }""",
            "=f,f",
            [b_z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def silu(b_z):
    """z sigmoid(z)."""
    return b_z * sigmoid(b_z)


@triton.jit
def silu_grad(b_z):
    """Derivative of z sigmoid(z)."""
    b_s = sigmoid(b_z)
    return b_s + b_z * b_s * (1.0 - b_s)

"""Short convolution backward: dx, dw and db in one pass over x and dy.

    z_t  = bias + sum_{j<W} w_j x_{t-j}           recomputed in registers; w_j = weight[:, W-1-j]
    dz_t = dy_t act'(z_t)                         act' = 1 or s (1 + z (1 - s)), s = sigmoid(z)
    dx_t = sum_{j<W} w_j dz_{t+j}  (+ dht)        within t's sequence; rounded once, to x's dtype
    dw_j = sum_t dz_t x_{t-j}      db = sum_t dz_t
    dh0[:, W-k] = sum_{k<=j<W} w_j dz_{j-k}       (+ dht where the sequence is shorter than W)

All in fp32. dht[:, i] belongs to token L-W+i. Packed: ``rows`` as in the forward, with the rows that
follow in the sequence; rows outside every sequence get zero and give nothing.

plan       cconv_bwd_triton: one program per (BD channels, BT tokens, batch row), walking along T with the
           last W-1 inputs and dz in registers; dx leaves W-1 tokens late, so that W-1 tokens past
           the tile are computed again
           partial fp32 [B*NT, W or W+1, D]: dw (and db) of each program's own tokens
           cconv_bwd_reduce_triton: sums the partials in a fixed order, one program per BC columns
           cconv_bwd_initial_state_triton: one program per (BD channels, sequence)
"""

# sizes: a Triton kernel takes every pointer, size and stride as a parameter
# ruff: noqa: RUF005  (Triton traces tuple sums, not starred tuples)
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernel_fun._triton.activation import silu_grad
from kernel_fun._triton.launch import channels_last, on_device_of, strides
from kernel_fun._triton.packed import sequence_span
from kernel_fun.cconv._kernels.triton import config
from kernel_fun.cconv._kernels.triton.rows import rows_of
from kernel_fun.cconv._kernels.triton.taps import (
    convolve,
    enter_sequence,
    load_positions,
    load_taps,
    load_window,
)
from kernel_fun.cconv.stages import Gradients

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Call


@triton.jit
def grad_input(b_dz, dz_window, positions, taps, W: tl.constexpr, IS_PACKED: tl.constexpr):
    """dx [BD] fp32 of the token W-1 before the one whose dz is ``b_dz``.

    ``positions``: of the W-1 tokens after the one dx is for, in their sequences.
    """
    # the select is on dz, not on the product: packed and dense then contract to the same multiply-adds
    b_dx = taps[0] * dz_window[0]
    for j in tl.static_range(1, W):
        b_next = dz_window[j] if j < W - 1 else b_dz
        if IS_PACKED:
            b_next = tl.where(positions[j - 1] >= j, b_next, 0.0)
        b_dx += taps[j] * b_next
    return b_dx


@triton.jit
def grad_final_state(dht, rows, o_d, m_d, t, t0, i_b, T, s_hn, s_hd, s_hw, W: tl.constexpr):
    """What dx of token t receives from the gradient of the final state, [BD] fp32."""
    m_t = (t >= t0) & (t < T)
    n, rem = i_b, T - 1 - t
    if rows is not None:
        m_t = m_t & (tl.load(rows + t, mask=m_t, other=-1) >= 0)
        n = tl.load(rows + T + t, mask=m_t, other=0).to(tl.int64)
        rem = tl.load(rows + 2 * T.to(tl.int64) + t, mask=m_t, other=W).to(tl.int64)
    p_h = dht + n * s_hn + o_d * s_hd + (W - 1 - rem) * s_hw
    return tl.load(p_h, mask=m_d & m_t & (rem < W), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "NT", "s_wd", "s_ww", "s_hn", "s_hd", "s_hw", "s_gn", "s_gd", "s_gw"])
def cconv_bwd_triton(
    x, weight, bias, dy, h0, dht, rows, dx, partial,
    T, NT, s_xb, s_yb, s_wd, s_ww, s_hn, s_hd, s_hw, s_gn, s_gd, s_gw,
    D: tl.constexpr, s_xt: tl.constexpr, s_yt: tl.constexpr,
    W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    IS_PACKED: tl.constexpr = rows is not None
    i = tl.program_id(0).to(tl.int64)
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, i_t, i_b = i % ND, (i // ND) % NT, i // ND // NT
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D
    t0 = i_t.to(tl.int32) * BT

    taps = load_taps(weight, o_d, m_d, s_wd, s_ww, W)
    b_zero = tl.full([BD], 0.0, tl.float32)
    b_bias = b_zero
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    p_x = x + i_b * s_xb + t0.to(tl.int64) * s_xt
    p_dy = dy + i_b * s_yb + t0.to(tl.int64) * s_yt
    p_dx = dx + (i_b * T + t0 - (W - 1)) * D

    pos, p_h = t0, h0
    if IS_PACKED:
        pos = tl.load(rows + t0)
        if h0 is not None:
            p_h = h0 + tl.load(rows + T + t0).to(tl.int64) * s_hn
    elif h0 is not None:
        p_h = h0 + i_b * s_hn
    window = load_window(p_x, p_h, o_d, m_d, pos, s_xt, s_hd, s_hw, W)
    dz_window, dw, positions = (), (), ()
    for _ in tl.static_range(W - 1):
        dz_window += (b_zero,)
        positions += (tl.full([], 0, tl.int32),)
    for _ in tl.static_range(W):
        dw += (b_zero,)
    db = b_zero

    # part 0: the tile's own tokens; part 1: the W-1 after it, which complete the dx of its last ones
    b_ps = load_positions(rows, t0, T, U)  # one group of tokens ahead: the masks of x and dy wait for them
    for part in tl.static_range(2):
        for i_u in range(part * BT, BT + part * (W - 1), U):
            t = t0 + i_u
            b_xs, b_dys = (), ()
            for u in tl.static_range(U):
                m_t = t + u < T
                if IS_PACKED:
                    m_t = b_ps[u] >= 0
                b_xs += (tl.load(p_x + u * s_xt + o_d, mask=m_d & m_t, other=0.0),)
                b_dys += (tl.load(p_dy + u * s_yt + o_d, mask=m_d & m_t, other=0.0),)
            ahead = load_positions(rows, t + U, T, U)
            for u in tl.static_range(U):
                m_t = t + u < T
                if IS_PACKED:
                    p_n = h0
                    if h0 is not None:
                        p_n = h0 + tl.load(rows + T + t + u, mask=m_t, other=0).to(tl.int64) * s_hn
                    window = enter_sequence(window, p_n, o_d, m_d, b_ps[u], s_hd, s_hw, W)
                    positions = positions[1:] + (b_ps[u],)
                    m_t = b_ps[u] >= 0
                b_x = b_xs[u].to(tl.float32)
                b_dz = b_dys[u].to(tl.float32)  # [BD]
                if SILU:
                    b_dz *= silu_grad(convolve(b_x, window, taps, b_bias, W))
                b_dz = tl.where(m_t, b_dz, 0.0)

                if partial is not None and part == 0:
                    grown = (dw[0] + b_dz * b_x,)
                    for j in tl.static_range(1, W):
                        grown += (dw[j] + b_dz * window[W - 1 - j],)
                    dw = grown
                    db += b_dz

                tau = t + u - (W - 1)
                b_dx = grad_input(b_dz, dz_window, positions, taps, W, IS_PACKED)
                if dht is not None:
                    b_dx += grad_final_state(dht, rows, o_d, m_d, tau, t0, i_b, T, s_gn, s_gd, s_gw, W)
                m_s = (tau < T) & ((tau < t0 + BT) if part == 1 else (tau >= t0))
                tl.store(p_dx + u * D + o_d, b_dx.to(dx.dtype.element_ty), mask=m_d & m_s)
                window = window[1:] + (b_x,)
                dz_window = dz_window[1:] + (b_dz,)
            b_ps = ahead
            p_x += U * s_xt
            p_dy += U * s_yt
            p_dx += U * D

    if partial is not None:
        R: tl.constexpr = W + (bias is not None)
        p_p = partial + (i_b * NT + i_t) * R * D + o_d
        for j in tl.static_range(W):
            tl.store(p_p + (W - 1 - j) * D, dw[j], mask=m_d)
        if bias is not None:
            tl.store(p_p + W * D, db, mask=m_d)


@triton.jit(do_not_specialize=["P"])
def cconv_bwd_reduce_triton(
    partial, dw, db, P, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    o_c = tl.program_id(0) * BC + tl.arange(0, BC)
    o_p = tl.arange(0, BP).to(tl.int64)
    m_c = o_c < R * D
    acc = tl.full([BP, BC], 0.0, tl.float32)
    p = P * 0
    while p < P:
        for _ in tl.static_range(4):
            p_p = partial + (p + o_p)[:, None] * (R * D) + o_c[None, :]
            acc += tl.load(p_p, mask=((p + o_p) < P)[:, None] & m_c[None, :], other=0.0)
            p += BP
    b_sum = tl.sum(acc, 0)  # [BC]
    r, o_d = o_c // D, o_c % D
    tl.store(dw + o_d * W + r, b_sum.to(dw.dtype.element_ty), mask=m_c & (r < W))
    if db is not None:
        tl.store(db + o_d, b_sum.to(db.dtype.element_ty), mask=m_c & (r == W))


@triton.jit(do_not_specialize=[
    "T", "s_xb", "s_xt", "s_yb", "s_yt", "s_wd", "s_ww", "s_hn", "s_hd", "s_hw", "s_gn", "s_gd", "s_gw",
])  # fmt: skip
def cconv_bwd_initial_state_triton(
    x, weight, bias, dy, h0, dht, cu_seqlens, dh0,
    T, s_xb, s_xt, s_yb, s_yt, s_wd, s_ww, s_hn, s_hd, s_hw, s_gn, s_gd, s_gw,
    D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, n = i % ND, i // ND
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D

    bos, L = sequence_span(cu_seqlens, n, T)
    p_x, p_dy = x + bos * s_xt, dy + bos * s_yt
    if cu_seqlens is None:
        p_x, p_dy = x + n * s_xb, dy + n * s_yb
    taps = load_taps(weight, o_d, m_d, s_wd, s_ww, W)
    b_bias = tl.full([BD], 0.0, tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    window = load_window(p_x, h0 + n * s_hn, o_d, m_d, L * 0, s_xt, s_hd, s_hw, W)
    acc = ()  # acc[i]: gradient of slot i
    for _ in tl.static_range(W):
        acc += (tl.full([BD], 0.0, tl.float32),)

    for t in tl.static_range(W - 1):
        m_t = t < L
        b_x = tl.load(p_x + t * s_xt + o_d, mask=m_d & m_t, other=0.0).to(tl.float32)
        b_dz = tl.load(p_dy + t * s_yt + o_d, mask=m_d & m_t, other=0.0).to(tl.float32)
        if SILU:
            b_dz *= silu_grad(convolve(b_x, window, taps, b_bias, W))
        b_dz = tl.where(m_t, b_dz, 0.0)
        grown = ()
        for slot in tl.static_range(W):
            # token t is t + W - slot tokens after the input of this slot
            if t < slot:
                grown += (acc[slot] + taps[t + W - slot] * b_dz,)
            else:
                grown += (acc[slot],)
        acc = grown
        window = window[1:] + (b_x,)

    for slot in tl.static_range(W):
        b_dh = acc[slot]
        if dht is not None:
            p_g = dht + n * s_gn + o_d * s_gd + (slot - L) * s_gw
            b_dh += tl.load(p_g, mask=m_d & (L <= slot), other=0.0).to(tl.float32)
        tl.store(dh0 + (n * D + o_d) * W + slot, b_dh.to(dh0.dtype.element_ty), mask=m_d)


def bwd(c: Call, dy: Tensor, dht: Tensor | None, wants_dw: bool) -> Gradients:
    """The backward stage; see ``stages.bwd``."""
    B, T, D = c.x.shape
    x, dy, bias = channels_last(c.x), channels_last(dy), channels_last(c.bias)
    h0, W = c.initial_state, c.weight.shape[1]
    dx = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
    fresh = torch.empty if dx.numel() > 0 else torch.zeros
    dw = fresh(D, W, dtype=c.weight.dtype, device=x.device) if wants_dw else None
    db = fresh(D, dtype=bias.dtype, device=x.device) if wants_dw and bias is not None else None
    with on_device_of(x):
        if dx.numel() > 0:
            t = config.bwd_tile(c, dht)
            NT, R = config.parts(T, t.BT), W + (bias is not None)
            partial = None
            if wants_dw:
                partial = torch.empty(B * NT, R, D, dtype=torch.float32, device=x.device)
            cconv_bwd_triton[(B * NT * config.parts(D, t.BD),)](
                x, c.weight, bias, dy, h0, dht, rows_of(c), dx, partial,
                T, NT, x.stride(0), dy.stride(0), *c.weight.stride(), *strides(h0, 3), *strides(dht, 3),
                D=D, s_xt=x.stride(1), s_yt=dy.stride(1),
                W=W, SILU=c.silu, BT=t.BT, BD=t.BD, U=t.U, num_warps=t.warps, maxnreg=t.maxnreg,
            )  # fmt: skip
            if partial is not None:
                BP, BC = config.REDUCE
                cconv_bwd_reduce_triton[(config.parts(R * D, BC),)](
                    partial, dw, db, B * NT, D=D, W=W, R=R, BP=BP, BC=BC, num_warps=4
                )
        dh0 = None
        if h0 is not None:
            dh0 = torch.empty(c.N, D, W, dtype=h0.dtype, device=x.device)
            if dh0.numel() > 0:
                BD = min(config.STATE_BD, triton.next_power_of_2(D))
                cconv_bwd_initial_state_triton[(c.N * config.parts(D, BD),)](
                    x, c.weight, bias, dy, h0, dht, c.cu_seqlens, dh0,
                    T, x.stride(0), x.stride(1), dy.stride(0), dy.stride(1),
                    *c.weight.stride(), *h0.stride(), *strides(dht, 3),
                    D=D, W=W, SILU=c.silu, BD=BD, num_warps=2,
                )  # fmt: skip
    return Gradients(dx, dw, db, dh0)

"""Short convolution forward.

    z_t = bias + sum_{j<W} w_j x_{t-j}          w_j = weight[:, W-1-j], fp32
    y_t = act(z_t) + residual_t                 act = identity or z sigmoid(z); rounded once, to x's dtype
    ht[:, i] = x_{L-W+i}                        i < W: the last W inputs, newest last, in x's dtype

x_{-k} is initial_state[:, W-k], or zero. All arithmetic is fp32. Packed: ``rows`` (see
``_triton.packed``) gives each row's position in its sequence; outside every sequence y is zero.

plan       cconv_fwd_triton: one program per (BD channels, BT tokens, batch row), walking along T with
           the last W-1 inputs in registers; U rows are loaded before the first is used
           cconv_fwd_final_state_triton: one program per (BD channels, sequence)
"""

# sizes: a Triton kernel takes every pointer, size and stride as a parameter
# ruff: noqa: RUF005  (Triton traces tuple sums, not starred tuples)
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernel_fun._triton.activation import silu
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

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Call


@triton.jit(do_not_specialize=["T", "NT", "s_wd", "s_ww", "s_hn", "s_hd", "s_hw"])
def cconv_fwd_triton(
    x, weight, bias, residual, h0, rows, y,
    T, NT, s_xb, s_rb, s_wd, s_ww, s_hn, s_hd, s_hw,
    D: tl.constexpr, s_xt: tl.constexpr, s_rt: tl.constexpr,
    W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, i_t, i_b = i % ND, (i // ND) % NT, i // ND // NT
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D
    t0 = i_t.to(tl.int32) * BT

    taps = load_taps(weight, o_d, m_d, s_wd, s_ww, W)
    b_bias = tl.full([BD], 0.0, tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    p_x = x + i_b * s_xb + t0.to(tl.int64) * s_xt
    p_y = y + (i_b * T + t0) * D
    p_r = y
    if residual is not None:
        p_r = residual + i_b * s_rb + t0.to(tl.int64) * s_rt

    pos, p_h = t0, h0
    if rows is not None:
        pos = tl.load(rows + t0)
        if h0 is not None:
            p_h = h0 + tl.load(rows + T + t0).to(tl.int64) * s_hn
    elif h0 is not None:
        p_h = h0 + i_b * s_hn
    window = load_window(p_x, p_h, o_d, m_d, pos, s_xt, s_hd, s_hw, W)

    # positions are loaded one group of tokens ahead: the masks of x wait for them
    positions = load_positions(rows, t0, T, U)
    for i_u in range(0, BT, U):
        t = t0 + i_u
        loaded = ()
        for u in tl.static_range(U):
            m_t = t + u < T
            if rows is not None:
                m_t = positions[u] >= 0
            loaded += (tl.load(p_x + u * s_xt + o_d, mask=m_d & m_t, other=0.0),)
        ahead = load_positions(rows, t + U, T, U)
        for u in tl.static_range(U):
            if rows is not None:
                p_n = h0
                if h0 is not None:
                    p_n = h0 + tl.load(rows + T + t + u, mask=t + u < T, other=0).to(tl.int64) * s_hn
                window = enter_sequence(window, p_n, o_d, m_d, positions[u], s_hd, s_hw, W)
            b_x = loaded[u].to(tl.float32)
            b_y = convolve(b_x, window, taps, b_bias, W)  # [BD]
            if SILU:
                b_y = silu(b_y)
            if residual is not None:
                b_y += tl.load(p_r + u * s_rt + o_d, mask=m_d & (t + u < T), other=0.0).to(tl.float32)
            if rows is not None:
                b_y = tl.where(positions[u] >= 0, b_y, 0.0)
            tl.store(p_y + u * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d & (t + u < T))
            window = window[1:] + (b_x,)
        positions = ahead
        p_x += U * s_xt
        p_y += U * D
        if residual is not None:
            p_r += U * s_rt


@triton.jit(do_not_specialize=["T", "s_xb", "s_xt", "s_hn", "s_hd", "s_hw"])
def cconv_fwd_final_state_triton(
    x, h0, cu_seqlens, ht,
    T, s_xb, s_xt, s_hn, s_hd, s_hw,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, n = i % ND, i // ND
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D

    bos, L = sequence_span(cu_seqlens, n, T)
    p_x = x + bos * s_xt
    if cu_seqlens is None:
        p_x = x + n * s_xb
    for slot in tl.static_range(W):
        t = L - W + slot
        b_x = tl.load(p_x + t * s_xt + o_d, mask=m_d & (t >= 0), other=0.0).to(tl.float32)
        if h0 is not None:
            p_h = h0 + n * s_hn + o_d * s_hd + (slot + L) * s_hw
            b_h = tl.load(p_h, mask=m_d & (t < 0), other=0.0).to(tl.float32)
            b_x = tl.where(t < 0, b_h, b_x)
        tl.store(ht + (n * D + o_d) * W + slot, b_x.to(ht.dtype.element_ty), mask=m_d)


def fwd(c: Call) -> tuple[Tensor, Tensor | None]:
    """The forward stage; see ``stages.fwd``."""
    B, T, D = c.x.shape
    x, residual = channels_last(c.x), channels_last(c.residual)
    y = torch.empty(B, T, D, dtype=x.dtype, device=x.device)
    h0, W = c.initial_state, c.weight.shape[1]
    with on_device_of(x):
        if y.numel() > 0:
            t = config.fwd_tile(c)
            NT = config.parts(T, t.BT)
            cconv_fwd_triton[(B * NT * config.parts(D, t.BD),)](
                x, c.weight, channels_last(c.bias), residual, h0, rows_of(c), y,
                T, NT, x.stride(0), strides(residual, 3)[0], *c.weight.stride(), *strides(h0, 3),
                D=D, s_xt=x.stride(1), s_rt=strides(residual, 3)[1],
                W=W, SILU=c.silu, BT=t.BT, BD=t.BD, U=t.U, num_warps=t.warps, maxnreg=t.maxnreg,
            )  # fmt: skip
        return y, _final_state(c, x) if c.output_final_state else None


def _final_state(c: Call, x: Tensor) -> Tensor:
    (_, T, D), W, h0 = x.shape, c.weight.shape[1], c.initial_state
    ht = torch.empty(c.N, D, W, dtype=x.dtype, device=x.device)
    if ht.numel() > 0:
        BD = min(config.STATE_BD, triton.next_power_of_2(D))
        cconv_fwd_final_state_triton[(c.N * config.parts(D, BD),)](
            x, h0, c.cu_seqlens, ht,
            T, x.stride(0), x.stride(1), *strides(h0, 3),
            D=D, W=W, BD=BD, num_warps=2,
        )  # fmt: skip
    return ht

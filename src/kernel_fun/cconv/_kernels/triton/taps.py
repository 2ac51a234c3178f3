"""The window of a causal convolution: taps and past inputs in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_taps(weight, o_d, m_d, s_wd, s_ww, W: tl.constexpr):
    """W tensors [BD] fp32: tap j multiplies the input j tokens back."""
    taps = ()
    for j in tl.static_range(W):
        taps += (tl.load(weight + o_d * s_wd + (W - 1 - j) * s_ww, mask=m_d, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def load_window(p_x, h0, o_d, m_d, pos, s_xt, s_hd, s_hw, W: tl.constexpr):
    """W-1 tensors [BD] fp32, oldest first: the inputs before a token at position ``pos`` of its sequence.

    ``p_x`` points to that token's row; ``h0`` to the state of its sequence, or is None.
    """
    window = ()
    for k in tl.static_range(W - 1, 0, -1):
        b_x = tl.load(p_x - k * s_xt + o_d, mask=m_d & (pos >= k), other=0.0).to(tl.float32)
        if h0 is not None:
            p_h = h0 + o_d * s_hd + (W + pos - k) * s_hw
            b_h = tl.load(p_h, mask=m_d & (pos >= 0) & (pos < k), other=0.0).to(tl.float32)
            b_x = tl.where(pos < k, b_h, b_x)
        window += (b_x,)
    return window


@triton.jit
def load_positions(rows, t, T, U: tl.constexpr):
    """Positions of U tokens in their sequences, -1 outside every sequence; nothing for a dense call."""
    positions = ()
    if rows is not None:
        for u in tl.static_range(U):
            positions += (tl.load(rows + t + u, mask=t + u < T, other=-1),)
    return positions


@triton.jit
def enter_sequence(window, h0, o_d, m_d, pos, s_hd, s_hw, W: tl.constexpr):
    """The window as a row at position ``pos`` sees it: replaced where that row begins a sequence."""
    if h0 is None:
        entered = ()
        for i in tl.static_range(W - 1):
            entered += (tl.where(pos == 0, 0.0, window[i]),)
        return entered
    else:
        if pos == 0:
            entered = ()
            for i in tl.static_range(W - 1):
                entered += (tl.load(h0 + o_d * s_hd + (i + 1) * s_hw, mask=m_d, other=0.0).to(tl.float32),)
        else:
            entered = window
        return entered


@triton.jit
def convolve(b_x, window, taps, b_bias, W: tl.constexpr):
    """z [BD] fp32 of the token whose input is ``b_x``."""
    b_z = b_bias + taps[W - 1] * window[0]
    for i in tl.static_range(1, W - 1):
        b_z += taps[W - 1 - i] * window[i]
    return b_z + taps[0] * b_x

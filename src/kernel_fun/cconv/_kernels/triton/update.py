"""One token per sequence, with state, for decoding.

    state' = (state[:, 1:], x)                       [N, D, W], shifted in place, in the state's dtype
    y      = act(bias + sum_i weight[:, i] state'[:, i]) + residual

The newest input enters y as given, before the state's rounding. All arithmetic is fp32.

plan       cconv_update_triton: one program per (BD channels, sequence)
"""

# sizes: a Triton kernel takes every pointer, size and stride as a parameter
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernel_fun._triton.activation import silu
from kernel_fun._triton.launch import on_device_of, strides
from kernel_fun.cconv._kernels.triton import config
from kernel_fun.cconv._kernels.triton.taps import load_taps

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Step


@triton.jit(do_not_specialize=[
    "s_xn", "s_xd", "s_cn", "s_cd", "s_cw", "s_wd", "s_ww", "s_b", "s_rn", "s_rd",
])  # fmt: skip
def cconv_update_triton(
    x, cache, residual, weight, bias, y,
    s_xn, s_xd, s_cn, s_cd, s_cw, s_wd, s_ww, s_b, s_rn, s_rd,
    D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, n = i % ND, i // ND
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D

    taps = load_taps(weight, o_d, m_d, s_wd, s_ww, W)
    b_x = tl.load(x + n * s_xn + o_d * s_xd, mask=m_d, other=0.0).to(tl.float32)
    p_c = cache + n * s_cn + o_d * s_cd
    b_y = taps[0] * b_x
    kept = ()
    for slot in tl.static_range(1, W):
        b_c = tl.load(p_c + slot * s_cw, mask=m_d, other=0.0)
        kept += (b_c,)
        b_y += taps[W - slot] * b_c.to(tl.float32)
    tl.debug_barrier()  # every slot is read before any is overwritten
    for slot in tl.static_range(W - 1):
        tl.store(p_c + slot * s_cw, kept[slot], mask=m_d)
    tl.store(p_c + (W - 1) * s_cw, b_x.to(cache.dtype.element_ty), mask=m_d)

    if bias is not None:
        b_y += tl.load(bias + o_d * s_b, mask=m_d, other=0.0).to(tl.float32)
    if SILU:
        b_y = silu(b_y)
    if residual is not None:
        b_y += tl.load(residual + n * s_rn + o_d * s_rd, mask=m_d, other=0.0).to(tl.float32)
    tl.store(y + n * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)


def update(s: Step) -> Tensor:
    """The decoding stage; see ``stages.update``. A tap at slot i multiplies the input W-1-i tokens back."""
    (N, D), W = s.x.shape, s.weight.shape[1]
    y = torch.empty(N, D, dtype=s.x.dtype, device=s.x.device)
    if y.numel() > 0:
        BD = min(config.STATE_BD, triton.next_power_of_2(D))
        with on_device_of(s.x):
            cconv_update_triton[(N * config.parts(D, BD),)](
                s.x, s.cache, s.residual, s.weight, s.bias, y,
                *s.x.stride(), *s.cache.stride(), *s.weight.stride(),
                *strides(s.bias, 1), *strides(s.residual, 2),
                D=D, W=W, SILU=s.silu, BD=BD, num_warps=2,
            )  # fmt: skip
    return y

"""Second stage of bwd_grads where a query head has several value heads: the sum of their shares, in order.

Maths, per token t and query head h, value heads i = h G .. h G + G - 1:

    dy = sum_i share_i                              [K] fp32, i ascending; times rstd already
    dx = dy - (dy . x) rstd^2 x                     fp32; dx = dy without l2norm and where dy = 0, whatever x is
    out = io(dx)

    grid       a warp per token and query head      threads 256
    share      [tokens, HV, K] fp32; x, out [tokens, H, K] io; rstd [tokens, H] fp32
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, cute

from kernel_fun._cute.compile import DTYPES, Program, jit, symbol, tensor
from kernel_fun._cute.warp import select

if TYPE_CHECKING:
    from torch import Tensor, dtype

ARCH = "sm_90a"
THREADS = 256
WARP = 32


@dataclass(frozen=True)
class Config:
    """Static facts of one kernel: the compile key."""

    io: str
    K: int
    l2norm: bool

    def __post_init__(self) -> None:
        for name, allowed in (("io", ("bfloat16", "float16")), ("K", (64, 128))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {allowed}, got {getattr(self, name)!r}")


class KdaBwdGradsReduceSm90:
    """The kernel of one config."""

    def __init__(self, config: Config) -> None:
        self.c = config
        self.io = getattr(cutlass, DTYPES[config.io])

    @cute.jit
    def __call__(
        self, mShare: cute.Tensor, mX: cute.Tensor, mRstd: cute.Tensor | None, mOut: cute.Tensor, stream: Any
    ):
        rows = mOut.shape[0] * mOut.shape[1]
        warps = THREADS // WARP
        self.kda_bwd_grads_reduce_sm90(mShare, mX, mRstd, mOut, rows).launch(
            grid=((rows + warps - 1) // warps, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kda_bwd_grads_reduce_sm90(
        self, mShare: cute.Tensor, mX: cute.Tensor, mRstd: cute.Tensor | None, mOut: cute.Tensor, rows: Int32
    ):
        width = self.c.K // WARP
        lane = cute.arch.lane_idx()
        r = cute.arch.block_idx()[0] * (THREADS // WARP) + cute.arch.warp_idx()
        if r < rows:
            H = mOut.shape[1]
            t, h = r // H, r % H
            G = mShare.shape[1] // H
            share = cute.make_rmem_tensor(width, Float32)
            dy = cute.make_rmem_tensor(width, Float32)
            dy.fill(0.0)
            own = lambda m, head: cute.local_tile(m[t, head, None], (width,), (lane,))
            for i in cutlass.range(h * G, h * G + G, unroll=4):
                cute.autovec_copy(own(mShare, i), share)
                for e in cutlass.range_constexpr(width):
                    dy[e] = dy[e] + share[e]
            if cutlass.const_expr(self.c.l2norm):
                x = cute.make_rmem_tensor(width, self.io)
                cute.autovec_copy(own(mX, h), x)
                y = [x[e].to(Float32) for e in range(width)]
                dot = Float32(0.0)
                zero = Float32(0.0)
                for e in cutlass.range_constexpr(width):
                    dot = dot + select(dy[e] == zero, zero, dy[e] * y[e])
                for i in cutlass.range_constexpr(5):
                    dot = dot + cute.arch.shuffle_sync_bfly(dot, offset=1 << i)
                none = dot == zero
                rstd = zero
                if dot != zero:  # rows of no sequence have no norm
                    rstd = mRstd[t, h]
                dot = dot * rstd * rstd
                for e in cutlass.range_constexpr(width):
                    dy[e] = select(none, dy[e], dy[e] - dot * y[e])
            out = cute.make_rmem_tensor(width, self.io)
            out.store(dy.load().to(self.io))
            cute.autovec_copy(out, own(mOut, h))


@jit(arch=ARCH)
def _compile(config: Config) -> Program:
    """Arguments of :class:`KdaBwdGradsReduceSm90`; tokens and heads are run-time sizes."""
    tokens, H, HV = symbol(), symbol(), symbol()
    x = lambda: tensor(config.io, tokens, H, config.K, align=4)
    return Program(
        KdaBwdGradsReduceSm90(config),
        (
            tensor("float32", tokens, HV, config.K),
            x(),
            tensor("float32", tokens, H, align=4) if config.l2norm else None,
            x(),
        ),
    )


@lru_cache(maxsize=64)
def _config(io: dtype, K: int, l2norm: bool) -> Config:
    return Config(str(io).removeprefix("torch."), K, l2norm)


def bwd_grads_reduce(share: Tensor, x: Tensor, rstd: Tensor | None) -> Tensor:
    """Gradient of ``x`` (q or k) from the shares of its value heads: of the normalised x, times the reciprocal norm.

    ``share`` [B, T, HV, K] fp32 contiguous; ``x`` [B, T, H, K] bf16 or fp16, ``rstd`` [B, T, H] fp32 its reciprocal
    norms, None where it is not normalised. HV a multiple of H, K 64 or 128. Returns [B, T, H, K] in the dtype of ``x``;
    rows whose shares are not numbers are not numbers.
    """
    import torch

    B, T, H, K = x.shape
    if share.shape[:2] != (B, T) or share.shape[2] % H or share.shape[3] != K:
        raise ValueError(
            f"`share` must have shape [{B}, {T}, a multiple of {H}, {K}], got {list(share.shape)}"
        )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if B * T * H:
        _compile(_config(x.dtype, K, rstd is not None))(
            share.flatten(0, 1),
            x.flatten(0, 1).contiguous(),
            None if rstd is None else rstd.flatten(0, 1).contiguous(),
            out.flatten(0, 1),
        )
    return out

"""What a KDA model of fla's needs around our operations on a CPU, where fla has no kernels: in torch.

    gated norm   y = ((x - mean) rstd weight + bias) gate        gate: sigmoid(g), or g sigmoid(g) ("swish")
    swiglu       z = x sigmoid(x) y

Arguments and returns are those of the functions of fla-core 0.6.0 named in ``backend.py``. Arithmetic is
float32 (float64 where x is).
"""
# sizes: the signatures are fla's

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def _statistics(x: Tensor, eps: float, is_rms_norm: bool) -> tuple[Tensor | None, Tensor]:
    """(mean or None, rstd), each [T]."""
    mean = None if is_rms_norm else x.mean(-1)
    centred = x if mean is None else x - mean[:, None]
    return mean, (centred.square().mean(-1) + eps).rsqrt()


def _gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str, eps: float, rms: bool
) -> Tensor:
    mean, rstd = _statistics(x, eps, rms)
    y = (x if mean is None else x - mean[:, None]) * rstd[:, None]
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    gate = torch.sigmoid(g)
    return y * (gate if activation == "sigmoid" else g * gate)


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def norm_fwd(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(y, mean, rstd, x plus residual)."""
    total = _wide(x) if residual is None else _wide(x) + _wide(residual)
    mean, rstd = _statistics(total, eps, is_rms_norm)
    w, b = (None if p is None else p.to(total.dtype) for p in (weight, bias))
    y = _gated(total, g.to(total.dtype), w, b, activation, eps, is_rms_norm)
    kept = residual.dtype if residual is not None else residual_dtype or x.dtype
    return (
        y.to(out_dtype or x.dtype),
        mean,
        rstd,
        total.to(kept) if kept != x.dtype or residual is not None else x,
    )


def norm_bwd(
    dy: Tensor,
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    dresidual: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[Tensor | None, ...]:
    """(dx, dg, dweight, dbias, gradient of the residual or None), and y with ``recompute_output``."""
    given = (x, g, weight, bias)
    wide = _wide(x).dtype
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().to(wide).requires_grad_() for t in given]
        lx, lg, lw, lb = leaves
        assert lx is not None
        assert lg is not None
        y = _gated(lx, lg, lw, lb, activation, eps, is_rms_norm)
        found = iter(torch.autograd.grad(y, [t for t in leaves if t is not None], dy.to(wide)))
    dx, dg, dw, db = (None if t is None else next(found) for t in leaves)
    assert dx is not None
    assert dg is not None
    if dresidual is not None:
        dx = dx + dresidual
    results = (
        dx.to(x_dtype or x.dtype),
        dg.to(x_dtype or g.dtype),
        None if dw is None or weight is None else dw.to(weight.dtype),
        None if db is None or bias is None else db.to(bias.dtype),
        dx.to(x.dtype) if has_residual else None,
    )
    return (*results, y.detach().to(dy.dtype)) if recompute_output else results


def swiglu_fwd(x: Tensor, y: Tensor, output_contiguous: bool = False) -> Tensor:
    """z, in x's dtype."""
    wide = _wide(x)
    z = (wide * torch.sigmoid(wide) * _wide(y)).to(x.dtype)
    return z.contiguous() if output_contiguous else z


def swiglu_fwdbwd(
    x: Tensor, y: Tensor, g: Tensor, use_weight: bool = False, output_contiguous: bool = False
) -> tuple[Tensor, ...]:
    """(dx, dy) of upstream gradient g, and z with ``use_weight``."""
    wide, up = _wide(x), _wide(g)
    s = torch.sigmoid(wide)
    dx = (up * _wide(y) * s * (1.0 + wide * (1.0 - s))).to(x.dtype)
    dy = (up * wide * s).to(y.dtype)
    results = (dx, dy, swiglu_fwd(x, y)) if use_weight else (dx, dy)
    return tuple(t.contiguous() for t in results) if output_contiguous else results

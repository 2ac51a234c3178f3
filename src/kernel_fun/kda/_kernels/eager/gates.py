"""Gate, beta and l2norm of a tile, forward and backward. Shared by the chunked and the recurrent form.

Formulas: flash-linear-attention's KDA (docs/kda.md). ``x = g + dt_bias``, ``a = exp(A_log)``:

    log        l = g
    softplus   l = -a softplus(x)
    bounded    l = lower_bound sigmoid(a x)

all natural-log decays. In its far tail softplus(x) is exp(x) (1 - exp(x)/2 + ...), and -exp(A_log + x) is
taken there instead of a product that overflows times one that underflows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call

EPS = 1e-6
TAIL = -15.0
"""Below this, three terms of softplus(x) = e^x - e^2x / 2 + e^3x / 3 - ... are exact in float32."""


def rstd(x: Tensor) -> Tensor:
    """1 / sqrt(sum x^2 + 1e-6) over the last dimension, kept."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def norm_bwd(y: Tensor, r: Tensor, dy: Tensor) -> Tensor:
    """Gradient of y = x r with r = rstd(x): r (dy - (dy . y) y)."""
    return r * torch.addcmul(dy, (dy * y).sum(-1, keepdim=True), y, value=-1)


def beta_fwd(b: Tensor, mode: str) -> Tensor:
    if mode == "raw":
        return b
    return torch.sigmoid(b) if mode == "sigmoid" else 2.0 * torch.sigmoid(b)


def beta_bwd(b: Tensor, db: Tensor, mode: str) -> Tensor:
    """Gradient of the raw beta."""
    if mode == "raw":
        return db
    return db * torch.sigmoid(b) * torch.sigmoid(-b) * (1.0 if mode == "sigmoid" else 2.0)


def _parameters(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A_log ``[HV, 1, 1]`` (0 where there is none) and dt_bias ``[HV, 1, K]``."""
    HV, K = call.g.shape[2:]
    A_log = call.g.new_zeros(HV) if call.A_log is None else call.A_log
    bias = None if call.dt_bias is None else call.dt_bias.to(dtype).reshape(HV, 1, K)
    return A_log.to(dtype).reshape(HV, 1, 1), bias


def _rate(A_log: Tensor) -> Tensor:
    """exp(A_log), at most the largest finite number, so that times 0 it is 0."""
    return A_log.exp().clamp(max=torch.finfo(A_log.dtype).max)


def gate_fwd(g: Tensor, call: Call) -> Tensor:
    """Natural-log decay l of a raw gate tile ``[..., HV, BT, K]``."""
    if call.gate == "log":
        return g
    A_log, bias = _parameters(call, g.dtype)
    x = g if bias is None else g + bias
    if call.gate == "bounded":
        assert call.lower_bound is not None
        return torch.sigmoid(_rate(A_log) * x).mul_(call.lower_bound)
    return torch.where(x < TAIL, _tail(A_log, x), A_log.exp() * _softplus(x)).neg_()


def _softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), to the last bits on either side (torch's own becomes x beyond 20)."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


def _tail(A_log: Tensor, x: Tensor) -> Tensor:
    """exp(A_log) softplus(x) for x < TAIL."""
    e = x.clamp(max=TAIL).exp()
    return (A_log + x).exp().mul_(1.0 - e * (0.5 - e / 3.0))


def gate_bwd(g: Tensor, l: Tensor, dl: Tensor, call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the raw gate, and tile sums of dA_log ``[n, HV]`` and d dt_bias ``[n, HV, K]``.

    ``dl`` is 0 wherever the decay is 0 or the row does not exist, whatever l is there (-inf included).
    """
    if call.gate == "log":
        return dl, None, None
    A_log, bias = _parameters(call, g.dtype)
    x = g if bias is None else g + bias
    zero = dl.new_zeros(())
    if call.gate == "bounded":
        z = _rate(A_log) * x
        assert call.lower_bound is not None
        slope = torch.sigmoid(z) * torch.sigmoid(-z) * call.lower_bound
        dz = dl * slope
        dx = torch.where(dz == 0, zero, dz * _rate(A_log))
        dA = torch.where(dz == 0, zero, dz * z)
    else:
        dA = torch.where(dl == 0, zero, dl * l)
        slope = torch.where(x < TAIL, (A_log + x).exp() * torch.sigmoid(-x), A_log.exp() * torch.sigmoid(x))
        dx = torch.where(dl == 0, zero, -dl * slope)
    return (
        dx,
        None if call.A_log is None else dA.sum((-2, -1)),
        None if bias is None else dx.sum(-2),
    )

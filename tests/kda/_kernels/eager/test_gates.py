"""The gate over its whole range: tails, overflow, saturation, death; forward and backward against float64."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from kernel_fun.kda._kernels.eager import gates


def call(
    gate: str, A_log: float | None, g: torch.Tensor, bias: float | None = None, lower_bound: float = -5.0
):
    one = lambda x, n: None if x is None else torch.full((n,), x, dtype=g.dtype)  # noqa: E731
    return SimpleNamespace(
        gate=gate, A_log=one(A_log, 1), dt_bias=one(bias, g.shape[-1]), g=g, lower_bound=lower_bound
    )


def tile(*values: float, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).reshape(1, 1, 1, -1)


def log_gate(gate: str, A_log: float | None, values: tuple[float, ...], **kw):
    g = tile(*values)
    return gates.gate_fwd(g, call(gate, A_log, g.transpose(1, 2), **kw)).flatten()


def test_softplus_tail_does_not_round_to_no_decay():
    """Raw + bias = -18 with A_log = ln(1e6): the decay is -0.01523 a token, not 0."""
    assert log_gate("softplus", math.log(1e6), (-18.0,)).item() == pytest.approx(
        -1e6 * math.log1p(math.exp(-18)), rel=3e-6
    )


@pytest.mark.parametrize("A_log", [-8.0, 0.0, 3.0, 60.0])
def test_softplus_matches_float64_on_both_sides_of_the_tail(A_log):
    x = (-80.0, -30.0, -15.001, -14.999, -5.0, 0.0, 5.0, 25.0)
    want = [-math.exp(A_log) * (math.log1p(math.exp(-abs(v))) + max(v, 0.0)) for v in x]
    assert log_gate("softplus", A_log, x).tolist() == pytest.approx(want, rel=1e-5)


def test_overflowing_rate_times_vanishing_softplus_is_no_decay():
    """A_log = 100, raw = -200: the log decay is -3.7e-44, and no gradient is NaN."""
    g = tile(-200.0)
    c = call("softplus", 100.0, g.transpose(1, 2))
    l = gates.gate_fwd(g, c)
    assert l.exp().item() == 1.0
    dx, dA, _ = gates.gate_bwd(g, l, torch.ones_like(g), c)
    assert dx.item() == pytest.approx(0.0, abs=1e-40)
    assert math.isfinite(dA.item())


def test_overflowing_rate_is_death_with_zero_gradient():
    g = tile(3.0)
    c = call("softplus", 100.0, g.transpose(1, 2))
    l = gates.gate_fwd(g, c)
    assert l.exp().item() == 0.0
    dx, dA, _ = gates.gate_bwd(g, l, torch.zeros_like(g), c)
    assert (dx.item(), dA.item()) == (0.0, 0.0)


def test_bounded_saturation_has_zero_gradient_and_no_nan():
    """A_log = 100, raw = +-3: the sigmoid is 1 and 0."""
    g = tile(3.0, -3.0)
    c = call("bounded", 100.0, g.transpose(1, 2))
    l = gates.gate_fwd(g, c)
    assert l.flatten().tolist() == [-5.0, 0.0]
    dx, dA, _ = gates.gate_bwd(g, l, torch.ones_like(g), c)
    assert dx.flatten().tolist() == [0.0, 0.0]
    assert dA.item() == 0.0


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("A_log", [None, -2.0, 1.5])
@pytest.mark.parametrize("bias", [None, 0.7])
def test_backward_is_the_derivative(gate, A_log, bias):
    if gate == "softplus" and A_log is None:
        pytest.skip("the softplus gate has an A_log")
    g = torch.linspace(-20, 20, 37, dtype=torch.float64).reshape(1, 1, 1, -1).requires_grad_()
    c = call(gate, A_log, g.detach().transpose(1, 2), bias)
    for p in (c.A_log, c.dt_bias):
        if p is not None:
            p.requires_grad_()
    dl = torch.linspace(-1, 2, 37, dtype=torch.float64).reshape(g.shape)
    x = g if bias is None else g + c.dt_bias
    rate = 1.0 if A_log is None else c.A_log.exp()
    plain = (
        -rate * torch.logaddexp(x, torch.zeros_like(x))
        if gate == "softplus"
        else -5.0 * torch.sigmoid(rate * x)
    )
    wanted = [p for p in (g, c.A_log, c.dt_bias) if p is not None]
    want = torch.autograd.grad((plain * dl).sum(), wanted)
    with torch.no_grad():
        l = gates.gate_fwd(g, c)
        torch.testing.assert_close(l, plain, rtol=1e-12, atol=0)
        dx, dA, dbias = gates.gate_bwd(g, l, dl, c)
    got = [
        dx,
        *([dA.flatten()] if A_log is not None else []),
        *([dbias.flatten()] if bias is not None else []),
    ]
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)  # autograd's 1 - s cancels


def test_norm_of_a_zero_row_and_of_a_tiny_row():
    x = torch.tensor([[0.0, 0.0], [6e-4, 8e-4]], dtype=torch.float64)
    r = gates.rstd(x)
    assert (x * r)[0].tolist() == [0.0, 0.0]
    assert (x * r)[1].norm().item() == pytest.approx(1e-3 / math.sqrt(2e-6))
    dx = gates.norm_bwd(x * r, r, torch.ones_like(x))
    assert dx[0].tolist() == pytest.approx([1e3, 1e3])

"""Gradients by finite differences, what is saved, what is refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_fun.cconv import causal_conv1d

from .cases import DIFFERENTIABLE, Case, check, run

FULL = Case(B=2, T=5, D=3, bias=True, residual=True, h0=True, ht=True)


@pytest.mark.parametrize(
    "case",
    [
        FULL,
        replace(FULL, T=1),
        replace(FULL, T=2, W=7, activation=None),
        replace(FULL, lengths=(1, 0, 6, 2), tail=2),
        Case(B=1, T=6, D=2, W=2),
    ],
    ids=["full", "one token", "window longer than T", "packed", "plain"],
)
def test_gradcheck(case: Case) -> None:
    a = case.arguments()
    leaves = {n: a[n].requires_grad_() for n in DIFFERENTIABLE if a[n] is not None}

    def op(*tensors: Tensor) -> Any:
        y, ht = causal_conv1d(**{**a, **dict(zip(leaves, tensors))})
        return y if ht is None else (y, ht)

    assert torch.autograd.gradcheck(op, tuple(leaves.values()))


@pytest.mark.parametrize("part", ["dy", "dht"])
def test_one_output_alone(part: str) -> None:
    from kernel_fun.cconv import reference

    arguments, upstream = FULL.arguments(), FULL.upstream()
    given = {part: upstream[part]}
    check(run(reference.causal_conv1d, arguments, **given), run(causal_conv1d, arguments, **given))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_one_gradient_alone(name: str) -> None:
    arguments, upstream = FULL.arguments(), FULL.upstream()
    expected = run(causal_conv1d, arguments, **upstream)
    leaf = arguments[name].clone().requires_grad_()
    outputs = causal_conv1d(**{**arguments, name: leaf})
    (found,) = torch.autograd.grad(outputs, leaf, (upstream["dy"], upstream["dht"]))
    assert torch.equal(found, expected[f"d{name}"])


def test_double_backward_is_refused() -> None:
    """Also in a sum with terms that can be differentiated, where a lost term would go unnoticed."""
    a = Case().arguments()
    x = a["x"].requires_grad_()
    y, _ = causal_conv1d(**a)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(dx, run(causal_conv1d, a, dy=torch.ones_like(y))["dx"])
    with pytest.raises(RuntimeError, match="no double backward"):
        (dx.square().sum() + y.sum()).backward()


def test_backward_twice_over_one_graph() -> None:
    a = Case().arguments()
    x = a["x"].requires_grad_()
    y, _ = causal_conv1d(**a)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), x)[0])


@pytest.mark.parametrize("name", ["x", "weight", "cu_seqlens"])
def test_an_input_changed_before_the_backward_is_an_error(name: str) -> None:
    a = Case(lengths=(9, 11)).arguments()
    leaf = a["x"].clone().requires_grad_()
    a["x"] = leaf * 1.0
    y, _ = causal_conv1d(**a)
    with torch.no_grad():
        a[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("how", ["a view of a buffer", "saved as a copy"])
def test_boundaries_that_autograd_cannot_watch_are_read_as_they_were(how: str) -> None:
    a = Case(lengths=(9, 11)).arguments()
    leaf, dy = a["x"].requires_grad_(), torch.randn_like(a["x"])
    (expected,) = torch.autograd.grad(causal_conv1d(**a)[0], leaf, dy)
    ring = torch.stack((a["cu_seqlens"], a["cu_seqlens"]))
    a["cu_seqlens"] = ring[0] if how == "a view of a buffer" else a["cu_seqlens"].clone()
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)
    with hooks if how == "saved as a copy" else contextlib.nullcontext():
        y, _ = causal_conv1d(**a)
    a["cu_seqlens"][1] = 3
    assert torch.equal(torch.autograd.grad(y, leaf, dy)[0], expected)


def test_only_the_callers_tensors_are_saved() -> None:
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    a = FULL.arguments()
    a["x"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        causal_conv1d(**a)
    given = {a[n].data_ptr() for n in ("x", "weight", "bias", "initial_state")}
    assert {t.data_ptr() for t in kept} == given

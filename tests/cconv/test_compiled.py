"""causal_conv1d under torch.compile: no break, the bits of eager mode, one recompile when T varies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_fun._common import support
from kernel_fun.cconv import causal_conv1d, compiled, dispatch

from .cases import Case, run, same

dynamo = pytest.importorskip("torch._dynamo")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

FULL = Case(bias=True, residual=True, h0=True, ht=True, dtype=torch.float32)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    dynamo.reset()
    support.forget_logged()
    yield
    dynamo.reset()


def compile_it() -> tuple[Callable[..., Any], Any]:
    counter = CompileCounterWithBackend("aot_eager")

    def around(**arguments: Any) -> Any:
        y, ht = causal_conv1d(**{**arguments, "x": arguments["x"] * 1.0})
        return y * 1.0, ht

    return torch.compile(around, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize(
    "case",
    [
        FULL,
        Case(dtype=torch.bfloat16, weight_dtype=torch.float32),
        replace(FULL, lengths=(5, 0, 9), tail=2),
        replace(FULL, activation=None, dtype=torch.float64),
        Case(residual=True, lengths=(5, 9), tail=3, dtype=torch.float16),
        Case(h0=True, W=2, dtype=torch.float32),
    ],
    ids=["full", "bfloat16", "packed", "float64", "packed residual", "state"],
)
def test_the_bits_of_eager_mode_without_a_break(case: Case) -> None:
    op, counter = compile_it()
    for T in (20, 33, 50, 7):
        sized = replace(case, T=T) if case.lengths is None else replace(case, tail=T)
        arguments, upstream = sized.arguments(), sized.upstream()
        same(run(causal_conv1d, arguments, **upstream), run(op, arguments, **upstream))
    assert counter.frame_count == 2


def test_one_output_alone() -> None:
    op, _ = compile_it()
    arguments, upstream = FULL.arguments(), FULL.upstream()
    for name in upstream:
        given = {name: upstream[name]}
        same(run(causal_conv1d, arguments, **given), run(op, arguments, **given))


def test_trailing_dimensions_positions_and_no_grad() -> None:
    op = torch.compile(causal_conv1d, backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(2, 9, 3, 2), torch.randn(6, 4)
    for a, b in zip(causal_conv1d(x, weight), op(x, weight)):
        assert (a is None and b is None) or torch.equal(a, b)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(causal_conv1d(x, weight, activation="silu")[0].sum(), x)
    assert torch.equal(torch.autograd.grad(op(x, weight, activation="silu")[0].sum(), x)[0], dx)


def test_it_says_who_runs_and_refuses_as_always(caplog: pytest.LogCaptureFixture) -> None:
    op, _ = compile_it()
    arguments = FULL.arguments()
    with caplog.at_level(logging.INFO, logger="kernel_fun"):
        op(**arguments)
    assert "kernel-fun cconv: engaged (causal_conv1d on eager, CPU: B=2 T=20 D=6 W=4" in caplog.text
    with pytest.raises(Exception, match="`activation` must be None, 'silu' or 'swish', got 'gelu'"):
        op(**{**arguments, "activation": "gelu"})
    with pytest.raises(Exception, match=r"`bias` must have shape \[D\] = \[6\], got \[5\]"):
        op(**{**arguments, "bias": torch.zeros(5)})


def test_what_is_not_traced_runs_outside_the_graph() -> None:
    op = torch.compile(lambda **a: causal_conv1d(**a)[0] * 2.0, backend="aot_eager")
    arguments = FULL.arguments()
    with pytest.raises(TypeError, match="unexpected keyword argument 'activaton'"):
        op(**arguments, activaton="silu")
    with pytest.raises(TypeError, match=r"`weight` must be a torch\.Tensor, got NoneType"):
        op(**{**arguments, "weight": None})
    assert torch.equal(op(**arguments, backend="mix"), causal_conv1d(**arguments)[0] * 2.0)


def test_a_graph_made_for_us_refuses_when_we_no_longer_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    op, _ = compile_it()
    op(**FULL.arguments())
    plan = dispatch.plan
    monkeypatch.setattr(dispatch, "plan", lambda *a: replace(plan(*a), backend="fla", reason="as told"))
    with pytest.raises(
        RuntimeError, match="compiled for causal_conv1d of kernel-fun, which now does not serve"
    ):
        op(**FULL.arguments())


@pytest.mark.parametrize("case", [FULL, replace(FULL, lengths=(5, 0, 9), tail=2)], ids=["dense", "packed"])
def test_the_operators_keep_their_word(case: Case) -> None:
    """Schema, fake shapes and strides, autograd registration, as torch checks them."""
    arguments, upstream = case.arguments(), case.upstream()
    for name in ("x", "weight", "bias", "residual", "initial_state"):
        arguments[name].requires_grad_()
    a = compiled.Arguments(**arguments, needs_grad=True)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.kernel_fun.causal_conv1d.default, tuple(a), test_utils=tests)
    backward = (
        upstream["dy"],
        upstream["dht"],
        *(t.detach() if isinstance(t, torch.Tensor) else t for t in a),
    )
    torch.library.opcheck(torch.ops.kernel_fun.causal_conv1d_backward.default, backward, test_utils=tests[:2])


def test_the_operator_takes_what_causal_conv1d_takes() -> None:
    apart = {"backend", "chunk_indices", "cp_context"}
    fields = set(compiled.Arguments._fields) - {"needs_grad"}
    assert set(dispatch.CAUSAL_CONV1D.parameters) - apart == fields
    schema = torch.ops.kernel_fun.causal_conv1d.default._schema
    assert tuple(a.name for a in schema.arguments) == compiled.Arguments._fields

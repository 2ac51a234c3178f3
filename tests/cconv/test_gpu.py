"""The Triton kernels on the CUDA device present, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_fun import cconv
from kernel_fun._common import device as devices
from kernel_fun.cconv import dispatch, reference
from kernel_fun.cconv.call import bind
from kernel_fun.testing import poisoned_empty

from .cases import DENSE, PACKINGS, Case, check, run, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _triton_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call the Triton kernels cannot serve is an error, so no other backend can pass for them."""
    monkeypatch.setenv("KERNEL_FUN_CCONV_BACKEND", "triton")


def served_by(arguments: dict[str, Any]) -> str:
    call = bind({**cconv.ops._defaults(), **arguments, "kwargs": {}})
    return dispatch.plan(call.problem(), devices.of(arguments["x"].device)).backend


def compare(case: Case) -> dict[str, torch.Tensor]:
    """A case against the oracle, with NaN in all fresh memory; returns what was found."""
    arguments, upstream = case.arguments("cuda"), case.upstream("cuda")
    assert served_by(arguments) == "triton"
    truth = run(reference.causal_conv1d, arguments, **upstream, double=True)
    with poisoned_empty():
        found = run(cconv.causal_conv1d, arguments, **upstream)
    check(truth, found)
    assert found["y"].dtype == case.dtype
    for name, value in found.items():
        if name.startswith("d"):
            assert value.dtype == arguments[name[1:]].dtype, name
    return found


FULL = Case(D=40, bias=True, residual=True, h0=True, ht=True, dtype=BF16, weight_dtype=FP32)


@pytest.mark.parametrize("lengths", [*PACKINGS, (1000, 1, 65, 0, 3)], ids=str)
@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
def test_packed(lengths: tuple[int, ...], full: bool) -> None:
    plain = Case(D=40, dtype=BF16, weight_dtype=FP32)
    compare(replace(FULL if full else plain, lengths=lengths, tail=3))


@pytest.mark.parametrize("size", [*DENSE, (2, 1000)], ids=str)
@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
def test_dense(size: tuple[int, int], full: bool) -> None:
    plain = Case(D=40, dtype=BF16, weight_dtype=FP32)
    compare(replace(FULL if full else plain, B=size[0], T=size[1]))


@pytest.mark.parametrize("W", range(2, 9))
@pytest.mark.parametrize("lengths", [None, (1, 30, 0, 9)], ids=["dense", "packed"])
def test_every_width(W: int, lengths: tuple[int, ...] | None) -> None:
    compare(replace(FULL, W=W, lengths=lengths, T=33))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("weight_dtype", [BF16, FP32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_dtypes_and_activations(
    dtype: torch.dtype, weight_dtype: torch.dtype, activation: str | None
) -> None:
    compare(Case(B=2, T=50, D=64, bias=True, dtype=dtype, weight_dtype=weight_dtype, activation=activation))


@pytest.mark.parametrize("D", [1, 7, 64, 513, 2048, 2050])
def test_channels(D: int) -> None:
    compare(Case(B=1, T=200, D=D, dtype=BF16, weight_dtype=FP32))


def test_large_enough_for_the_pinned_tile() -> None:
    compare(Case(B=4, T=8192, D=2048, dtype=BF16, weight_dtype=FP32, ht=True))


@pytest.mark.parametrize(
    "case", [replace(FULL, B=2, T=300), replace(FULL, lengths=(200, 0, 100, 7), tail=5)], ids=str
)
def test_two_runs_give_the_same_bits(case: Case) -> None:
    arguments, upstream = case.arguments("cuda"), case.upstream("cuda")
    first = run(cconv.causal_conv1d, arguments, **upstream)
    same(first, run(cconv.causal_conv1d, arguments, **upstream))


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    lengths = (1, 300, 0, 2, 64, 129)
    case = replace(FULL, lengths=lengths, D=256)
    arguments, upstream = case.arguments("cuda"), case.upstream("cuda")
    packed = run(cconv.causal_conv1d, arguments, **upstream)
    first = 0
    for n, length in enumerate(lengths):
        span = slice(first, first + length)
        alone = {**arguments, "cu_seqlens": None, "initial_state": arguments["initial_state"][n : n + 1]}
        alone.update({name: arguments[name][:, span] for name in ("x", "residual")})
        out = run(cconv.causal_conv1d, alone, dy=upstream["dy"][:, span], dht=upstream["dht"][n : n + 1])
        for name in ("y", "dx", "dresidual"):
            assert torch.equal(out[name], packed[name][:, span]), name
        for name in ("ht", "dinitial_state"):
            assert torch.equal(out[name], packed[name][n : n + 1]), name
        first += length


def test_rows_past_the_last_sequence_may_hold_anything() -> None:
    case = replace(FULL, lengths=(140, 300, 1, 0), tail=70)
    arguments, upstream = case.arguments("cuda"), case.upstream("cuda")
    clean = run(cconv.causal_conv1d, arguments, **upstream)
    for name in ("x", "residual"):
        arguments[name][:, 441:] = torch.nan
    upstream["dy"][:, 441:] = torch.nan
    found = run(cconv.causal_conv1d, arguments, **upstream)
    same(clean, found)
    for name in ("y", "dx", "dresidual"):
        assert not found[name][:, 441:].any(), name


def test_nan_stays_in_its_sequence() -> None:
    case = replace(FULL, lengths=(20, 33, 11))
    arguments, upstream = case.arguments("cuda"), case.upstream("cuda")
    clean = run(cconv.causal_conv1d, arguments, **upstream)
    arguments["x"][:, 20:53] = torch.nan
    found = run(cconv.causal_conv1d, arguments, **upstream)
    for name in ("y", "dx"):
        for span in (slice(0, 20), slice(53, 64)):
            assert torch.equal(found[name][:, span], clean[name][:, span]), name


@pytest.mark.parametrize("layout", ["projection slice", "channels strided", "unaligned", "batch strided"])
def test_strides(layout: str) -> None:
    case = Case(B=2, T=65, D=48, dtype=BF16, weight_dtype=FP32, h0=True, ht=True)
    arguments, upstream = case.arguments("cuda"), case.upstream("cuda")
    expected = run(cconv.causal_conv1d, arguments, dy=torch.ones_like(upstream["dy"]), dht=upstream["dht"])
    x = arguments["x"]
    if layout == "projection slice":
        x = torch.cat((x, x, x), -1)[..., 48:96]
    elif layout == "channels strided":
        x = x.mT.contiguous().mT
    elif layout == "unaligned":
        x = torch.nn.functional.pad(x, (3, 0))[..., 3:]
    else:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    arguments["x"] = x
    arguments["weight"] = arguments["weight"].T.contiguous().T
    arguments["initial_state"] = arguments["initial_state"].mT.contiguous().mT
    before = {n: a.clone() for n, a in arguments.items() if isinstance(a, torch.Tensor)}
    one = torch.ones((), device="cuda", dtype=BF16).expand_as(x)  # what y.sum().backward() gives
    found = run(cconv.causal_conv1d, arguments, dy=one, dht=upstream["dht"].mT.contiguous().mT)
    same(expected, found)
    for name, value in before.items():
        assert torch.equal(arguments[name], value), f"{name} was modified"


def test_more_than_two_to_the_31_elements() -> None:
    T, D = (1 << 20) + 77, 2050
    x = torch.randn(1, 4096, D, device="cuda", dtype=BF16).repeat(1, T // 4096 + 1, 1)[:, :T].requires_grad_()
    weight = torch.randn(D, 4, device="cuda")
    assert x.numel() > 1 << 31
    y, _ = cconv.causal_conv1d(x, weight, activation="silu")
    (dx,) = torch.autograd.grad(y, x, x.detach())
    end = slice(T - 500, T)
    last = x.detach()[:, T - 503 :].clone().requires_grad_()
    y_last, _ = cconv.causal_conv1d(last, weight, activation="silu")
    (dx_last,) = torch.autograd.grad(y_last, last, last.detach())
    assert torch.equal(y[:, end], y_last[:, 3:])
    assert torch.equal(dx[:, end], dx_last[:, 3:])


def test_more_sequences_than_a_grid_axis() -> None:
    """One token a sequence: the packed call is the dense one with as many batch rows."""
    N = 70_000
    case = Case(lengths=(1,) * N, D=8, h0=True, ht=True, dtype=FP32)
    arguments, upstream = case.arguments("cuda"), case.upstream("cuda")
    packed = run(cconv.causal_conv1d, arguments, **upstream)
    dense = {**arguments, "cu_seqlens": None, "x": arguments["x"].view(N, 1, 8)}
    found = run(cconv.causal_conv1d, dense, dy=upstream["dy"].view(N, 1, 8), dht=upstream["dht"])
    for name in ("y", "ht", "dx", "dinitial_state"):
        assert torch.equal(found[name].flatten(), packed[name].flatten()), name
    few = {**dense, **{n: dense[n][-50:] for n in ("x", "initial_state")}}
    truth = run(
        reference.causal_conv1d,
        few,
        dy=upstream["dy"].view(N, 1, 8)[-50:],
        dht=upstream["dht"][-50:],
        double=True,
    )
    check({n: truth[n] for n in ("y", "ht", "dx", "dinitial_state")}, {n: found[n][-50:] for n in found})


def test_graph_capture() -> None:
    case = replace(FULL, lengths=(100, 0, 28), D=64)
    arguments, upstream = case.arguments("cuda"), case.upstream("cuda")
    expected = run(cconv.causal_conv1d, arguments, **upstream)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(cconv.causal_conv1d, arguments, **upstream)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(cconv.causal_conv1d, arguments, **upstream)
    graph.replay()
    torch.cuda.synchronize()
    same(expected, captured)


@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("layout", ["2d", "1nd", "n1d"])
def test_update_continues_a_sequence(W: int, layout: str) -> None:
    case = Case(
        B=3, T=12, D=300, W=W, bias=True, residual=True, h0=True, ht=True, dtype=BF16, weight_dtype=FP32
    )
    a = case.arguments("cuda")
    y, ht = cconv.causal_conv1d(**a)
    cache = torch.empty(3, W, 300, device="cuda", dtype=BF16).mT.copy_(a["initial_state"])
    for t in range(12):
        shape = {"2d": (3, 300), "1nd": (1, 3, 300), "n1d": (3, 1, 300)}[layout]
        x, residual = (a[n][:, t].reshape(shape) for n in ("x", "residual"))
        y_t, same_cache = cconv.causal_conv1d_update(
            x, cache, residual, a["weight"], a["bias"], a["activation"]
        )
        assert same_cache is cache
        assert y_t.shape == x.shape
        assert torch.allclose(y_t.reshape(3, 300).float(), y[:, t].float(), rtol=8e-3, atol=1e-5)
    assert torch.equal(cache, ht)


def test_frozen_weight_and_state_only() -> None:
    case = replace(FULL, B=2, T=100)
    arguments, upstream = case.arguments("cuda"), case.upstream("cuda")
    expected = run(cconv.causal_conv1d, arguments, **upstream)
    x = arguments["x"].clone().requires_grad_()
    y, ht = cconv.causal_conv1d(**{**arguments, "x": x})
    (dx,) = torch.autograd.grad((y, ht), x, (upstream["dy"], upstream["dht"]))  # pyright: ignore[reportCallIssue]
    assert torch.equal(dx, expected["dx"])
    truth = run(reference.causal_conv1d, arguments, dht=upstream["dht"], double=True)
    check(truth, run(cconv.causal_conv1d, arguments, dht=upstream["dht"]))


def test_warmup() -> None:
    assert cconv.warmup(D=64, bias=True) > 0
    assert cconv.warmup(D=64, packed=True) > 0
    assert cconv.is_supported(torch.empty(1, 5, 64, device="cuda"), torch.empty(64, 4, device="cuda")) == (
        True,
        None,
    )

"""Public behaviour of the eager backend on the CPU, against the fp64 oracle."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_fun import cconv
from kernel_fun.cconv import causal_conv1d, causal_conv1d_update, reference
from kernel_fun.testing import poisoned_empty

from .cases import DENSE, PACKINGS, Case, check, run, same

FULL = Case(bias=True, residual=True, h0=True, ht=True)
SIZES = [
    *({"B": b, "T": t} for b, t in DENSE),
    *({"lengths": p, "tail": i % 3} for i, p in enumerate(PACKINGS)),
]


@pytest.mark.parametrize("W", [1, 2, 4, 7, 8, 11])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_equals_the_oracle(W: int, size: dict[str, Any], activation: str | None) -> None:
    case = replace(FULL, W=W, activation=activation, **size)
    with poisoned_empty():
        found = run(causal_conv1d, case.arguments(), **case.upstream())
    check(run(reference.causal_conv1d, case.arguments(), **case.upstream()), found)


@pytest.mark.parametrize("part", ["bias", "residual", "h0", "ht"])
@pytest.mark.parametrize("lengths", [None, (5, 0, 1, 9)], ids=["dense", "packed"])
def test_each_optional_argument_alone(part: str, lengths: tuple[int, ...] | None) -> None:
    case = Case(lengths=lengths, **{part: True})
    check(
        run(reference.causal_conv1d, case.arguments(), **case.upstream()),
        run(causal_conv1d, case.arguments(), **case.upstream()),
    )


@pytest.mark.parametrize("lengths", [None, (30, 0, 1, 19)], ids=["dense", "packed"])
@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_low_precision_is_rounded_once(
    dtype: str, weight_dtype: str, lengths: tuple[int, ...] | None
) -> None:
    case = replace(
        FULL,
        T=50,
        D=32,
        lengths=lengths,
        dtype=getattr(torch, dtype),
        weight_dtype=getattr(torch, weight_dtype),
    )
    arguments, upstream = case.arguments(), case.upstream()
    found = run(causal_conv1d, arguments, **upstream)
    check(run(reference.causal_conv1d, arguments, **upstream, double=True), found)
    assert found["y"].dtype == found["ht"].dtype == case.dtype
    for name in ("x", "weight", "bias", "residual", "initial_state"):
        assert found[f"d{name}"].dtype == arguments[name].dtype, name


def test_swish_is_silu() -> None:
    arguments = Case().arguments()
    same(run(causal_conv1d, arguments), run(causal_conv1d, {**arguments, "activation": "swish"}))


def test_packed_equals_separate() -> None:
    lengths = (1, 13, 0, 2, 30)
    case = replace(FULL, lengths=lengths)
    arguments, upstream = case.arguments(), case.upstream()
    packed = run(causal_conv1d, arguments, **upstream)
    first = 0
    for n, length in enumerate(lengths):
        span = slice(first, first + length)
        alone = {**arguments, "cu_seqlens": None, "initial_state": arguments["initial_state"][n : n + 1]}
        alone.update({name: arguments[name][:, span] for name in ("x", "residual")})
        out = run(causal_conv1d, alone, dy=upstream["dy"][:, span], dht=upstream["dht"][n : n + 1])
        rows = {name: packed[name][:, span] for name in ("y", "dx", "dresidual")}
        check({**rows, **{name: packed[name][n : n + 1] for name in ("ht", "dinitial_state")}}, out)
        first += length


@pytest.mark.parametrize("silu", [None, "silu"])
@pytest.mark.parametrize("D", [1, 3, 40])
def test_packed_gives_the_bits_of_separate(D: int, silu: str | None) -> None:
    """float32, lengths around the vector widths of a CPU: where an element stands does not matter."""
    lengths = (1, 13, 0, 2, 30, 64, 5)
    case = replace(FULL, lengths=lengths, tail=3, D=D, activation=silu, dtype=torch.float32)
    arguments, upstream = case.arguments(), case.upstream()
    packed = run(causal_conv1d, arguments, **upstream)
    first = 0
    for n, length in enumerate(lengths):
        span = slice(first, first + length)
        alone = {**arguments, "cu_seqlens": None, "initial_state": arguments["initial_state"][n : n + 1]}
        alone.update({name: arguments[name][:, span] for name in ("x", "residual")})
        out = run(causal_conv1d, alone, dy=upstream["dy"][:, span], dht=upstream["dht"][n : n + 1])
        for name in ("y", "dx", "dresidual"):
            assert torch.equal(packed[name][:, span], out[name]), name
        for name in ("ht", "dinitial_state"):
            assert torch.equal(packed[name][n : n + 1], out[name]), name
        first += length


def test_blocks_of_rows_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the gradients of a sequence that is cut between two blocks; sums over tokens within roundoff."""
    from kernel_fun.cconv._kernels.eager import line

    case = replace(FULL, lengths=(20, 0, 33, 7), dtype=torch.float32)
    whole = run(causal_conv1d, case.arguments(), **case.upstream())
    monkeypatch.setattr(line, "BLOCK", 5 * case.D)
    cut = run(causal_conv1d, case.arguments(), **case.upstream())
    for name in ("y", "ht", "dx", "dresidual", "dinitial_state"):
        assert torch.equal(whole[name], cut[name]), name
    check({name: whole[name].double() for name in ("dweight", "dbias")}, cut)


@pytest.mark.parametrize("spoilt", [torch.nan, 3e38])
def test_what_a_sequence_holds_stays_out_of_its_neighbours_states(spoilt: float) -> None:
    case = replace(FULL, lengths=(6, 5, 0, 7), dtype=torch.float32)
    arguments, upstream = case.arguments(), case.upstream()
    clean = run(causal_conv1d, arguments, **upstream)
    arguments["x"][:, 6:11] = spoilt
    found = run(causal_conv1d, arguments, **upstream)
    for name in ("ht", "dinitial_state"):
        for n in (0, 2, 3):
            assert torch.equal(found[name][n], clean[name][n]), (name, n)


def test_rows_past_the_last_sequence_may_hold_anything() -> None:
    case = replace(FULL, lengths=(3, 0, 8), tail=5)
    arguments, upstream = case.arguments(), case.upstream()
    clean = run(causal_conv1d, arguments, **upstream)
    for tensor in (arguments["x"], arguments["residual"], upstream["dy"]):
        tensor[:, 11:] = torch.nan
    found = run(causal_conv1d, arguments, **upstream)
    same(clean, found)
    for name in ("y", "dx", "dresidual"):
        assert not found[name][:, 11:].any(), name


def test_nan_stays_in_its_sequence() -> None:
    case = replace(FULL, lengths=(6, 5, 7))
    arguments, upstream = case.arguments(), case.upstream()
    clean = run(causal_conv1d, arguments, **upstream)
    arguments["x"][:, 6:11] = torch.nan
    found = run(causal_conv1d, arguments, **upstream)
    for name in ("y", "dx"):
        for span in (slice(0, 6), slice(11, 18)):
            assert torch.equal(found[name][:, span], clean[name][:, span]), name
        assert found[name][:, 6:11].isnan().all(), name


@pytest.mark.parametrize("layout", ["projection slice", "channels strided", "batch strided"])
@pytest.mark.parametrize("lengths", [None, (5, 0, 15)], ids=["dense", "packed"])
def test_strides(layout: str, lengths: tuple[int, ...] | None) -> None:
    case = replace(FULL, lengths=lengths)
    arguments, upstream = case.arguments(), case.upstream()
    expected = run(causal_conv1d, arguments, dy=torch.ones_like(upstream["dy"]), dht=upstream["dht"])
    for name in ("x", "residual"):
        t = arguments[name]
        if layout == "projection slice":
            t = torch.cat((t, t, t), -1)[..., case.D : 2 * case.D]
        elif layout == "channels strided":
            t = t.mT.contiguous().mT
        else:
            t = t.transpose(0, 1).contiguous().transpose(0, 1)
        arguments[name] = t
    for name in ("weight", "initial_state"):
        arguments[name] = arguments[name].mT.contiguous().mT
    before = {n: a.clone() for n, a in arguments.items() if isinstance(a, Tensor)}
    ones = torch.ones((), dtype=torch.float64).expand_as(arguments["x"])  # what y.sum().backward() gives
    found = run(causal_conv1d, arguments, dy=ones, dht=upstream["dht"].mT.contiguous().mT)
    check(expected, found)
    for name, value in before.items():
        assert torch.equal(arguments[name], value), f"{name} was modified"


@pytest.mark.parametrize("cuts", [(1, 1, 1, 1, 16), (2, 3, 15), (0, 20)], ids=str)
def test_states_hand_over_at_any_token(cuts: tuple[int, ...]) -> None:
    case = replace(FULL, B=2, T=20)
    a = case.arguments()
    y, ht = causal_conv1d(**a)
    state, first, pieces = a["initial_state"], 0, []
    for length in cuts:
        span = slice(first, first + length)
        part = {**a, "x": a["x"][:, span], "residual": a["residual"][:, span], "initial_state": state}
        piece, state = causal_conv1d(**part)
        pieces.append(piece)
        first += length
    check({"y": y, "ht": ht}, {"y": torch.cat(pieces, 1), "ht": state})


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("layout", ["2d", "1nd", "n1d", "heads"])
def test_update_continues_a_sequence(W: int, layout: str) -> None:
    a = replace(FULL, B=3, T=7, W=W).arguments()
    y, ht = causal_conv1d(**a)
    cache = torch.empty(3, W, 6, dtype=torch.float64).mT.copy_(a["initial_state"])
    shape = {"2d": (3, 6), "1nd": (1, 3, 6), "n1d": (3, 1, 6), "heads": (1, 3, 2, 3)}[layout]
    for t in range(7):
        x, residual = (a[n][:, t].reshape(shape) for n in ("x", "residual"))
        y_t, returned = causal_conv1d_update(x, cache, residual, a["weight"], a["bias"], a["activation"])
        assert returned is cache
        assert y_t.shape == x.shape
        assert torch.allclose(y_t.reshape(3, 6), y[:, t], rtol=1e-13, atol=1e-13)
    assert torch.equal(cache, ht)


def test_trailing_dimensions_are_channels() -> None:
    a = Case(residual=True, D=6).arguments()
    y, _ = causal_conv1d(**a)
    heads = {**a, **{n: a[n].unflatten(2, (2, 3)) for n in ("x", "residual")}}
    y_heads, _ = causal_conv1d(**heads)
    assert y_heads.shape == (2, 20, 2, 3)
    assert torch.equal(y_heads.flatten(2), y)


def test_autocast_changes_nothing() -> None:
    case = replace(FULL, dtype=torch.float32)
    expected = run(causal_conv1d, case.arguments(), **case.upstream())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(expected, run(causal_conv1d, case.arguments(), **case.upstream()))


def test_no_graph_without_need() -> None:
    a = FULL.arguments()
    y, ht = causal_conv1d(**a)
    assert y.grad_fn is None
    assert ht is not None
    assert ht.grad_fn is None
    with torch.no_grad():
        assert not causal_conv1d(**{**a, "x": a["x"].requires_grad_()})[0].requires_grad


@pytest.mark.parametrize("name", ["causal_conv1d", "causal_conv1d_update"])
def test_signature_is_that_of_fla(name: str) -> None:
    fla = pytest.importorskip("fla.modules.convolution")

    def facts(function: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert facts(getattr(cconv, name)) == facts(getattr(fla, name))


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"weight": None}, TypeError, r"`weight` must be a torch.Tensor, got NoneType"),
    ({"x": torch.zeros(3, 6)}, ValueError, r"`x` must have shape \[B, T, D\], got \[3, 6\]"),
    ({"x": torch.zeros(2, 20, 6, dtype=torch.long)}, TypeError, r"`x` must be .* got int64"),
    ({"weight": torch.zeros(5, 4)}, ValueError, r"`weight` must have shape \[D, W\] = \[6, 4\], got \[5, 4\]"),
    ({"weight": torch.zeros(6, 0)}, ValueError, r"`weight` must have W >= 1 taps, got W = 0"),
    ({"weight": torch.zeros(6, 1, 4)}, ValueError, r"`weight` must have shape \[D, W\].* got \[6, 1, 4\]"),
    ({"bias": torch.zeros(7)}, ValueError, r"`bias` must have shape \[D\] = \[6\], got \[7\]"),
    ({"bias": torch.zeros(6, device="meta")}, ValueError, r"`bias` must be on the device of `x`, cpu, got meta"),
    ({"residual": torch.zeros(2, 19, 6)}, ValueError, r"`residual` must have the shape of `x`, \[2, 20, 6\], got \[2, 19, 6\]"),
    ({"initial_state": torch.zeros(2, 6, 3)}, ValueError, r"`initial_state` must have shape \[N, D, W\] = \[2, 6, 4\], got \[2, 6, 3\]"),
    ({"activation": "gelu"}, ValueError, r"`activation` must be None, 'silu' or 'swish', got 'gelu'"),
    ({"backend": "mojo"}, ValueError, r"`backend` must be one of triton, mix, cuda, got 'mojo'"),
    ({"cu_seqlens": torch.tensor([0, 20])}, ValueError, r"`x` must have batch size 1 with `cu_seqlens`, got 2"),
    ({"cu_seqlens_cpu": torch.tensor([0, 20])}, ValueError, r"`cu_seqlens_cpu` must come with `cu_seqlens`"),
    ({"output_final_state": "yes"}, TypeError, r"`output_final_state` must be True or False, got 'yes'"),
    ({"x": torch.zeros(2, 20, 6, device="meta")}, ValueError, r"`x` must hold data"),
    ({"x": torch.zeros(2, 20, 6).to_sparse()}, TypeError, r"`x` must be a dense tensor, got layout sparse_coo"),
    ({"seq_idx": torch.zeros(2, 20)}, TypeError, r"`seq_idx` is read by fla's backends .* got it on cpu with backend='triton'"),
    ({"activaton": "silu"}, TypeError, r"unexpected keyword argument 'activaton'"),
    ({"cp_context": object()}, TypeError, r"`cp_context` must be a context of .*got object without `group`"),
]  # fmt: skip
WRONG_PACKED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"cu_seqlens": torch.tensor([0.0, 20.0])},
        TypeError,
        r"`cu_seqlens` must be int64 or int32, got float32",
    ),
    (
        {"cu_seqlens": torch.tensor([[0, 20]])},
        ValueError,
        r"`cu_seqlens` must have shape \[N\+1\], got \[1, 2\]",
    ),
    ({"cu_seqlens": torch.tensor([1, 20])}, ValueError, r"`cu_seqlens` must start at 0, got 1"),
    ({"cu_seqlens": torch.tensor([0, 9, 5])}, ValueError, r"`cu_seqlens` must not decrease, got 9 then 5"),
    (
        {"cu_seqlens": torch.tensor([0, 21])},
        ValueError,
        r"`cu_seqlens` must end within the 20 tokens given, got 21",
    ),
    (
        {"cu_seqlens_cpu": torch.tensor([0, 19])},
        ValueError,
        r"`cu_seqlens_cpu` must hold the values of `cu_seqlens`",
    ),
]


@pytest.mark.parametrize("change, error, message", WRONG)
def test_bad_input_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        causal_conv1d(**{**Case(dtype=torch.float32).arguments(), **change})


@pytest.mark.parametrize("change, error, message", WRONG_PACKED)
def test_bad_packing_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        causal_conv1d(**{**Case(lengths=(20,), dtype=torch.float32).arguments(), **change})


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"x": torch.zeros(3, 2, 6)},
            ValueError,
            r"`x` must have shape \[N, D\], \[1, N, D\] or \[N, 1, D\]",
        ),
        ({"cache": torch.zeros(3, 6, 3)}, ValueError, r"`cache` must have shape \[N, D, W\] = \[3, 6, 4\]"),
        ({"cache": None}, TypeError, r"`cache` must be a torch.Tensor, got NoneType"),
        ({"residual": torch.zeros(3, 1, 6)}, ValueError, r"`residual` must have the shape of `x`"),
        ({"x": torch.zeros(3, 6, requires_grad=True)}, ValueError, r"`x` must not require a gradient"),
        ({"weight": torch.zeros(6, 4, requires_grad=True)}, ValueError, r"`weight` must not require a grad"),
        ({"bias": torch.zeros(6, requires_grad=True)}, ValueError, r"`bias` must not require a gradient"),
        ({"cache": torch.zeros(1, 6, 4).expand(3, 6, 4)}, ValueError, r"`cache` must have memory of its own"),
        ({"x": torch.zeros(3, 6, device="meta")}, ValueError, r"`x` must hold data"),
    ],
)
def test_bad_step_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"x": torch.zeros(3, 6), "cache": torch.zeros(3, 6, 4), "weight": torch.zeros(6, 4)}
    causal_conv1d_update(**good)
    with pytest.raises(error, match=message):
        causal_conv1d_update(**{**good, **change})


def test_warmup_on_the_cpu() -> None:
    assert cconv.warmup(D=16, device="cpu", bias=True, packed=True) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_warmup_without_a_device() -> None:
    with pytest.raises(RuntimeError, match="nothing warmed, cuda was asked for"):
        cconv.warmup(D=16)

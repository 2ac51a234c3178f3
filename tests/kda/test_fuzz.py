"""Random problems against the recurrence: shapes, lengths, layouts, dtypes, flags, states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_fun.kda import chunk_kda, fused_recurrent_kda
from kernel_fun.kda.reference import recurrent
from kernel_fun.testing import (
    TOLERANCE,
    Case,
    Tolerance,
    assert_close,
    make_upstream,
    poisoned_empty,
    relative_error,
    run,
)

SETTINGS = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any call of chunk_kda small enough for the recurrence."""
    packed = draw(st.booleans())
    length = st.one_of(st.integers(0, 20), st.sampled_from([31, 32, 33, 63, 64, 65, 96, 127, 128, 129]))
    seqlens = tuple(draw(st.lists(length, max_size=5))) if packed else None
    regime = draw(st.sampled_from(["softplus_random", "init_slow", "bounded", "precomputed", "spikes"]))
    dtype = draw(st.sampled_from(FLOATS))
    H = draw(st.integers(1, 3))
    K = draw(st.integers(2, 20))
    return Case(
        regime,
        B=1 if packed else draw(st.integers(0, 3)),
        T=draw(length),
        H=H,
        HV=H * draw(st.integers(1, 3)),
        K=K,
        V=draw(st.integers(1, 20)),
        dtype=dtype,
        g_dtype=draw(st.sampled_from([None, *FLOATS])),
        beta_dtype=draw(st.sampled_from([None, *FLOATS])),
        param_dtype=draw(st.sampled_from([None, *FLOATS])),
        seqlens=seqlens,
        tail=draw(st.integers(0, 3)) if packed else 0,
        l2norm=draw(st.booleans()),
        beta=draw(st.sampled_from(["raw", "sigmoid", "sigmoid2"])),
        A_log=draw(st.booleans()) or regime != "bounded",
        dt_bias=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 1.0, 0.3, -0.5])),
        initial_state=draw(st.booleans()),
        output_final_state=draw(st.booleans()),
        state_v_first=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


LAYOUTS = st.sampled_from(["dense", "transposed", "sliced", "offset", "expanded", "reversed dims"])


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The same values (one row of them, if expanded) in another memory layout."""
    if layout == "transposed" and x.ndim >= 3:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced" and x.ndim >= 1:
        return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
    if layout == "offset":
        return torch.cat((torch.full_like(x.reshape(-1)[:1], torch.nan), x.reshape(-1)))[
            min(1, x.numel()) :
        ].reshape(x.shape)
    if layout == "expanded" and x.ndim >= 3 and x.shape[2]:
        return x[:, :, :1].expand_as(x)
    if layout == "reversed dims":
        order = tuple(reversed(range(x.ndim)))
        return x.permute(order).contiguous().permute(order)
    return x


def with_layouts(data: st.DataObject, x: dict[str, Any]) -> dict[str, Any]:
    return {
        name: lay_out(a, data.draw(LAYOUTS, label=f"layout of {name}"))
        if isinstance(a, Tensor) and a.is_floating_point()
        else a
        for name, a in x.items()
    }


def row_of(name: str, x: dict[str, Any], out: Tensor) -> Tolerance:
    """The limit of the coarsest dtype that took part: of q, k, v or of the result itself."""
    dtype = max((x["q"].dtype, x["k"].dtype, x["v"].dtype, out.dtype), key=eps)
    if dtype == torch.float64 and any(
        isinstance(a, Tensor) and a.dtype != torch.float64 for a in x.values() if a is not None
    ):
        dtype = torch.float32
    return TOLERANCE["kda", name, dtype]


def nudged(x: dict[str, Any]) -> dict[str, Any]:
    """Inputs or upstream gradients changed by up to one rounding: gates as float32, the rest as given."""
    generator = torch.Generator().manual_seed(0)

    def nudge(name: str, a: Tensor) -> Tensor:
        size = eps(torch.float32 if name in ("g", "A_log", "dt_bias", "initial_state", "dht") else a.dtype)
        return a.double() * (1 + size * (torch.rand(a.shape, generator=generator, dtype=torch.float64) - 0.5))

    return {
        name: nudge(name, a) if isinstance(a, Tensor) and a.is_floating_point() else a
        for name, a in x.items()
    }


@SETTINGS
@given(case=cases(), data=st.data())
def test_chunk_kda_is_the_recurrence(case: Case, data: st.DataObject) -> None:
    x = with_layouts(data, case.inputs())
    if case.seqlens is not None and data.draw(st.booleans(), label="int32"):
        x["cu_seqlens"] = x["cu_seqlens"].int()
    x["disable_recompute"] = data.draw(st.booleans(), label="disable_recompute")
    up = with_layouts(data, make_upstream(x))
    used = data.draw(st.sampled_from([tuple(up), ("do",), tuple(up)[-1:]]), label="loss uses")
    up = {name: up[name] for name in used}
    before = {name: a.clone() for name, a in x.items() if isinstance(a, Tensor)}
    ref = run(recurrent, x, **up, double=True)
    with poisoned_empty():
        out = run(chunk_kda, x, **up)
    assert out.keys() == ref.keys()
    limits = {name: row_of(name, x, out[name]) for name in ref}
    if case.dtype != torch.float64:
        # A gradient of a few numbers may be a small difference of large terms: it is then as uncertain
        # as its inputs are. Larger tensors average this out, and the table holds for them as it is.
        moved = run(recurrent, nudged(x), **nudged(up), double=True)
        for name, limit in limits.items():
            uncertainty = relative_error(ref[name], moved[name])
            limits[name] = limit._replace(relative=limit.relative + 4 * uncertainty)
    for name, limit in limits.items():
        assert_close(name, ref[name], out[name], tolerance=limit)
    for name, value in before.items():
        assert torch.equal(x[name].nan_to_num(9.0), value.nan_to_num(9.0)), f"{name} was modified"
        gradient = {"A_log": "dA_log", "dt_bias": "ddt_bias", "initial_state": "dh0"}.get(name, f"d{name}")
        if gradient in out:
            assert out[gradient].dtype == value.dtype
            assert out[gradient].shape == value.shape


@SETTINGS
@given(case=cases(), data=st.data())
def test_fused_recurrent_kda_is_the_recurrence(case: Case, data: st.DataObject) -> None:
    x = with_layouts(data, case.inputs())
    if data.draw(st.booleans(), label="beta per channel"):
        x["beta"] = x["beta"][..., None] * torch.linspace(0.5, 1.0, case.V or case.K).to(x["beta"].dtype)
    ref_o, ref_ht = recurrent(**x)
    with poisoned_empty():
        o, ht = fused_recurrent_kda(**x)
    assert_close("o", ref_o, o, tolerance=row_of("o", x, o))
    if ref_ht is None:
        assert ht is None
    else:
        assert_close("ht", ref_ht, ht, tolerance=row_of("ht", x, ht))


@SETTINGS
@given(data=st.data())
def test_a_prefix_never_moves(data: st.DataObject) -> None:
    """Cut a random problem at a random token: the outputs before the cut keep their bits."""
    T = data.draw(st.integers(2, 150), label="T")
    P = data.draw(st.integers(1, T - 1), label="P")
    dtype = data.draw(st.sampled_from(FLOATS), label="dtype")
    regime = data.draw(st.sampled_from(["bounded", "spikes", "softplus_random"]), label="regime")
    x = Case(regime, T=T, K=8, V=4, dtype=dtype, seed=data.draw(st.integers(0, 99), label="seed")).inputs()
    o, _ = chunk_kda(**x)
    cut, _ = chunk_kda(**x | {name: x[name][:, :P] for name in ("q", "k", "v", "g", "beta")})
    assert torch.equal(o[:, :P], cut)


@pytest.mark.parametrize("seed", range(3))
def test_many_short_sequences(backend: str, seed: int) -> None:
    """127 sequences of 0 to 3 tokens and a few longer ones: scratch is sized by padded chunks."""
    lengths = torch.randint(0, 4, (127,), generator=torch.Generator().manual_seed(seed)).tolist()
    lengths[seed::40] = [16, 64, 80, 129][: len(lengths[seed::40])]
    x = Case(
        "precomputed",
        seqlens=tuple(lengths),
        H=1,
        K=8,
        V=4,
        initial_state=True,
        output_final_state=True,
        seed=seed,
    ).inputs()
    up = make_upstream(x)
    ref, out = run(recurrent, x, **up, double=True), run(chunk_kda, x, **up)
    for name in ref:
        assert_close(name, ref[name], out[name])

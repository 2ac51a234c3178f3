"""The oracle against finite differences, its chunk form, and what the definition says directly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_fun.kda import reference
from kernel_fun.kda.reference import chunked, recurrent
from kernel_fun.testing import REGIMES, assert_close, make_inputs, make_upstream, run

F64 = torch.float64
FORMS = pytest.mark.parametrize("form", [recurrent, chunked])


def tiny(regime: str, **fields: Any) -> dict[str, Any]:
    fields = {"T": 5, "H": 1, "HV": 2, "K": 3, "V": 2, "dtype": F64} | fields
    return make_inputs(regime, initial_state=True, output_final_state=True, **fields)


def leaves(x: dict[str, Any], *, without: tuple[str, ...] = ()) -> tuple[list[str], list[Tensor]]:
    names = [n for n, a in x.items() if isinstance(a, Tensor) and a.is_floating_point()]
    names = [name for name in names if name not in without]
    return names, [x[name].detach().clone().requires_grad_() for name in names]


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("beta", ["raw", "sigmoid", "sigmoid2"])
def test_gradients_are_finite_differences(regime: str, beta: str) -> None:
    x = tiny(regime, beta=beta, l2norm=beta != "raw", state_v_first=beta == "sigmoid")
    names, tensors = leaves(x, without=("g",) if regime == "spikes" else ())

    def function(*values: Tensor) -> Any:
        return recurrent(**x | dict(zip(names, values, strict=True)))

    assert torch.autograd.gradcheck(function, tensors)


def test_gradients_are_finite_differences_when_packed() -> None:
    x = tiny("bounded", seqlens=(2, 0, 3), tail=1, A_log=False)
    names, tensors = leaves(x)
    assert torch.autograd.gradcheck(
        lambda *values: recurrent(**x | dict(zip(names, values, strict=True))), tensors
    )


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seqlens", [None, (0, 5, 64, 0, 1, 130, 0)])
@pytest.mark.parametrize("HV", [2, 4])
def test_both_forms_are_one_function(regime: str, seqlens: Any, HV: int) -> None:
    x = make_inputs(
        regime,
        B=1 if seqlens else 2,
        T=70,
        HV=HV,
        K=8,
        V=12,
        seqlens=seqlens,
        tail=3,
        dtype=F64,
        initial_state=True,
        output_final_state=True,
        state_v_first=HV == 4,
    )
    up = make_upstream(x)
    tokens, chunks = run(recurrent, x, **up), run(chunked, x, **up)
    assert tokens.keys() == chunks.keys()
    for name in tokens:
        assert_close(name, tokens[name], chunks[name])
    short = run(chunked, x | {"chunk_size": 32}, **up)
    for name in tokens:
        assert_close(name, tokens[name], short[name])


def test_two_tokens_by_hand() -> None:
    """K = V = 1, so that every step is arithmetic on single numbers."""
    one = torch.ones(1, 2, 1, 1, dtype=F64)
    o, ht = recurrent(
        q=one,
        k=one,
        v=torch.tensor([3.0, 5.0], dtype=F64).reshape(1, 2, 1, 1),
        g=torch.tensor([0.5, 0.25], dtype=F64).log().reshape(1, 2, 1, 1),
        beta=torch.tensor([0.5, 1.0], dtype=F64).reshape(1, 2, 1),
        initial_state=torch.full((1, 1, 1, 1), 2.0, dtype=F64),
        scale=10.0,
        output_final_state=True,
    )
    # S = 0.5 * 2 = 1; u = 0.5 (3 - 1) = 1; S = 2.   Then S = 0.25 * 2; u = 5 - 0.5; S = 5.
    assert o.flatten().tolist() == [20.0, 50.0]
    assert ht.item() == 5.0


@FORMS
@pytest.mark.parametrize("dead", [-math.inf, -1000.0])
def test_a_dead_gate_has_gradient_zero(form: Any, dead: float) -> None:
    x = tiny("precomputed", T=8)
    x["g"][:, 3] = dead
    x["g"][:, 5, :, 1] = dead
    out = run(form, x, **make_upstream(x))
    for name, value in out.items():
        assert value.isfinite().all(), name
    assert not out["dg"][:, 3].any()
    assert not out["dg"][:, 5, :, 1].any()
    assert out["dg"][:, 5, :, 0].all()


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("raw", [math.inf, 1e4, -1e4, -math.inf])
def test_a_saturated_raw_gate_has_gradient_zero(lower_bound: float | None, raw: float) -> None:
    x = tiny("softplus_random") | {"lower_bound": lower_bound}
    x["g"][:, 2] = raw
    out = run(recurrent, x, **make_upstream(x))
    for name, value in out.items():
        assert value.isfinite().all(), name
    assert not out["dg"][:, 2].any()


@pytest.mark.parametrize("raw", [-40.0, -18.0, -1.0, 0.0, 19.9, 20.1, 700.0])
def test_softplus_is_accurate_over_its_whole_range(raw: float) -> None:
    g = reference.log_gate(torch.full((1, 1, 1, 1), raw, dtype=F64), torch.zeros(1), None, None)
    expected = -(raw + math.log1p(math.exp(-raw)) if raw > 0 else math.log1p(math.exp(raw)))
    assert math.isclose(g.item(), expected, rel_tol=1e-15)


@FORMS
def test_rows_outside_every_sequence_are_zero_whatever_they_hold(form: Any) -> None:
    x = tiny("softplus_random", seqlens=(2, 3), tail=2)
    up = make_upstream(x)
    clean = run(form, x, **up)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 5:] = math.nan
    dirty = run(form, x, **up)
    for name in clean:
        assert torch.equal(clean[name], dirty[name]), name
    assert not dirty["o"][:, 5:].any()
    assert not dirty["dq"][:, 5:].any()


@FORMS
def test_a_sequence_is_what_it_is_alone(form: Any) -> None:
    x = tiny("init_slow", seqlens=(70, 0, 3), state_v_first=True)
    up = make_upstream(x)
    packed = run(form, x, **up)
    for n, rows in enumerate((slice(0, 70), slice(70, 70), slice(70, 73))):
        part = {k: x[k][:, rows] for k in ("q", "k", "v", "g", "beta")}
        part |= {"initial_state": x["initial_state"][n : n + 1], "cu_seqlens": None}
        alone = run(form, x | part, do=up["do"][:, rows], dht=up["dht"][n : n + 1])
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert_close(name, packed[name][:, rows], alone[name])
        for name in ("ht", "dh0"):
            assert_close(name, packed[name][n : n + 1], alone[name])


@FORMS
def test_state_layouts_are_transposes(form: Any) -> None:
    x = tiny("bounded", T=70)
    up = make_upstream(x)
    k_first = run(form, x, **up)
    flipped = {"initial_state": x["initial_state"].mT, "state_v_first": True}
    v_first = run(form, x | flipped, do=up["do"], dht=up["dht"].mT)
    for name in k_first:
        mine = v_first[name].mT if name in ("ht", "dh0") else v_first[name]
        assert_close(name, k_first[name], mine)


def test_a_write_strength_per_value_channel_is_that_many_columns() -> None:
    x = tiny("precomputed", beta="raw", HV=1, H=1, V=4)
    beta = torch.rand(1, 5, 1, 4, dtype=F64)
    o, ht = recurrent(**x | {"beta": beta})
    for j in range(4):
        column = {"v": x["v"][..., j : j + 1], "beta": beta[..., j]}
        column |= {"initial_state": x["initial_state"][..., j : j + 1]}
        oj, htj = recurrent(**x | column)
        assert_close("o", oj, o[..., j : j + 1])
        assert_close("ht", htj, ht[..., j : j + 1])
    with pytest.raises(ValueError, match="`beta` must be"):
        chunked(**x | {"beta": beta})


@FORMS
def test_intermediate_states_are_the_states_at_chunk_starts(form: Any) -> None:
    x = make_inputs(T=130, B=2, K=8, V=4, dtype=F64, initial_state=True, output_final_state=True)
    *_, h = form(**x, return_intermediate_states=True)
    assert h.shape == (2, 3, 2, 8, 4)
    assert torch.equal(h[:, 0], x["initial_state"])
    for c, last in ((1, 64), (2, 128)):
        part = {k: x[k][:, :last] for k in ("q", "k", "v", "g", "beta")}
        assert_close("h", form(**x | part)[1], h[:, c])
    packed = make_inputs(seqlens=(65, 0, 3), K=8, V=4, dtype=F64, state_v_first=True)
    *_, h = form(**packed, return_intermediate_states=True, chunk_size=32)
    assert h.shape == (1, 4, 2, 4, 8)


@FORMS
def test_every_float_dtype_is_computed_in_float64(form: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = make_inputs("bounded", T=9, dtype=dtype, initial_state=True, output_final_state=True)
        wide = {n: a.double() if isinstance(a, Tensor) else a for n, a in x.items()}
        for a, b in zip(form(**x), form(**wide), strict=True):
            assert a.dtype == F64
            assert torch.equal(a, b)


@FORMS
def test_keywords_are_those_of_chunk_kda(form: Any) -> None:
    x = tiny("bounded")
    o, ht = form(**x)
    idle = {"safe_gate": True, "disable_recompute": True, "use_graph": True, "max_num_seqs": 1}
    o2, ht2 = form(**x, **idle, cu_seqlens_cpu=None)
    assert torch.equal(o, o2)
    assert torch.equal(ht, ht2)
    assert form(**x | {"output_final_state": False})[1] is None
    with pytest.raises(TypeError, match="chunk_szie"):
        form(**x, chunk_szie=64)


@FORMS
@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0)])
def test_empty_batches_and_empty_rows(form: Any, B: int, T: int) -> None:
    x = tiny("bounded", B=B, T=T)
    o, ht = form(**x)
    assert o.shape == (B, T, 2, 2)
    assert torch.equal(ht, x["initial_state"]) or T > 0
    assert ht.shape == (B, 2, 3, 2)

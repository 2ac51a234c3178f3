"""The decoding form: the recurrence itself, and the exchange of states with the chunk form."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_fun.kda import chunk_kda, fused_recurrent_kda
from kernel_fun.kda.reference import recurrent
from kernel_fun.testing import REGIMES, assert_close, make_inputs, poisoned_empty

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOKENS = ("q", "k", "v", "g", "beta")


def problem(regime: str = "bounded", **fields: Any) -> dict[str, Any]:
    fields = {"T": 20, "HV": 4, "K": 8, "V": 12, "initial_state": True} | fields
    return make_inputs(regime, output_final_state=True, **fields)


def check(x: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    o, ht = fused_recurrent_kda(**x)
    ref_o, ref_ht = recurrent(**x)
    assert_close("o", ref_o, o, dtype=dtype)
    assert_close("ht", ref_ht, ht, dtype=dtype)
    return o, ht


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlens", [None, (7, 0, 12, 1)], ids=["dense", "packed"])
@pytest.mark.parametrize("regime", REGIMES)
def test_it_is_the_recurrence(backend: str, regime: str, seqlens: Any, dtype: torch.dtype) -> None:
    for l2norm, beta, v_first, scale in itertools.product(
        (False, True), ("raw", "sigmoid", "sigmoid2"), (False, True), (None, 0.3)
    ):
        fields = {"l2norm": l2norm, "beta": beta, "state_v_first": v_first, "scale": scale}
        x = problem(regime, B=1 if seqlens else 2, seqlens=seqlens, tail=2, dtype=dtype, **fields)
        o, ht = check(x, dtype)
        assert o.dtype == x["v"].dtype
        assert ht.dtype == x["initial_state"].dtype
        if seqlens:
            assert not o[:, 20:].any()
            assert torch.equal(ht[1], x["initial_state"][1]), "an empty sequence passes its state on"


@pytest.mark.parametrize("fields", [{"dt_bias": False}, {"A_log": False}, {"A_log": False, "dt_bias": False}])
def test_gate_parameters_are_optional(backend: str, fields: dict[str, bool]) -> None:
    check(problem("bounded", **fields), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("HV", [2, 4])
def test_a_write_strength_per_value_channel(backend: str, HV: int, dtype: torch.dtype) -> None:
    for beta in ("raw", "sigmoid", "sigmoid2"):
        x = problem(beta=beta, HV=HV, dtype=dtype)
        x["beta"] = torch.rand(1, 20, HV, 12).to(dtype)
        check(x, dtype)
        same = x["beta"][..., :1]
        per_channel, _ = fused_recurrent_kda(**x | {"beta": same.expand(1, 20, HV, 12)})
        per_head, _ = fused_recurrent_kda(**x | {"beta": same[..., 0]})
        assert_close("o", per_head.double(), per_channel, dtype=dtype)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("cut", [(1, 2), (5, 6), (63, 64), (64, 65), (60, 100), (65, 130), (0, 130)])
@pytest.mark.parametrize("v_first", [False, True])
def test_states_pass_between_the_forms_at_any_token(
    backend: str, regime: str, cut: tuple[int, int], v_first: bool
) -> None:
    """chunk, then recurrent, then chunk equals one chunk call, in float64 to rounding."""
    x = problem(regime, T=130, K=8, dtype=torch.float64, state_v_first=v_first)
    o, ht = chunk_kda(**x)
    parts: list[Tensor] = []
    state = x["initial_state"]
    for (first, last), op in zip(
        ((0, cut[0]), cut, (cut[1], 130)), (chunk_kda, fused_recurrent_kda, chunk_kda), strict=True
    ):
        part = x | {name: x[name][:, first:last] for name in TOKENS}
        out, state = op(**part | {"initial_state": state})
        parts.append(out)
    assert_close("o", o, torch.cat(parts, 1))
    assert_close("ht", ht, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_per_token_is_one_call(backend: str, dtype: torch.dtype) -> None:
    """To the bit: a decoder's steps against the same tokens at once."""
    x = problem("softplus_random", B=2, T=9, dtype=dtype)
    whole, final = fused_recurrent_kda(**x)
    state, steps = x["initial_state"], []
    for t in range(9):
        step = x | {name: x[name][:, t : t + 1] for name in TOKENS}
        out, state = fused_recurrent_kda(**step | {"initial_state": state})
        steps.append(out)
    assert torch.equal(torch.cat(steps, 1), whole)
    assert torch.equal(state, final)


def test_it_reads_and_returns_states_and_modifies_nothing(backend: str) -> None:
    x = problem()
    before = {name: a.clone() for name, a in x.items() if isinstance(a, Tensor)}
    o, ht = fused_recurrent_kda(**x)
    ht.fill_(7.0)
    o.fill_(7.0)
    for name, value in before.items():
        assert torch.equal(x[name], value), name
    none, _ = fused_recurrent_kda(**x | {"initial_state": None})
    zero, _ = fused_recurrent_kda(**x | {"initial_state": torch.zeros_like(x["initial_state"])})
    assert torch.equal(none, zero)
    assert fused_recurrent_kda(**x | {"output_final_state": False})[1] is None


def test_it_records_no_gradient(backend: str) -> None:
    x = problem()
    for name in TOKENS:
        x[name].requires_grad_()
    o, ht = fused_recurrent_kda(**x)
    assert not o.requires_grad
    assert not ht.requires_grad


@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0)])
def test_nothing_in_nothing_out(backend: str, B: int, T: int) -> None:
    x = problem(B=B, T=T)
    o, ht = fused_recurrent_kda(**x)
    assert o.shape == x["v"].shape
    assert torch.equal(ht, x["initial_state"])
    ht.fill_(7.0)
    assert not (x["initial_state"] == 7.0).any(), "the state of no token must be a copy"


def test_mixed_dtypes_and_strides(backend: str) -> None:
    x = problem(T=8)
    x["q"], x["g"] = x["q"].bfloat16(), x["g"].double()
    x["v"] = x["v"].transpose(1, 3).contiguous().transpose(1, 3).half()
    x["beta"] = x["beta"][:, :1].expand(1, 8, 4)
    o, ht = fused_recurrent_kda(**x)
    ref_o, ref_ht = recurrent(**x)
    assert o.dtype == torch.float16
    assert_close("o", ref_o, o, dtype=torch.float16)
    assert_close("ht", ref_ht, ht, dtype=torch.bfloat16)


def test_poisoned_allocations_change_no_bit(backend: str) -> None:
    x = problem("spikes", seqlens=(5, 0, 3), tail=2)
    clean = fused_recurrent_kda(**x)
    with poisoned_empty():
        poisoned = fused_recurrent_kda(**x)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a, b)


def test_autocast_narrows_nothing(backend: str) -> None:
    x = problem()
    o, ht = fused_recurrent_kda(**x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o2, ht2 = fused_recurrent_kda(**x)
    assert torch.equal(o, o2)
    assert torch.equal(ht, ht2)


def test_the_deprecated_name_of_the_layout_works(backend: str) -> None:
    x = problem(state_v_first=True)
    o, ht = fused_recurrent_kda(**x)
    del x["state_v_first"]
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        o2, ht2 = fused_recurrent_kda(**x, transpose_state_layout=True)
    assert torch.equal(o, o2)
    assert torch.equal(ht, ht2)


def test_a_nan_stays_in_its_sequence(backend: str) -> None:
    x = problem("precomputed", seqlens=(5, 3, 4))
    clean, clean_ht = fused_recurrent_kda(**x)
    x["v"][:, 6], x["initial_state"][1] = torch.nan, torch.nan
    o, ht = fused_recurrent_kda(**x)
    assert o[:, 5:8].isnan().any()
    for part in (slice(0, 5), slice(8, 12)):
        assert torch.equal(clean[:, part], o[:, part])
    assert torch.equal(clean_ht[[0, 2]], ht[[0, 2]])

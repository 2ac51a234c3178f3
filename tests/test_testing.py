"""The tools that judge: errors must fail, poisoned reads must show, inputs must be repeatable."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from kernel_fun import testing
from kernel_fun.testing import TOLERANCE, Tolerance, assert_close

REF = torch.linspace(-1.0, 1.0, 1000, dtype=torch.float64)
OUTPUTS = ("o", "ht", "h", "dq", "dk", "dv", "dh0", "dg", "dbeta", "dA_log", "ddt_bias")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OUTPUTS)
def test_just_inside_passes_and_just_outside_fails(name: str, dtype: torch.dtype) -> None:
    limit = TOLERANCE["kda", name, dtype]
    assert_close(name, REF, REF * (1 + 0.9 * limit.relative), dtype=dtype)
    with pytest.raises(AssertionError, match=rf"^{name}: relative error .*worst at \[\d+\]"):
        assert_close(name, REF, REF * (1 + 1.1 * limit.relative), dtype=dtype)
    assert limit.why


def test_the_table_is_frozen_and_has_no_other_row() -> None:
    assert set(TOLERANCE) == {("kda", name, dtype) for name in OUTPUTS for dtype in DTYPES}
    with pytest.raises(TypeError):
        TOLERANCE["kda", "o", torch.float32] = Tolerance(1.0, 1.0, "loose")  # type: ignore[index]
    with pytest.raises(KeyError):
        assert_close("dz", REF, REF)


def test_one_wrong_element_of_many_fails() -> None:
    out = REF.clone()
    out[17] += 1e-3
    with pytest.raises(AssertionError, match=r"worst at \[17\]"):
        assert_close("o", REF, out, dtype=torch.float32)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_fails_however_small_the_rest(bad: float) -> None:
    out = torch.zeros(4)
    out[2] = bad
    with pytest.raises(AssertionError, match=r"1 of 4 values are not finite, first at \[2\]"):
        assert_close("o", torch.zeros(4), out)
    with pytest.raises(ValueError, match="reference is not finite"):
        assert_close("o", out, torch.zeros(4))


def test_a_reference_of_zeros_is_compared_absolutely() -> None:
    limit = TOLERANCE["kda", "dg", torch.float32].absolute
    assert_close("dg", torch.zeros(4), torch.full((4,), limit / 2))
    with pytest.raises(AssertionError):
        assert_close("dg", torch.zeros(4), torch.full((4,), limit * 2))


def test_shapes_must_agree_even_where_they_broadcast() -> None:
    with pytest.raises(AssertionError, match=r"shape must be \[1000\], got \[1, 1000\]"):
        assert_close("o", REF, REF[None])


def test_errors_of_empty_tensors_are_zero() -> None:
    empty = torch.zeros(0, 3)
    assert testing.relative_error(empty, empty) == testing.max_error(empty, empty) == 0.0
    assert testing.relative_error(torch.zeros(2), torch.ones(2)) == math.inf


def test_poisoned_memory_is_nan_inside_and_restored_after() -> None:
    originals = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
    like = torch.zeros(3, dtype=torch.bfloat16)
    with testing.poisoned_empty():
        for x in (
            torch.empty(3),
            torch.empty(3, dtype=torch.float64),
            torch.empty_like(like),
            torch.empty_strided((3,), (2,)),
            like.new_empty(2),
            like.new_empty_strided((2,), (1,)),
        ):
            assert x.isnan().all()
        assert torch.empty(3, dtype=torch.int64).dtype == torch.int64
        assert not torch.zeros(3).isnan().any()
        assert torch.empty(3, requires_grad=True).isnan().all()
    now = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
    assert now == originals
    with pytest.raises(RuntimeError, match="inside"), testing.poisoned_empty():
        raise RuntimeError("inside")
    assert torch.empty is originals[0]


@pytest.mark.parametrize("regime", testing.REGIMES)
def test_inputs_are_repeatable_and_of_their_regime(regime: str) -> None:
    fields = {"T": 200, "HV": 4, "seed": 3, "initial_state": True, "output_final_state": True}
    x, again = (testing.make_inputs(regime, **fields) for _ in range(2))
    other = testing.make_inputs(regime, **fields | {"seed": 4})
    assert x["q"].shape == (1, 200, 2, 16)
    assert x["g"].shape == (1, 200, 4, 16)
    assert x["initial_state"].shape == (1, 4, 16, 16)
    for name, value in x.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, again[name])
            assert not torch.equal(value, other[name])
    assert x.get("use_gate_in_kernel", False) == ("A_log" in x)
    assert (x.get("lower_bound") == -5.0) == (regime == "bounded")
    if "A_log" not in x:
        assert (x["g"] <= 0).all()
        assert (x["g"] == -math.inf).any() == (x["g"] == -1000).any() == (regime == "spikes")
    up = testing.make_upstream(x)
    assert up["do"].shape == (1, 200, 4, 16)
    assert up["dht"].shape == (1, 4, 16, 16)


def test_inputs_packed_with_a_tail_and_states_v_first() -> None:
    x = testing.make_inputs(seqlens=(3, 0, 4), tail=2, K=8, V=4, initial_state=True, state_v_first=True)
    assert x["v"].shape == (1, 9, 2, 4)
    assert x["cu_seqlens"].tolist() == [0, 3, 3, 7]
    assert x["initial_state"].shape == (3, 2, 4, 8)
    assert "dht" not in testing.make_upstream(x)


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"regime": "wild"}, "regime"),
        ({"beta": "tanh"}, "beta"),
        ({"seqlens": (1, 2), "B": 2}, "B"),
        ({"regime": "init_slow", "A_log": False}, "A_log"),
    ],
)
def test_a_case_that_cannot_be_is_refused(fields: dict[str, object], argument: str) -> None:
    with pytest.raises(ValueError, match=rf"^`{argument}` must be .* got"):
        testing.make_inputs(**fields)


def test_run_names_every_gradient_and_shares_the_memory_of_its_inputs() -> None:
    seen: dict[str, torch.Tensor] = {}

    def op(q: torch.Tensor, A_log: torch.Tensor, flag: bool) -> tuple[torch.Tensor, torch.Tensor]:
        seen.update(q=q, A_log=A_log)
        assert flag
        return q * 2, (3 * q).sum(0)

    q, A_log = torch.randn(4, 3).t(), torch.ones(2)
    ones = torch.ones(3, 4)
    out = testing.run(op, {"q": q, "A_log": A_log, "flag": True}, do=ones, dht=torch.ones(4))
    assert seen["q"].data_ptr() == q.data_ptr()
    assert seen["q"].stride() == q.stride()
    assert torch.equal(out["dq"], 5 * ones)
    assert torch.equal(out["dA_log"], torch.zeros(2))
    wide = testing.run(op, {"q": q, "A_log": A_log, "flag": True}, do=ones, double=True)
    assert wide["o"].dtype == wide["dq"].dtype == torch.float64
    assert torch.equal(wide["dq"], 2 * ones.double())


def test_importing_the_package_does_not_import_the_tools() -> None:
    code = "import sys, kernel_fun; print('kernel_fun.testing' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"

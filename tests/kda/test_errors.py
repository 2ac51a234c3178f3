"""Bad input: one sentence with the argument, what is expected and what was given, before any work.

Where fla-core raises too, the error is also of fla's type and matches what fla's users match.
"""

from __future__ import annotations

import inspect
import re
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernel_fun.kda import chain, chunk_kda, fused_recurrent_kda
from kernel_fun.kda.call import ContractError, ContractTypeError
from kernel_fun.testing import make_inputs

CU = torch.tensor([0, 3, 8])
GATE = {"use_gate_in_kernel": True}


class Bad(NamedTuple):
    """One mistake: what it changes in a good call, what must be raised, what the message must say."""

    change: dict[str, Any]
    raises: type[Exception]
    message: str
    fla: bool = False
    """fla-core raises for it as well."""
    alone: bool = False
    """fused_recurrent_kda has no such argument."""


def good() -> dict[str, Any]:
    """8 tokens, H = 2, HV = 4, K = 6, V = 5; softplus gate parameters ready, gate given."""
    x = make_inputs(T=8, H=2, HV=4, K=6, V=5, l2norm=False, beta="raw")
    return {name: x[name] for name in ("q", "k", "v", "g", "beta")}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD: dict[str, Bad] = {
    # shapes
    "q of rank 3": Bad(
        {"q": zeros(8, 2, 6)}, ValueError, r"`q` must have shape \[B, T, H, K\].*got \[8, 2, 6\]"
    ),
    "k of another shape": Bad(
        {"k": zeros(1, 8, 2, 7)},
        ValueError,
        r"`k` must have shape \[B, T, H, K\] = \[1, 8, 2, 6\], got \[1, 8, 2, 7\].*q and k must have the same shape",
        fla=True,
    ),
    "k of another length": Bad({"k": zeros(1, 7, 2, 6)}, ValueError, r"`k` .* got \[1, 7, 2, 6\]", fla=True),
    "v of another length": Bad({"v": zeros(1, 7, 4, 5)}, ValueError, r"`v` must .* got \[1, 7, 4, 5\]"),
    "v of another batch": Bad({"v": zeros(2, 8, 4, 5)}, ValueError, r"`v` must .* got \[2, 8, 4, 5\]"),
    "g without channels": Bad(
        {"g": zeros(1, 8, 4)},
        ValueError,
        r"`g` must have shape \[B, T, HV, K\] = \[1, 8, 4, 6\], got \[1, 8, 4\]",
        fla=True,
    ),
    "g of the query heads": Bad({"g": zeros(1, 8, 2, 6)}, ValueError, r"`g` must have shape .*got", fla=True),
    "beta of the query heads": Bad(
        {"beta": zeros(1, 8, 2)},
        ValueError,
        r"`beta` must have shape \[B, T, HV\] = \[1, 8, 4\], got \[1, 8, 2\]",
        fla=True,
    ),
    "K above 256": Bad(
        {"q": zeros(1, 8, 2, 257), "k": zeros(1, 8, 2, 257), "g": zeros(1, 8, 4, 257)},
        ValueError,
        r"`q` must have .*256, got K = 257.*only support key headdim <=256",
        fla=True,
    ),
    "value heads no multiple of heads": Bad(
        {"v": zeros(1, 8, 3, 5), "g": zeros(1, 8, 3, 6), "beta": zeros(1, 8, 3)},
        ValueError,
        r"For GVA `v` must have .*multiple of H = 2.*got HV = 3",
        fla=True,
    ),
    # dtypes and types
    "q of integers": Bad({"q": zeros(1, 8, 2, 6, dtype=torch.int64)}, TypeError, r"`q` must be .*got int64"),
    "g of booleans": Bad({"g": zeros(1, 8, 4, 6, dtype=torch.bool)}, TypeError, r"`g` must be .*got bool"),
    "v of complex numbers": Bad(
        {"v": zeros(1, 8, 4, 5, dtype=torch.complex64)}, TypeError, r"`v` must be .*got complex64"
    ),
    "beta a number": Bad({"beta": 0.5}, TypeError, r"`beta` must be a torch.Tensor, got float"),
    "q None": Bad({"q": None}, TypeError, r"`q` must be a torch.Tensor, got NoneType"),
    "g on another device": Bad(
        {"g": torch.zeros(1, 8, 4, 6, device="meta")},
        ValueError,
        r"`g` must be on the device of `q`, cpu, got meta",
    ),
    "scale a tensor": Bad({"scale": torch.ones(2)}, TypeError, r"`scale` must be a number, got Tensor"),
    "scale beyond float32": Bad(
        {"scale": 1e39}, ValueError, r"`scale` must be finite in float32, got 1e\+39"
    ),
    "lower bound beyond float32": Bad(
        GATE | {"A_log": zeros(4), "lower_bound": -1e39},
        ValueError,
        r"`lower_bound` must be finite .*got -1e\+39",
    ),
    "max_num_seqs a word": Bad(
        {"max_num_seqs": "2"}, TypeError, r"`max_num_seqs` must be an int, got str", alone=True
    ),
    "scale a word": Bad({"scale": "1"}, TypeError, r"`scale` must be a number, got str"),
    # states
    "state in bfloat16": Bad(
        {"initial_state": zeros(1, 4, 6, 5, dtype=torch.bfloat16)},
        TypeError,
        r"initial_state must be in float32\..*got bfloat16",
        fla=True,
    ),
    "state in float64 of a float32 call": Bad(
        {"initial_state": zeros(1, 4, 6, 5, dtype=torch.float64)}, TypeError, r"initial_state.*got float64"
    ),
    "state transposed": Bad(
        {"initial_state": zeros(1, 4, 5, 6)},
        ValueError,
        r"`initial_state` must have shape \[N, HV, K, V\] = \[1, 4, 6, 5\], got \[1, 4, 5, 6\]",
    ),
    "state not transposed": Bad(
        {"initial_state": zeros(1, 4, 6, 5), "state_v_first": True},
        ValueError,
        r"`initial_state` must have shape \[N, HV, V, K\] = \[1, 4, 5, 6\], got \[1, 4, 6, 5\]",
    ),
    "state of the query heads": Bad(
        {"initial_state": zeros(1, 2, 6, 5)}, ValueError, r"`initial_state` must .*got \[1, 2, 6, 5\]"
    ),
    "states for two sequences of one": Bad(
        {"initial_state": zeros(2, 4, 6, 5)}, ValueError, r"`initial_state` must .*got \[2, 4, 6, 5\]"
    ),
    "one state for two packed sequences": Bad(
        {"initial_state": zeros(1, 4, 6, 5), "cu_seqlens": CU},
        ValueError,
        r"number of initial states .* equal to the number of input sequences.*2 rows, got 1",
        fla=True,
    ),
    "both names of the state layout": Bad(
        {"state_v_first": True, "transpose_state_layout": True},
        ValueError,
        r"both `state_v_first` and the deprecated `transpose_state_layout`",
        fla=True,
    ),
    "both names, the old one False": Bad(
        {"state_v_first": True, "transpose_state_layout": False},
        ValueError,
        r"both `state_v_first` and the deprecated `transpose_state_layout`",
        fla=True,
    ),
    # packing
    "packed with a batch of two": Bad(
        {
            "q": zeros(2, 4, 2, 6),
            "k": zeros(2, 4, 2, 6),
            "v": zeros(2, 4, 4, 5),
            "g": zeros(2, 4, 4, 6),
            "beta": zeros(2, 4, 4),
            "cu_seqlens": CU,
        },
        ValueError,
        r"batch size is expected to be 1 rather than 2 when using `cu_seqlens`",
        fla=True,
    ),
    "boundaries past the tokens": Bad(
        {"cu_seqlens": torch.tensor([0, 3, 9])}, ValueError, r"`cu_seqlens` must end within the 8 .*got 9"
    ),
    "boundaries that decrease": Bad(
        {"cu_seqlens": torch.tensor([0, 5, 3, 8])},
        ValueError,
        r"`cu_seqlens` must not decrease, got 5 then 3",
    ),
    "boundaries that start late": Bad(
        {"cu_seqlens": torch.tensor([1, 8])}, ValueError, r"`cu_seqlens` must start at 0, got 1"
    ),
    "boundaries negative": Bad(
        {"cu_seqlens": torch.tensor([0, -1, 8])}, ValueError, r"`cu_seqlens` must not decrease, got 0 then -1"
    ),
    "boundaries of floats": Bad(
        {"cu_seqlens": torch.tensor([0.0, 8.0])},
        TypeError,
        r"`cu_seqlens` must be int64 or int32, got float32",
    ),
    "boundaries a list": Bad(
        {"cu_seqlens": [0, 8]}, TypeError, r"`cu_seqlens` must be a torch.Tensor, got list"
    ),
    "boundaries of rank 2": Bad(
        {"cu_seqlens": torch.tensor([[0, 8]])},
        ValueError,
        r"`cu_seqlens` must have shape \[N\+1\], got \[1, 2\]",
    ),
    "no boundaries": Bad(
        {"cu_seqlens": torch.zeros(0, dtype=torch.int64)}, ValueError, r"`cu_seqlens` must .*got \[0\]"
    ),
    "host boundaries alone": Bad(
        {"cu_seqlens_cpu": CU}, ValueError, r"`cu_seqlens_cpu` must come with `cu_seqlens`", alone=True
    ),
    "host boundaries that differ": Bad(
        {"cu_seqlens": CU, "cu_seqlens_cpu": torch.tensor([0, 4, 8])},
        ValueError,
        r"`cu_seqlens_cpu` must hold the values of `cu_seqlens`",
        alone=True,
    ),
    "host boundaries of another length": Bad(
        {"cu_seqlens": CU, "cu_seqlens_cpu": torch.tensor([0, 8])},
        ValueError,
        r"`cu_seqlens_cpu` must be a CPU tensor of shape \[3\].*got \[2\]",
        alone=True,
    ),
    "graph with more slots than boundaries": Bad(
        {"cu_seqlens": CU, "use_graph": True, "max_num_seqs": 5},
        ValueError,
        r"^`cu_seqlens` must hold exactly max_num_seqs \+ 1 entries = 6 with use_graph \(.*\), got 3$",
        alone=True,
    ),
    "graph with slots counted by a float": Bad(
        {"cu_seqlens": CU, "use_graph": True, "max_num_seqs": 2.0},
        TypeError,
        r"`max_num_seqs` must be an int, got float",
        alone=True,
    ),
    "graph with slots counted by a tensor": Bad(
        {"cu_seqlens": CU, "use_graph": True, "max_num_seqs": torch.tensor(2)},
        TypeError,
        r"`max_num_seqs` must be an int, got Tensor",
        alone=True,
    ),
    # gates
    "gate without A_log or bound": Bad(
        dict(GATE),
        ValueError,
        r"`A_log` must be provided when `use_gate_in_kernel=True`",
        fla=True,
        alone=False,
    ),
    "A_log of K elements": Bad(
        GATE | {"A_log": zeros(6)}, ValueError, r"`A_log` must have HV = 4 elements in one .*got shape \[6\]"
    ),
    "A_log of HV elements in two dimensions": Bad(
        GATE | {"A_log": zeros(2, 2)},
        ValueError,
        r"`A_log` must have HV = 4 elements in one .*got shape \[2, 2\]",
    ),
    **{
        f"dt_bias of shape {list(shape)}": Bad(
            GATE | {"A_log": zeros(4), "dt_bias": zeros(*shape)},
            ValueError,
            rf"`dt_bias` must have shape \[HV\*K\] = \[24\] or \[HV, K\] = \[4, 6\], got {re.escape(str(list(shape)))}",
        )
        for shape in ((4,), (6, 4), (2, 12), (24, 1), (1, 24), (1, 1, 4, 6))
    },
    "A_log of integers": Bad(
        GATE | {"A_log": zeros(4, dtype=torch.int32)}, TypeError, r"`A_log` must be .*got int32"
    ),
    "A_log a number": Bad(GATE | {"A_log": 0.0}, TypeError, r"`A_log` must be a torch.Tensor, got float"),
    "safe gate without bound": Bad(
        GATE | {"A_log": zeros(4), "safe_gate": True},
        ValueError,
        r"`lower_bound` must be specified when `safe_gate=True`",
        fla=True,
        alone=True,
    ),
    "safe gate with a bound too low": Bad(
        GATE | {"A_log": zeros(4), "safe_gate": True, "lower_bound": -6.0},
        ValueError,
        r"`lower_bound` must be in the safe range \[-5, 0\), got -6",
        fla=True,
        alone=True,
    ),
    "safe gate with bound 0": Bad(
        GATE | {"A_log": zeros(4), "safe_gate": True, "lower_bound": 0.0},
        ValueError,
        r"`lower_bound` must be in the safe range \[-5, 0\), got 0",
        fla=True,
        alone=True,
    ),
    "a bound that grows": Bad(
        GATE | {"A_log": zeros(4), "lower_bound": 1.0}, ValueError, r"`lower_bound` must be negative, got 1"
    ),
    "a bound that is a word": Bad(
        GATE | {"A_log": zeros(4), "lower_bound": "-5"}, TypeError, r"`lower_bound` must be a number, got str"
    ),
    "doubled beta without sigmoid": Bad(
        {"allow_neg_eigval": True},
        ValueError,
        r"`allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`",
        fla=True,
    ),
    # modes
    "chunk of 48": Bad(
        {"chunk_size": 48}, ValueError, r"`chunk_size` must be either 32 or 64.*got 48", fla=True, alone=True
    ),
    **{
        f"chunk of {type(size).__name__} 64": Bad(
            {"chunk_size": size},
            TypeError,
            rf"`chunk_size` must be an int, got {type(size).__name__}",
            alone=True,
        )
        for size in (64.0, "64", torch.tensor(64))
    },
    "chunk of True": Bad(
        {"chunk_size": True}, TypeError, r"`chunk_size` must be an int, got bool", alone=True
    ),
    "intermediate states outside inference mode": Bad(
        {"return_intermediate_states": True}, ValueError, r"only allowed in inference mode", alone=True
    ),
    "context parallel without boundaries": Bad(
        {"cp_context": SimpleNamespace(cu_seqlens=None, group=None)},
        ValueError,
        r"cu_seqlens is required for CP",
        fla=True,
        alone=True,
    ),
}


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise RuntimeError("a stage ran on arguments that should have been refused")

    monkeypatch.setattr(chain, "forward", forbidden)


@pytest.mark.parametrize("mistake", BAD)
def test_chunk_kda_refuses(mistake: str, no_work: None) -> None:
    bad = BAD[mistake]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(bad.raises, match=bad.message) as caught:
            chunk_kda(**good() | bad.change)
    assert type(caught.value) in (ContractError, ContractTypeError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mistake", [name for name, bad in BAD.items() if not bad.alone])
def test_fused_recurrent_kda_refuses(mistake: str) -> None:
    bad = BAD[mistake]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(bad.raises, match=bad.message):
            fused_recurrent_kda(**good() | bad.change)


@pytest.mark.parametrize("mistake", [name for name, bad in BAD.items() if bad.fla])
@pytest.mark.filterwarnings("ignore")
def test_our_error_is_also_of_flas_type(mistake: str) -> None:
    """Asked of the installed fla itself, which validates on any machine."""
    kda = pytest.importorskip("fla.ops.kda")
    x = good() | BAD[mistake].change
    with pytest.raises((ValueError, AssertionError), match=r".") as theirs:
        kda.chunk_kda(**x)
    with pytest.raises(type(theirs.value)):
        chunk_kda(**x)


ELSEWHERE = ("k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu")


@pytest.mark.parametrize("op", [chunk_kda, fused_recurrent_kda])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_tensor_on_another_device_is_named_with_both(name: str, op: Any) -> None:
    if op is fused_recurrent_kda and name == "cu_seqlens_cpu":
        pytest.skip("it has no such argument")
    x = good() | {
        "A_log": zeros(4),
        "dt_bias": zeros(24),
        "initial_state": zeros(2, 4, 6, 5),
        "cu_seqlens": CU,
    }
    x |= GATE | ({"cu_seqlens_cpu": CU} if op is chunk_kda else {})
    op(**x)
    with pytest.raises(ContractError, match=rf"`{name}` must be .*(cpu|CPU).*(got|on) meta$"):
        op(**x | {name: x[name].to("meta")})


def test_dt_bias_may_have_heads_and_channels() -> None:
    x = good() | GATE | {"A_log": zeros(4), "dt_bias": torch.randn(4, 6).requires_grad_()}
    flat = x["dt_bias"].detach().flatten().requires_grad_()
    for y in (x, x | {"dt_bias": flat}, x | {"A_log": zeros(1, 1, 4, 1)}):
        chunk_kda(**y)[0].sum().backward()
    assert x["dt_bias"].grad is not None
    assert x["dt_bias"].grad.shape == (4, 6)
    assert flat.grad is not None
    assert torch.equal(x["dt_bias"].grad, 2 * flat.grad.view(4, 6))


def test_intermediate_states_of_a_call_that_keeps_them() -> None:
    message = r"must be used with disable_recompute=False, got True"
    with torch.inference_mode(), pytest.raises(ValueError, match=message) as caught:
        chunk_kda(**good(), return_intermediate_states=True, disable_recompute=True)
    assert isinstance(caught.value, AssertionError)


def test_the_contract_errors_are_what_users_of_fla_catch() -> None:
    assert issubclass(ContractError, ValueError)
    assert issubclass(ContractError, AssertionError)
    assert issubclass(ContractTypeError, TypeError)
    assert issubclass(ContractTypeError, AssertionError)


@pytest.mark.parametrize("op", [chunk_kda, fused_recurrent_kda])
@pytest.mark.parametrize("word", ["safe_gates", "lower_boundd", "use_l2norm", "head_first"])
def test_an_unknown_keyword_is_named(op: Any, word: str) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{word}'"):
        op(**good(), **{word: True})


def test_a_missing_argument_is_named() -> None:
    x = good()
    del x["beta"]
    with pytest.raises(TypeError, match="beta"):
        chunk_kda(**x)
    with pytest.raises(TypeError, match="beta"):
        fused_recurrent_kda(**x)


def test_per_channel_beta_belongs_to_the_recurrent_form() -> None:
    x = good() | {"beta": torch.rand(1, 8, 4, 5)}
    fused_recurrent_kda(**x)
    with pytest.raises(ValueError, match=r"`beta` must have shape \[B, T, HV\] .*got \[1, 8, 4, 5\]"):
        chunk_kda(**x)
    with pytest.raises(ValueError, match=r"`beta` must have shape .*got \[1, 8, 4, 6\]"):
        fused_recurrent_kda(**x | {"beta": torch.rand(1, 8, 4, 6)})


@pytest.mark.parametrize(
    "idle",
    [
        {"A_log": zeros(99)},
        {"dt_bias": zeros(99)},
        {"lower_bound": 7.0},
        {"A_log": None, "dt_bias": None},
        {"chunk_size": 32},
        {"safe_gate": True},
        {"cu_seqlens": CU.int(), "cu_seqlens_cpu": CU},
        {"cu_seqlens": torch.tensor([0])},
        {"scale": 1},
    ],
    ids=lambda idle: "+".join(idle),
)
def test_what_fla_accepts_is_accepted(idle: dict[str, Any]) -> None:
    """Gate parameters are not read, and not judged, where the gate is given."""
    o, ht = chunk_kda(**good(), **idle)
    assert o.shape == (1, 8, 4, 5)
    assert ht is None


def test_positional_calls_bind_as_in_fla() -> None:
    x = good()
    h0 = torch.randn(1, 4, 6, 5)
    by_name = chunk_kda(**x, scale=0.5, initial_state=h0, output_final_state=True)
    by_place = chunk_kda(*x.values(), 0.5, h0, True)
    for a, b in zip(by_name, by_place, strict=True):
        assert torch.equal(a, b)
    A_log, bias = zeros(4), zeros(24)
    by_name = fused_recurrent_kda(**x, A_log=A_log, dt_bias=bias, scale=0.5, use_gate_in_kernel=True)
    by_place = fused_recurrent_kda(*x.values(), A_log, bias, 0.5, None, False, False, True)
    assert torch.equal(by_name[0], by_place[0])


@pytest.mark.parametrize("op", [chunk_kda, fused_recurrent_kda])
@pytest.mark.filterwarnings("ignore")
def test_the_signature_is_flas(op: Any) -> None:
    kda = pytest.importorskip("fla.ops.kda")
    ours = inspect.signature(op).parameters.values()
    theirs = inspect.signature(getattr(kda, op.__name__)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]

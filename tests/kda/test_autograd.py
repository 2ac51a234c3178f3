"""Gradients: right over every combination of flags, of the right dtype and shape; what they keep.

The recurrence in float64 is the truth; finite differences confirm that the backward is that of the
forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernel_fun.kda import chunk_kda
from kernel_fun.kda.reference import recurrent
from kernel_fun.testing import TOLERANCE, Case, assert_close, make_inputs, make_upstream, run

if TYPE_CHECKING:
    from collections.abc import Iterator

F64, F32 = torch.float64, torch.float32

GATES: dict[str, dict[str, Any]] = {
    "given": {"regime": "precomputed"},
    "given-spikes": {"regime": "spikes"},
    "softplus": {"regime": "softplus_random"},
    "softplus-no-bias": {"regime": "softplus_random", "dt_bias": False},
    "bounded": {"regime": "bounded"},
    "bounded-no-A": {"regime": "bounded", "A_log": False},
    "bounded-bare": {"regime": "bounded", "A_log": False, "dt_bias": False},
}
SMALL = {"H": 2, "K": 8, "V": 6}
PACKED = (3, 0, 64, 1, 0)


def float_tensors(x: dict[str, Any]) -> dict[str, Tensor]:
    return {n: a for n, a in x.items() if isinstance(a, Tensor) and a.is_floating_point()}


def upcast(x: dict[str, Any]) -> dict[str, Any]:
    return x | {name: a.double() for name, a in float_tensors(x).items()}


def leaves(x: dict[str, Any]) -> dict[str, Tensor]:
    return {name: a.detach().clone().requires_grad_() for name, a in float_tensors(x).items()}


@pytest.mark.parametrize("HV", [2, 4], ids=["HV=H", "HV=2H"])
@pytest.mark.parametrize("seqlens", [None, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("beta", ["raw", "sigmoid", "sigmoid2"])
@pytest.mark.parametrize("l2norm", [False, True], ids=["given-norm", "l2norm"])
@pytest.mark.parametrize("gate", GATES)
def test_every_flag_agrees_with_the_recurrence(
    backend: str, gate: str, l2norm: bool, beta: str, seqlens: Any, HV: int
) -> None:
    """Every output and gradient, to 1e-12 in float64 and 1e-5 in float32, with and without states."""
    fields = SMALL | GATES[gate]
    case = Case(T=67, HV=HV, seqlens=seqlens, tail=1, l2norm=l2norm, beta=beta, **fields)
    for h0, ht in itertools.product((False, True), repeat=2):
        # The scale multiplies q alone: both values meet every flag, not every combination.
        scale = (None, 0.3)[(h0 + ht + (seqlens is None) + HV // 2) % 2]
        x = dataclasses.replace(
            case, initial_state=h0, output_final_state=ht, scale=scale, seed=4 * h0 + 2 * ht
        ).inputs()
        up = make_upstream(x)
        ref = run(recurrent, x, **up, double=True)
        for v_first in (False, True) if h0 or ht else (False,):
            if v_first:
                x |= {"state_v_first": True}
                x |= {"initial_state": x["initial_state"].mT} if h0 else {}
                up |= {"dht": up["dht"].mT} if ht else {}
                ref |= {name: ref[name].mT for name in ("ht", "dh0") if name in ref}
            for dtype, inputs in ((F64, upcast(x)), (F32, x)):
                out = run(chunk_kda, inputs, **(upcast(up) if dtype == F64 else up))
                assert out.keys() == ref.keys()
                for name in ref:
                    assert_close(name, ref[name], out[name], dtype=dtype)


@pytest.mark.parametrize("regime", ["softplus_random", "init_slow", "bounded", "precomputed"])
@pytest.mark.parametrize(
    "fields",
    [
        {"T": 3, "beta": "raw", "l2norm": False},
        {"T": 3, "HV": 2, "beta": "sigmoid"},
        {"seqlens": (2, 0, 1), "tail": 1, "beta": "sigmoid2", "state_v_first": True, "scale": 0.7},
        {"T": 66, "K": 1, "V": 1},
    ],
    ids=["dense", "GVA", "packed", "two-chunks"],
)
def test_gradients_are_finite_differences(backend: str, regime: str, fields: Any) -> None:
    fields = {"H": 1, "K": 3, "V": 2, "initial_state": True, "output_final_state": True} | fields
    x = make_inputs(regime, dtype=F64, **fields)
    inputs = leaves(x)

    def function(*values: Tensor) -> Any:
        return chunk_kda(**x | dict(zip(inputs, values, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(inputs.values()), fast_mode="T" in fields)


@pytest.mark.parametrize("seqlens", [None, (70, 0, 5)], ids=["dense", "packed"])
def test_the_loss_may_use_o_alone_the_state_alone_or_both(target: Any, seqlens: Any) -> None:
    x = make_inputs(
        "bounded",
        T=75,
        seqlens=seqlens,
        dtype=target.dtype,
        device=target.device,
        initial_state=True,
        output_final_state=True,
    )
    up = make_upstream(x)
    for used in (("do",), ("dht",), ("do", "dht")):
        part = {name: up[name] for name in used}
        ref = run(recurrent, x, **part, double=True)
        out = run(target.op, x, **part)
        for name in ref:
            assert_close(name, ref[name], out[name], dtype=target.dtype)
        if used == ("dht",):
            assert not out["dq"].any(), "the final state does not read q"


@pytest.mark.parametrize("A_shape", [(4,), (1, 1, 4, 1)])
@pytest.mark.parametrize("bias_shape", [(64,), (4, 16)])
@pytest.mark.parametrize("param_dtype", [F32, torch.bfloat16])
def test_each_gradient_has_the_dtype_and_shape_of_its_input(
    target: Any, A_shape: Any, bias_shape: Any, param_dtype: torch.dtype
) -> None:
    x = make_inputs(
        "softplus_random",
        T=66,
        HV=4,
        dtype=target.dtype,
        param_dtype=param_dtype,
        device=target.device,
        initial_state=True,
        output_final_state=True,
    )
    x["A_log"], x["dt_bias"] = x["A_log"].reshape(A_shape), x["dt_bias"].reshape(bias_shape)
    inputs = leaves(x)
    o, ht = target.op(**x | inputs)
    assert o.dtype == target.dtype
    assert ht.dtype == target.wide
    assert o.is_contiguous()
    assert ht.is_contiguous()
    (o.float().sum() + ht.float().sum()).backward()
    for name, a in inputs.items():
        assert a.grad is not None, name
        assert a.grad.dtype == a.dtype, name
        assert a.grad.shape == a.shape, name
        assert a.grad.isfinite().all(), name
        assert a.grad.any(), name


INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


@pytest.mark.parametrize("frozen", INPUTS)
def test_an_input_that_needs_no_gradient_changes_no_other(backend: str, frozen: str) -> None:
    x = make_inputs("bounded", T=70, initial_state=True, output_final_state=True)
    up = make_upstream(x)
    full = run(chunk_kda, x, **up)
    inputs = leaves(x)
    inputs[frozen].requires_grad_(False)
    torch.autograd.backward(chunk_kda(**x | inputs), (up["do"], up["dht"]))
    names = {"A_log": "dA_log", "dt_bias": "ddt_bias", "initial_state": "dh0"}
    for name, a in inputs.items():
        if name == frozen:
            assert a.grad is None
        else:
            assert a.grad is not None
            assert torch.equal(a.grad, full[names.get(name, f"d{name}")]), name


def test_no_input_needs_a_gradient(backend: str) -> None:
    x = make_inputs("bounded", T=70, initial_state=True, output_final_state=True)
    o, ht = chunk_kda(**x)
    assert not o.requires_grad
    assert not ht.requires_grad
    with torch.no_grad():
        quiet, _ = chunk_kda(**x | leaves(x))
    with torch.inference_mode():
        inference, _ = chunk_kda(**x)
    graph, _ = chunk_kda(**x | leaves(x))
    assert not quiet.requires_grad
    assert torch.equal(o, quiet), "no_grad changes the numbers"
    assert torch.equal(o, inference), "inference mode changes the numbers"
    assert torch.equal(o, graph), "recording a graph changes the numbers"


@pytest.mark.parametrize("penalty", ["alone", "added to a loss", "through the upstream"])
def test_double_backward_raises(backend: str, penalty: str) -> None:
    """A gradient penalty must never be silently 0."""
    x = make_inputs(T=5)
    inputs = leaves(x)
    o, _ = chunk_kda(**x | inputs)
    loss = o.square().sum() if penalty == "through the upstream" else o.sum()
    (dq,) = torch.autograd.grad(loss, inputs["q"], create_graph=True)
    total = dq.square().sum() + (loss if penalty == "added to a loss" else 0.0)
    with pytest.raises(RuntimeError, match=r"twice|double backward"):
        total.backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_mode_raises(backend: str) -> None:
    x = make_inputs(T=5)

    def function(q: Tensor) -> Tensor:
        return chunk_kda(**x | {"q": q})[0]

    with pytest.raises((RuntimeError, NotImplementedError), match=r"jvp|forward"):
        torch.func.jvp(function, (x["q"],), (torch.ones_like(x["q"]),))


def test_a_retained_graph_gives_the_same_bits_twice(target: Any) -> None:
    x = make_inputs("bounded", T=130, dtype=target.dtype, initial_state=True, seqlens=(70, 60))
    inputs = leaves(x)
    o, _ = target.op(**x | inputs)
    first = torch.autograd.grad(o.sum(), tuple(inputs.values()), retain_graph=True)
    again = torch.autograd.grad(o.sum(), tuple(inputs.values()))
    for name, a, b in zip(inputs, first, again, strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o.sum(), tuple(inputs.values()))


def test_an_input_changed_before_backward_is_noticed(backend: str) -> None:
    x = make_inputs("bounded", T=70)
    inputs = leaves(x)
    q = inputs["q"] * 1.0
    o, _ = chunk_kda(**x | inputs | {"q": q})
    q.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_boundaries_changed_before_backward_are_noticed(backend: str) -> None:
    """A loader that refills one cu_seqlens buffer must not change the gradients of the last batch: kernels read it."""
    x = make_inputs("bounded", seqlens=(70, 0, 5, 60), initial_state=True)
    up = make_upstream(x)
    cu_seqlens = x["cu_seqlens"].clone()
    o, _ = chunk_kda(**x | leaves(x) | {"cu_seqlens": cu_seqlens})
    cu_seqlens.copy_(torch.tensor([0, 1, 2, 3, 4]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.backward(up["do"])
    refilled = x | {"cu_seqlens": cu_seqlens, "initial_state": x["initial_state"]}
    fresh = x | {"cu_seqlens": cu_seqlens.clone(), "initial_state": x["initial_state"]}
    for a, b in zip(run(chunk_kda, refilled).values(), run(chunk_kda, fresh).values(), strict=True):
        assert torch.equal(a, b), "a boundary table was reused for other boundaries"


@pytest.mark.parametrize("how", ["a view of a buffer", "made in inference mode", "saved as a copy"])
def test_boundaries_that_autograd_cannot_watch_are_read_as_they_were(how: str, backend: str) -> None:
    """Other views of a buffer may be refilled; hooks that copy have what there was in the forward."""
    x = make_inputs("bounded", seqlens=(70, 0, 5, 60), initial_state=True)
    up = make_upstream(x)
    ref = run(chunk_kda, x, **up)
    with torch.inference_mode(how == "made in inference mode"):
        ring = torch.stack((x["cu_seqlens"], x["cu_seqlens"]))
        mine = ring[0] if how == "a view of a buffer" else x["cu_seqlens"].clone()
    inputs = leaves(x)
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)
    with hooks if how == "saved as a copy" else contextlib.nullcontext():
        o, _ = chunk_kda(**x | inputs | {"cu_seqlens": mine})
    with torch.inference_mode(how == "made in inference mode"):
        mine.copy_(torch.tensor([0, 1, 2, 3, 4]))
    o.backward(up["do"])
    for name, leaf in inputs.items():
        grad = {"A_log": "dA_log", "dt_bias": "ddt_bias", "initial_state": "dh0"}.get(name, f"d{name}")
        assert torch.equal(ref[grad], leaf.grad), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(target: Any, reentrant: bool) -> None:
    x = make_inputs(
        "softplus_random",
        T=70,
        dtype=target.dtype,
        device=target.device,
        initial_state=True,
        output_final_state=True,
    )
    up = make_upstream(x)
    plain = run(target.op, x, **up)

    def segment(*values: Tensor) -> Any:
        return target.op(**x | dict(zip(float_tensors(x), values, strict=True)))

    inputs = leaves(x)
    o, ht = checkpoint(segment, *inputs.values(), use_reentrant=reentrant)
    torch.autograd.backward((o, ht), (up["do"], up["dht"]))
    assert torch.equal(o, plain["o"])
    names = {"A_log": "dA_log", "dt_bias": "ddt_bias", "initial_state": "dh0"}
    for name, a in inputs.items():
        assert torch.equal(a.grad, plain[names.get(name, f"d{name}")]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_narrows_nothing(backend: str, dtype: torch.dtype) -> None:
    x = make_inputs("bounded", T=70, initial_state=True, output_final_state=True)
    up = make_upstream(x)
    plain = run(chunk_kda, x, **up)
    inputs = leaves(x)
    with torch.autocast("cpu", dtype=dtype):
        o, ht = chunk_kda(**x | inputs)
        torch.autograd.backward((o, ht), (up["do"], up["dht"]))
    assert torch.equal(o, plain["o"])
    assert torch.equal(ht, plain["ht"])
    assert torch.equal(inputs["k"].grad, plain["dk"])
    assert torch.equal(inputs["g"].grad, plain["dg"])


def test_autocast_around_a_layer(backend: str) -> None:
    """fp32 weights under bf16 autocast hand the op bf16 projections and fp32 parameters."""
    x = make_inputs("bounded", T=65, K=16)
    layer = torch.nn.Linear(32, 32)
    hidden = torch.randn(1, 65, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q = layer(hidden).unflatten(-1, (2, 16))
        assert q.dtype == torch.bfloat16
        o, _ = chunk_kda(**x | {"q": q})
        o.float().sum().backward()
    assert o.dtype == torch.bfloat16
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == F32
    ref = run(recurrent, x | {"q": q.detach()}, double=True)
    assert_close("o", ref["o"], o, dtype=torch.bfloat16)


DTYPE_MIXES = [
    # q, k, v, g, beta, A_log and dt_bias
    ("bfloat16", "float32", "bfloat16", "float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16", "float32", "float32", "bfloat16"),
    ("float32", "bfloat16", "float32", "bfloat16", "bfloat16", "float32"),
    ("float16", "float16", "float16", "float32", "float16", "float32"),
    ("bfloat16", "float16", "float32", "bfloat16", "float32", "bfloat16"),
    ("float32", "float32", "float64", "float32", "float32", "float32"),
]


@pytest.mark.parametrize("mix", DTYPE_MIXES, ids="-".join)
def test_mixed_dtypes(backend: str, mix: tuple[str, ...]) -> None:
    x = make_inputs("softplus_random", T=70, output_final_state=True)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    for name, dtype in zip(names, (*mix, mix[-1]), strict=True):
        x[name] = x[name].to(getattr(torch, dtype))
    up = make_upstream(x)
    out, ref = run(chunk_kda, x, **up), run(recurrent, x, **up, double=True)
    narrow = max((x[n].dtype for n in ("q", "k", "v")), key=lambda d: torch.finfo(d).eps)
    assert out["o"].dtype == x["q"].dtype
    for name in ref:
        row = max((narrow, out[name].dtype), key=lambda d: torch.finfo(d).eps)
        assert_close(name, ref[name], out[name], dtype=row)
    for name in names:
        gradient = out[{"A_log": "dA_log", "dt_bias": "ddt_bias"}.get(name, f"d{name}")]
        assert gradient.dtype == x[name].dtype


@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("regime", ["bounded", "precomputed"])
def test_nothing_in_nothing_out(target: Any, B: int, T: int, regime: str) -> None:
    fields = {"dtype": target.dtype, "initial_state": True, "output_final_state": True}
    x = make_inputs(regime, B=B, T=T, **fields)
    inputs = leaves(x)
    o, ht = target.op(**x | inputs)
    assert o.shape == x["v"].shape
    assert o.dtype == target.dtype
    assert torch.equal(ht, x["initial_state"])
    (o.sum() + 2.0 * ht.sum()).backward()
    for name, a in inputs.items():
        assert a.grad is not None, name
        assert a.grad.shape == a.shape
        if name == "initial_state":
            assert (a.grad == 2.0).all()
        else:
            assert not a.grad.any(), name


def held_tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor reachable from a context attribute through the containers a call is made of."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from held_tensors(item, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from held_tensors(item, seen)
    elif hasattr(value, "__dict__"):
        yield from held_tensors(vars(value), seen)


def saved_bytes(x: dict[str, Any]) -> int:
    """Bytes a call keeps alive for its backward: unique storages, the caller's own included."""
    storages: dict[int, int] = {}

    def pack(a: Tensor) -> Tensor:
        storages[a.untyped_storage().data_ptr()] = a.untyped_storage().nbytes()
        return a

    inputs = leaves(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda a: a):
        o, _ = chunk_kda(**x | inputs)
    for a in held_tensors(vars(o.grad_fn), set()):
        pack(a)
    return sum(storages.values())


def fla_saved_bytes(x: dict[str, Any], *, disable_recompute: bool) -> int:
    """What fla-core 0.6.0 keeps for the same call (its own list, with every tensor at its dtype)."""
    B, T, H, K = x["q"].shape
    HV, V = x["v"].shape[2:]
    io = x["k"].element_size()
    rows, total = B * T * HV, 0
    total += sum(x[name].nbytes for name in ("q", "k", "v", "g", "beta"))
    total += sum(x[name].nbytes for name in ("A_log", "dt_bias", "initial_state") if name in x)
    total += 2 * rows * 64 * io  # Aqk and A
    if x["use_qk_l2norm_in_kernel"]:
        total += 2 * B * T * H * 4
    if x["use_beta_sigmoid_in_kernel"]:
        total += rows * 4
    lengths = [T] * B
    if "cu_seqlens" in x:
        lengths = x["cu_seqlens"].diff().tolist()
        total += 2 * x["cu_seqlens"].nbytes  # boundaries and chunk offsets
        total += sum(-(-n // 64) for n in lengths) * 16  # chunk indices
    if disable_recompute or not x.get("use_gate_in_kernel"):
        total += rows * K * 4  # cumulated gate
    if disable_recompute:
        total += rows * (3 * K + 2 * V) * io  # w, qg, kg, u, v_new
        total += sum(-(-n // 64) for n in lengths) * HV * K * V * io
    return total


@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.parametrize("regime", ["softplus_random", "precomputed"])
@pytest.mark.parametrize(
    "fields",
    [
        {"T": 256, "K": 128, "V": 128},
        {"T": 256, "HV": 4, "K": 32, "V": 64},
        {"T": 100, "B": 3, "K": 16, "beta": "raw", "l2norm": False},
        {"seqlens": (1,) * 20 + (0, 100, 7), "K": 32, "initial_state": True},
    ],
    ids=["dense", "GVA", "short-given", "packed"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
def test_saved_memory_is_at_most_what_fla_saves(
    backend: str, regime: str, fields: Any, dtype: torch.dtype, disable_recompute: bool
) -> None:
    x = make_inputs(regime, dtype=dtype, **fields)
    ours = saved_bytes(x | {"disable_recompute": disable_recompute})
    limit = fla_saved_bytes(x, disable_recompute=disable_recompute)
    assert 0 < ours <= limit, f"{ours} bytes saved, fla saves {limit}"


def test_keeping_the_states_changes_no_bit(target: Any) -> None:
    x = make_inputs(
        "bounded",
        seqlens=(70, 0, 130),
        dtype=target.dtype,
        initial_state=True,
        output_final_state=True,
    )
    up = make_upstream(x)
    lean, kept = (run(target.op, x | {"disable_recompute": keep}, **up) for keep in (False, True))
    for name in lean:
        assert torch.equal(lean[name], kept[name]), name


def test_nothing_outlives_the_graph(backend: str) -> None:
    """No cache holds a tensor: inputs and outputs die with the caller's last reference."""
    alive: list[weakref.ref[Tensor]] = []

    def step(T: int) -> None:
        x = make_inputs("bounded", seqlens=(T, 3), initial_state=True, output_final_state=True)
        inputs = leaves(x)
        o, ht = chunk_kda(**x | inputs)
        (o.sum() + ht.sum()).backward()
        alive.extend(weakref.ref(a) for a in (*inputs.values(), x["cu_seqlens"], o, ht))

    for T in (70, 70, 90):
        step(T)
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def test_the_table_has_the_limits_this_library_promises() -> None:
    for (_, _, dtype), limit in TOLERANCE.items():
        promised = {F64: 1e-12, F32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 5e-3}
        assert limit.relative <= promised[dtype]

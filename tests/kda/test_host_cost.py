"""What a warm call costs the host, in what does not depend on the machine: calls made by our own Python.

On a GPU the kernels of a small problem take less time than the host needs to launch them; then a step lasts as
long as its Python. A call of known facts looks them up, allocates and launches; every check, config and plan
belongs to the first one. The ceilings leave a little room, not enough for a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

pytest.importorskip("cutlass")

from calls import calls_of
from kernel_fun._common import config, notes, support
from kernel_fun._common import device as devices
from kernel_fun._cute import packing
from kernel_fun.kda import chunk_kda
from kernel_fun.kda._kernels.sm90 import (
    bwd_grads,
    bwd_grads_reduce,
    bwd_state,
    fwd_intra,
    fwd_state,
    rows,
    stages,
)
from kernel_fun.kda.known import KNOWN
from kernel_fun.testing import make_inputs

KERNELS = (fwd_intra, fwd_state, bwd_state, bwd_grads, bwd_grads_reduce)
PLANNED = KERNELS[:4]


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """CPU tensors count as an H200's; a launch is recorded instead of made."""
    seen: list[tuple[Any, ...]] = []
    for module in KERNELS:
        record = lambda *args, module=module: seen.append((module, *args))  # noqa: E731
        monkeypatch.setattr(module, "_compile", lambda config, record=record: record)
    monkeypatch.setattr(support, "missing", lambda need: None)
    monkeypatch.setenv(config.KDA_BACKEND.name, "sm90")
    with devices.pretend("sm90"):
        yield seen


def problem(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = dict(T=64, H=2, HV=2, K=128, V=128, dtype=torch.bfloat16)
    return make_inputs("bounded", **(given | changes))


def as_leaves(x: dict[str, Any]) -> dict[str, Any]:
    grad = lambda t: isinstance(t, torch.Tensor) and t.is_floating_point()  # noqa: E731
    return {n: t.detach().requires_grad_() if grad(t) else t for n, t in x.items()}


def forward(x: dict[str, Any]) -> Callable[[], Any]:
    return lambda: chunk_kda(**x)


def backward(x: dict[str, Any]) -> Callable[[], Any]:
    """One backward; a graph is kept for every one that will be asked for."""
    o, _ = chunk_kda(**x)
    leaves = [t for t in x.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    do = torch.ones_like(o)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


@pytest.mark.parametrize(
    ("what", "ceiling"),
    [("inference", (23, 52)), ("training", (34, 58)), ("backward", (62, 80))],
)
def test_a_warm_call_makes_few_calls(what: str, ceiling: tuple[int, int]) -> None:
    x = problem() if what == "inference" else as_leaves(problem())
    step = backward(x) if what == "backward" else forward(x)
    step(), step()
    found = calls_of(step)
    assert 0 < found["python"] <= ceiling[0], found
    assert 0 < found["built in"] <= ceiling[1], found


def test_a_warm_call_prepares_nothing() -> None:
    """Neither with the same tensors nor with others of the same facts."""
    backward(as_leaves(problem()))()
    before = [module.prepare.cache_info() for module in PLANNED]
    assert all(info.misses for info in before)
    backward(as_leaves(problem(seed=1)))()
    assert [module.prepare.cache_info() for module in PLANNED] == before


def described(launch: tuple[Any, ...]) -> list[Any]:
    """The kernel and its arguments, but where memory of its own lies."""
    module, *given = launch
    return [module, *((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in given)]


AGAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "states": {"initial_state": True, "output_final_state": True},
    "v first": {"initial_state": True, "output_final_state": True, "state_v_first": True},
    "a batch": {"B": 3, "T": 100},
    "wide values": {"V": 256, "HV": 4},
    "float32 gates": {"g_dtype": torch.float32, "beta_dtype": torch.float32},
    "given beta, normalised": {"l2norm": False, "beta": "raw"},
    "beside": {"T": 8192, "H": 32, "HV": 32},
    "no tokens": {"T": 0},
}


@pytest.mark.parametrize("form", AGAIN)
@pytest.mark.parametrize("regime", ["bounded", "precomputed"])
def test_a_call_done_again_launches_what_the_first_did(
    form: str, regime: str, launches: list[tuple[Any, ...]]
) -> None:
    x = make_inputs(regime, **{**dict(T=64, H=2, HV=2, K=128, V=128, dtype=torch.bfloat16), **AGAIN[form]})
    parameters = {"A_log": torch.zeros(x["g"].shape[2]), "dt_bias": torch.zeros(x["g"].shape[2:].numel())}
    x |= parameters if regime == "precomputed" else {}  # a gate that is given reads none
    first = chunk_kda(**x)
    made = [*launches]
    assert len(made) == (0 if form == "no tokens" else 2)
    ((kept, _),) = KNOWN._answers.values()
    assert kept.notes["again"] is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "fwd_intra", None)  # it is not asked
        patch.setattr(stages, "fwd_state", None)
        launches.clear()
        second = chunk_kda(**x)
    assert [described(launch) for launch in launches] == [described(launch) for launch in made]
    for before, after in zip(made, launches):
        given = [(t, u) for t, u in zip(before[1:], after[1:]) if isinstance(t, torch.Tensor)]
        ours = {t.data_ptr() for t in x.values() if isinstance(t, torch.Tensor)}
        assert all(t.data_ptr() == u.data_ptr() for t, u in given if t.data_ptr() in ours)
    for a, b in zip(first, second, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("form", ["a graph", "packed", "intermediate states", "states of other strides"])
def test_what_needs_more_than_two_launches_is_not_done_again(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_compile", lambda config: lambda *args: None)
    x = problem()
    if form == "a graph":
        x = as_leaves(x)
    elif form == "packed":
        x |= {"cu_seqlens": torch.tensor([0, 20, 64]), "cu_seqlens_cpu": torch.tensor([0, 20, 64])}
    elif form == "intermediate states":
        x |= {"return_intermediate_states": True}
    else:
        x |= {"initial_state": torch.zeros(1, 2, 128, 256)[..., :128]}
    with torch.inference_mode(form == "intermediate states"):
        results = [chunk_kda(**x) for _ in range(3)]
    assert {len(r) for r in results} == {3 if form == "intermediate states" else 2}
    assert all(r[0].requires_grad == (form == "a graph") for r in results)


def test_a_tangent_is_refused_before_anything_is_launched(launches: list[tuple[Any, ...]]) -> None:
    """No kernel would hand it on; also where the same call was made before without one."""
    x = problem()
    chunk_kda(**x), chunk_kda(**x)
    launches.clear()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x["v"], torch.ones_like(x["v"]))
        with pytest.raises(
            NotImplementedError, match=r"chunk_kda has no forward-mode .*: `v` must carry no tangent"
        ):
            chunk_kda(**{**x, "v": dual})
        assert not launches
        chunk_kda(**x)
    assert len(launches) == 2


def test_other_strides_are_other_facts(launches: list[tuple[Any, ...]]) -> None:
    x = problem()
    wide = torch.randn(1, 64, 2, 256).to(torch.bfloat16)[..., :128]
    for _ in range(2):
        chunk_kda(**x)
        chunk_kda(**{**x, "q": wide})
    flat = [args[0] for module, *args in launches if module is fwd_intra]
    assert [t.stride()[1:] for t in flat] == [(256, 128, 1), (512, 256, 1)] * 2
    assert flat[-1].data_ptr() == wide.data_ptr()


def test_an_address_is_looked_at_in_every_call(launches: list[tuple[Any, ...]]) -> None:
    """The same facts at an address that TMA cannot take: a copy is read."""
    x = problem()
    memory = torch.empty(x["q"].numel() + 8, dtype=torch.bfloat16)
    for shift in (0, 1, 8):
        q = memory[shift : shift + x["q"].numel()].view(x["q"].shape).copy_(x["q"])
        launches.clear()
        chunk_kda(**{**x, "q": q})
        read = [args[0] for _, *args in launches]
        assert [t.data_ptr() == q.data_ptr() for t in read] == [shift != 1] * 2
        assert all(torch.equal(t.view(q.shape), q) for t in read)
    state = torch.zeros(2 * 128 * 128 + 1)
    for shift in (0, 1):
        h0 = state[shift : shift + 2 * 128 * 128].view(1, 2, 128, 128)
        if shift:
            with pytest.raises(ValueError, match="`h0` must begin at a multiple of 16 bytes"):
                chunk_kda(**x, initial_state=h0)
        else:
            chunk_kda(**x, initial_state=h0)


def unpacked_as(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, change)


@pytest.mark.skipif(not rows.LAUNCHES_TAKE_LEAVES, reason="this torch exchanges no tensors in C")
def test_the_exchange_in_c_takes_a_leaf() -> None:
    """What spares a launch a detach for each tensor."""
    leaf = torch.nn.Parameter(torch.zeros(3))
    tvm_ffi = pytest.importorskip("tvm_ffi")
    assert tvm_ffi.get_global_func("testing.echo")(leaf).data_ptr() == leaf.data_ptr()


@pytest.mark.parametrize("aligned", [True, False])
def test_without_it_no_leaf_is_launched(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, aligned: bool
) -> None:
    for module in (rows, stages):
        monkeypatch.setattr(module, "LAUNCHES_TAKE_LEAVES", False)
    x = as_leaves(problem())
    if not aligned:
        memory = torch.zeros(x["q"].numel() + 1, dtype=torch.bfloat16)
        x["q"] = memory[1:].view(x["q"].shape).requires_grad_()
    backward(x)()
    given = [t for _, *args in launches for t in args if isinstance(t, torch.Tensor)]
    assert len(given) > 40
    assert not any(t.requires_grad and t.is_leaf for t in given)


def test_a_backward_sees_what_hooks_made_of_saved_tensors(launches: list[tuple[Any, ...]]) -> None:
    x = as_leaves(problem())
    backward(x)()
    launches.clear()
    with unpacked_as(lambda t: t.mT.contiguous().mT if t.shape == x["v"].shape else t):
        backward(x)()
    (args,) = [args for module, *args in launches if module is bwd_state]
    assert args[0].is_contiguous()
    assert torch.equal(args[0], x["q"])
    with (
        unpacked_as(lambda t: torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)),
        pytest.raises(ValueError, match="`A` must begin at a multiple of 16 bytes"),
    ):
        backward(x)()


def test_a_switch_and_a_bad_call_are_seen_after_a_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = problem()
    for _ in range(2):
        chunk_kda(**x)
        with pytest.raises(TypeError, match="`q` must be a dense tensor, got layout sparse_coo"):
            chunk_kda(**{**x, "q": x["q"].to_sparse()})
        with pytest.raises(ValueError, match="`beta` must have shape"):
            chunk_kda(**{**x, "beta": x["beta"][:, :3]})
    monkeypatch.setenv(config.KDA_BACKEND.name, "eager")
    assert torch.isfinite(chunk_kda(**x)[0]).all()
    monkeypatch.setenv(config.KDA_BACKEND.name, "none")
    with pytest.raises(ValueError, match="must be auto or one of"):
        chunk_kda(**x)


def test_upstream_of_ever_new_strides_keeps_a_bounded_number_of_notes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes, "FEW", 3)
    x = as_leaves(problem())
    for n in range(8):
        o, _ = chunk_kda(**x)
        do = torch.ones(1, 64, 2, 128 + 8 * n, dtype=torch.bfloat16)[..., :128]
        torch.autograd.grad(o, x["q"], do)
    ((kept, _),) = KNOWN._answers.values()
    assert 0 < len(kept.notes._others) <= 3
    for made in (kept.notes, *kept.notes._others.values()):
        assert made
        assert "tensor(" not in repr(list(made.values()))


def moved(x: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    """A tensor's values in memory of these strides, ``offset`` elements into it."""
    size = offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides))
    return x.new_zeros(size).as_strided(shape, strides, offset).copy_(x)


ODDLY: dict[str, dict[str, Any]] = {
    "beta": {"shape": (1, 64, 1), "strides": (64, 1, 64)},
    "A_log": {"shape": (1,), "strides": (8,)},
    "dt_bias": {"shape": (128,), "strides": (1,), "offset": 1},
    "initial_state": {"shape": (1, 1, 128, 128), "strides": (16385, 16384, 128, 1)},
}


@pytest.mark.parametrize("name", ODDLY)
def test_strides_of_one_element_and_a_shifted_bias_are_launched_as_any(
    name: str, launches: list[tuple[Any, ...]]
) -> None:
    """PyTorch calls a tensor contiguous whatever the stride of a dimension of one element."""
    x = problem(H=1, HV=1, initial_state=True, output_final_state=True)
    chunk_kda(**x)
    plain = [described(launch) for launch in launches]
    odd = {**x, name: moved(x[name], **ODDLY[name])}
    for _ in range(3):
        launches.clear()
        chunk_kda(**odd)
        assert [described(launch) for launch in launches] == plain
    taken = [t for launch in launches for t in launch[1:] if isinstance(t, torch.Tensor)]
    assert all(not t.data_ptr() % 8 for t in taken if t.dtype == torch.float32 and t.numel() == 128)


def test_a_forward_is_done_again_after_one_that_was_deterministic(launches: list[tuple[Any, ...]]) -> None:
    x = problem(T=8192, H=32, HV=32)
    chunk_kda(**x)
    torch.use_deterministic_algorithms(True)
    try:
        chunk_kda(**x)
    finally:
        torch.use_deterministic_algorithms(False)
    launches.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "fwd_intra", None)  # it is not asked
        chunk_kda(**x)
    assert len(launches) == 2


@pytest.mark.parametrize(
    "given", [torch.Tensor, type("Shaped", (), {"shape": (1, 4, 1, 64), "stride": (1,)})()]
)
def test_what_looks_like_a_tensor_is_named(given: Any) -> None:
    x = problem()
    with pytest.raises(TypeError, match=r"`q` must be a torch\.Tensor, got"):
        chunk_kda(**{**x, "q": given})

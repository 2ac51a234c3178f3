"""A call seen before takes over its plan and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_fun._common import known
from kernel_fun.kda import chunk_kda, dispatch
from kernel_fun.kda.known import KNOWN
from kernel_fun.testing import make_inputs, make_upstream, run


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every problem that was planned."""
    made: list[Any] = []
    real = dispatch.plan

    def counted(problem: Any, device: Any) -> Any:
        made.append(problem)
        return real(problem, device)

    monkeypatch.setattr(dispatch, "plan", counted)
    return made


def call(**changes: Any) -> Any:
    x = make_inputs("bounded", T=20, seed=changes.pop("seed", 0))
    return chunk_kda(**{**x, **changes})


def test_the_second_call_is_not_planned_and_reads_its_own_tensors(plans: list[Any]) -> None:
    first = call(seed=0)[0]
    second = call(seed=1)[0]
    assert len(plans) == 1
    known.forget()
    assert torch.equal(call(seed=1)[0], second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 1}, {"output_final_state": True}, {"state_v_first": True}, {"lower_bound": -4.0},
        {"disable_recompute": True}, {"use_beta_sigmoid_in_kernel": False}, {"chunk_size": 32}, {"A_log": None},
    ],
    ids=str,
)  # fmt: skip
def test_any_other_argument_is_another_plan(plans: list[Any], changes: dict[str, Any]) -> None:
    call()
    want = call(**changes)
    assert len(plans) == 2
    call()
    found = call(**changes)
    assert torch.equal(found[0], want[0])
    assert (found[1] is None) == (want[1] is None)


def test_true_is_not_one(plans: list[Any]) -> None:
    call(scale=1)
    call(scale=1.0)
    with pytest.raises(TypeError, match="`scale`"):
        call(scale=True)


def test_gradients_and_switches_are_part_of_it(plans: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_inputs("bounded", T=20)
    up = make_upstream(x)
    chunk_kda(**x)
    want = run(chunk_kda, x, **up)
    assert torch.equal(run(chunk_kda, x, **up)["dg"], want["dg"])
    with torch.no_grad():
        assert not run(chunk_kda, x)["o"].requires_grad
    made = len(plans)
    monkeypatch.setenv("KERNEL_FUN_KDA_DISABLE", "1")
    chunk_kda(**x)
    assert len(plans) == made + 1


def test_what_was_refused_is_refused_again() -> None:
    x = make_inputs("bounded", T=20)
    for _ in range(2):
        with pytest.raises(ValueError, match="`beta`"):
            chunk_kda(**{**x, "beta": x["beta"][:, :3]})


def test_boundaries_on_the_host_are_read_at_every_call() -> None:
    x = make_inputs("bounded", T=20)
    chunk_kda(**x, cu_seqlens=torch.tensor([0, 9, 20]))
    with pytest.raises(ValueError, match="`cu_seqlens`"):
        chunk_kda(**x, cu_seqlens=torch.tensor([0, 29, 20]))


class OnADevice(torch.Tensor):
    """Boundaries that the host does not see."""

    is_cpu = False  # pyright: ignore


def test_boundaries_beside_a_plan_are_read_at_every_call(plans: list[Any]) -> None:
    x = make_inputs("bounded", T=20)
    cu = torch.tensor([0, 9, 20]).as_subclass(OnADevice)
    want = chunk_kda(**x, cu_seqlens=cu, cu_seqlens_cpu=torch.tensor([0, 9, 20]))[0]
    again = chunk_kda(**x, cu_seqlens=cu, cu_seqlens_cpu=torch.tensor([0, 9, 20]))[0]
    assert torch.equal(again, want)
    assert len(plans) == 1
    for wrong, message in (([0, 29, 20], "must not decrease"), ([0, 9, 21], "must end within the 20 tokens")):
        with pytest.raises(ValueError, match=f"`cu_seqlens` {message}"):
            chunk_kda(**x, cu_seqlens=cu, cu_seqlens_cpu=torch.tensor(wrong))
    with pytest.raises(ValueError, match="`cu_seqlens_cpu` must be a CPU tensor of shape"):
        chunk_kda(**x, cu_seqlens=cu, cu_seqlens_cpu=torch.tensor([0, 20]))
    ((kept, _),) = KNOWN._answers.values()
    assert not any(isinstance(value, torch.Tensor) for value in vars(kept).values())


def test_ever_new_sizes_keep_a_bounded_number_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "LIMIT", 3)
    for T in range(1, 9):
        x = make_inputs("bounded", T=T)
        chunk_kda(**x)
        assert len(KNOWN) <= 3


def test_no_tensor_is_kept() -> None:
    call()
    ((kept, _),) = KNOWN._answers.values()
    assert not any(isinstance(value, torch.Tensor) for value in vars(kept).values())
    assert not kept.memo
    assert not kept.verbatim


def test_a_copy_of_a_call_shares_no_scratch() -> None:
    call()
    ((kept, _),) = KNOWN._answers.values()
    kept.scratch["inputs"] = "of this pass"
    for copy in (kept.like(scale=2.0), kept.without_tensors(), replace(kept, scale=2.0)):
        assert copy.scratch == {}


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 10**400], ids=lambda x: str(x)[:5])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="`scale` must be finite"):
        call(scale=scale)

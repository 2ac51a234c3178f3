"""Plans are pure data: every path of resolve() and every reason, with stand-in tables."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kernel_fun._common import support
from kernel_fun._common.device import Device, named
from kernel_fun._common.plan import BackendUnavailable, Impl, Policy, Stage, resolve


@dataclass(frozen=True)
class Toy:
    K: int = 64
    grad: bool = False


def small(problem: Toy, device: Device) -> str | None:
    return None if problem.K <= 128 else f"K = {problem.K} above 128"


TABLE = (
    Stage("one", (Impl("sm90", "sm90.one:one", when=small), Impl("eager", "eager.one:one"))),
    Stage("two", (Impl("sm90", "sm90.two:two"), Impl("eager", "eager.two:two")), lambda p: p.grad),
)
OPEN = Policy(None, None, "auto", "TOY_BACKEND")


def decide(
    problem: Toy = Toy(),
    device: str = "sm90",
    policy: Policy = OPEN,
    table: tuple[Stage, ...] = TABLE,
    **refusals: str | None,
):
    refusals = {
        "gpu_refusal": None,
        "fla_refusal": "fla: not installed",
        "eager_refusal": None,
        **refusals,
    }
    return resolve("toy", table, problem, named(device), policy, **refusals)


def test_gpu_backend_serves_when_every_needed_stage_has_one():
    plan = decide()
    assert (plan.backend, plan.reason, plan.fallback) == ("sm90", None, False)
    assert [c.stage for c in plan.choices] == ["one"]
    assert [c.stage for c in decide(Toy(grad=True)).choices] == ["one", "two"]


def test_one_missing_stage_sends_the_whole_call_elsewhere():
    table = (TABLE[0], Stage("two", (Impl("eager", "eager.two:two"),)))
    plan = decide(table=table, fla_refusal=None)
    assert plan.backend == "fla"
    assert plan.fallback
    assert plan.reason == "no GPU backend implements two"
    plan = decide(table=table)
    assert plan.backend == "eager"
    assert plan.fallback
    assert {c.impl.backend for c in plan.choices} == {"eager"}


@pytest.mark.parametrize(
    ("problem", "device", "refusals", "reason"),
    [
        (Toy(256), "sm90", {}, "one: sm90: K = 256 above 128"),
        (Toy(), "sm80", {}, "no kernel for sm80 (A100) in this release"),
        (Toy(), "cpu", {}, "tensor on cpu"),
        (Toy(), "sm90", {"gpu_refusal": "too small"}, "one: sm90: too small"),
    ],
)
def test_reasons(problem, device, refusals, reason):
    plan = decide(problem, device, **refusals)
    assert plan.backend == "eager"
    assert plan.reason == reason
    assert plan.fallback == (device != "cpu")


def test_every_rejected_candidate_has_its_reason_in_the_printed_plan():
    text = str(decide(Toy(256)))
    assert "not sm90: K = 256 above 128" in text
    assert "served by eager" in text
    assert "not sm90: tensor on cpu" in str(decide(device="cpu"))


def test_missing_package_is_a_reason(monkeypatch):
    monkeypatch.setitem(support.NEEDS, "cute", ("no_such_module_anywhere",))
    table = (Stage("one", (Impl("sm90", "sm90.one:one", "cute"), Impl("eager", "eager.one:one"))),)
    assert "no_such_module_anywhere not installed" in decide(table=table).reason


def test_disabled_names_the_switch():
    plan = decide(policy=Policy("KERNEL_FUN_DISABLE=yes", None, "auto"))
    assert plan.backend == "eager"
    assert plan.reason == "one: sm90: KERNEL_FUN_DISABLE=yes"


def test_forced_backend_serves_or_raises():
    assert decide(policy=Policy(None, "sm90", "auto", "TOY_BACKEND")).backend == "sm90"
    eager = decide(policy=Policy(None, "eager", "auto", "TOY_BACKEND"))
    assert (eager.backend, eager.fallback) == ("eager", False)
    with pytest.raises(BackendUnavailable, match=r"TOY_BACKEND=sm90 cannot serve .*K = 256 above 128"):
        decide(Toy(256), policy=Policy(None, "sm90", "auto", "TOY_BACKEND"))
    with pytest.raises(BackendUnavailable, match=r"TOY_BACKEND=fla cannot serve .*fla: not installed"):
        decide(policy=Policy(None, "fla", "auto", "TOY_BACKEND"))
    assert decide(policy=Policy(None, "fla", "auto", "TOY_BACKEND"), fla_refusal=None).backend == "fla"


def test_fallback_policies():
    big = Toy(256)
    assert decide(big, fla_refusal=None).backend == "fla"
    assert decide(big, policy=Policy(None, None, "eager"), fla_refusal=None).backend == "eager"
    with pytest.raises(BackendUnavailable, match="KERNEL_FUN_FALLBACK=error"):
        decide(big, policy=Policy(None, None, "error"))
    with pytest.raises(BackendUnavailable, match="KERNEL_FUN_FALLBACK=fla cannot serve"):
        decide(big, policy=Policy(None, None, "fla"))
    assert decide(policy=Policy(None, None, "error")).backend == "sm90"
    assert decide(device="cpu", policy=Policy(None, None, "fla")).backend == "eager"


def test_nobody_can():
    with pytest.raises(NotImplementedError, match=r"toy: no cp here; fla: fla: not installed"):
        decide(Toy(256), eager_refusal="no cp here")
    with pytest.raises(NotImplementedError, match="toy: no cp here"):
        decide(device="cpu", eager_refusal="no cp here")


def test_load_refuses_a_stage_outside_the_plan():
    with pytest.raises(KeyError, match="two"):
        decide().load("two")

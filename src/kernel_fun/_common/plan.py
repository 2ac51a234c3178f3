"""Plans: which implementation runs each stage of a call, and why every other one does not.

Pure data and one loop. Nothing here imports torch, so a plan for any device can be made anywhere.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from kernel_fun._common import config, support
from kernel_fun._common.device import Device

BACKENDS = ("sm100", "sm90", "triton", "eager", "fla")
GPU_BACKENDS = ("sm100", "sm90", "triton")
WHOLE = "whole call"

Predicate = Callable[[Any, Device], "str | None"]


class BackendUnavailable(RuntimeError):
    """No allowed backend serves the call; the message says why.

    ``reason``: only the reason, without the call and the switch that asked for the backend.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


def always(problem: Any, device: Device) -> str | None:
    return None


@dataclass(frozen=True)
class Impl:
    """One implementation of a stage.

    ``target`` is ``module:function`` below the family's ``_kernels`` package; ``when`` returns the
    reason it cannot take a problem, or None.
    """

    backend: str
    target: str
    needs: str | None = None
    when: Predicate = always
    unverified: str | None = None
    """Why it may serve only where the environment forces its backend, or None."""

    def misplaced(self, device: Device) -> str | None:
        """Why the device is not one this implementation is made for, or None."""
        if self.backend.startswith("sm") and device.arch != self.backend:
            where = "cpu" if device.type == "cpu" else f"{device.arch} ({device.name})"
            return f"tensor on {where}"
        if self.backend == "triton" and device.type != "cuda":
            return f"tensor on {device.type}"
        return None

    def refusal(self, problem: Any, device: Device) -> str | None:
        """Why this implementation does not run the problem on the device, or None."""
        reason = self.misplaced(device)
        if reason is not None:
            return reason
        if self.needs is not None:
            reason = support.missing(self.needs)
            if reason is not None:
                return reason
        return self.when(problem, device)


@dataclass(frozen=True)
class Stage:
    """A stage: its name, its implementations in order of preference, which calls need it."""

    name: str
    impls: tuple[Impl, ...]
    needed: Callable[[Any], bool] = lambda problem: True


@dataclass(frozen=True)
class Choice:
    """What one stage runs, and the refusal of each candidate that stood before it."""

    stage: str
    impl: Impl | None
    rejected: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Plan:
    """The decision for one problem.

    ``backend`` is what serves the call: a GPU backend of ours, ``eager`` or ``fla`` (delegated,
    verbatim). ``reason`` is None when a GPU backend of ours serves it, else why not.
    """

    family: str
    problem: Any
    device: Device
    backend: str
    choices: tuple[Choice, ...]
    reason: str | None
    fallback: bool

    def load(self, stage: str) -> Callable[..., Any]:
        """The function that runs a stage."""
        where = self._places.get(stage)
        if where is None:
            raise KeyError(f"{self.family}: stage {stage!r} is not in the plan for {self.problem}")
        return getattr(_module(where[0]), where[1])

    @cached_property
    def _places(self) -> dict[str, tuple[str, str]]:
        """Module and name of the function of each stage."""
        targets = {c.stage: c.impl.target.partition(":") for c in self.choices if c.impl is not None}
        return {s: (f"kernel_fun.{self.family}._kernels.{m}", name) for s, (m, _, name) in targets.items()}

    def __str__(self) -> str:
        lines = [f"kernel-fun {self.family}: {self.problem} on {self.device.arch} ({self.device.name})"]
        for c in self.choices:
            what = "-" if c.impl is None else f"{c.impl.backend}  {c.impl.target}"
            lines.append(f"  {c.stage:<10} {what}")
            lines.extend(f"  {'':<10}   not {b}: {why}" for b, why in c.rejected)
        lines.append(f"  served by {self.backend}" + (f": {self.reason}" if self.reason else ""))
        return "\n".join(lines)


@dataclass(frozen=True)
class Policy:
    """What the environment asks of one family, read once per call."""

    disabled_by: str | None
    """The switch that turns GPU backends off, and its word."""
    forced: str | None
    fallback: str
    forced_by: str = ""

    @staticmethod
    def read(disable: config.Switch, backend: config.Switch, known: tuple[str, ...] = BACKENDS) -> Policy:
        """ValueError where a switch holds a word that is none of its own, the one of the log included."""
        support.warn_of_unknown_switches()
        config.DEBUG.on()
        return Policy(
            config.disabled_by(disable),
            config.forced_backend(backend, known),
            config.fallback(),
            backend.name,
        )


def choose(stage: Stage, refuses: Callable[[Impl], str | None]) -> Choice:
    """First implementation of a stage that is not refused, and why those before it were."""
    rejected: list[tuple[str, str]] = []
    for impl in stage.impls:
        reason = refuses(impl)
        if reason is None:
            return Choice(stage.name, impl, tuple(rejected))
        rejected.append((impl.backend, reason))
    return Choice(stage.name, None, tuple(rejected))


def resolve(
    family: str,
    stages: tuple[Stage, ...],
    problem: Any,
    device: Device,
    policy: Policy,
    *,
    gpu_refusal: str | None,
    fla_refusal: str | None,
    eager_refusal: str | None,
) -> Plan:
    """Decide who serves a problem.

    A GPU backend of ours serves a call only when it has every stage the call needs. Otherwise the
    whole call goes to one place: eager on a device fla does not run on, else what the fallback
    policy says. The refusals say why all GPU backends of ours, fla or eager cannot take the call.
    """
    needed = tuple(s for s in stages if s.needed(problem))

    def gpu_only(backend: str) -> str | None:
        if backend not in GPU_BACKENDS:
            return "not a GPU backend"
        if policy.forced is not None and policy.forced != backend:
            return f"{policy.forced_by}={policy.forced}"
        return policy.disabled_by or gpu_refusal

    def ours_refuses(impl: Impl) -> str | None:
        reason = gpu_only(impl.backend) or impl.refusal(problem, device)
        return reason or (impl.unverified if policy.forced != impl.backend else None)

    ours = tuple(choose(s, ours_refuses) for s in needed)
    if ours and all(c.impl is not None for c in ours):
        used = {c.impl.backend for c in ours if c.impl is not None}
        ours = tuple(_complete(c, s, None) for c, s in zip(ours, needed))
        return Plan(family, problem, device, "+".join(sorted(used)), ours, None, False)

    reason = _why_not(ours, needed, device)
    if policy.forced in GPU_BACKENDS and not any(i.backend == policy.forced for s in needed for i in s.impls):
        reason = f"{family} has no {policy.forced} kernels in this release"
    if policy.forced in GPU_BACKENDS:
        asked = f"{policy.forced_by}={policy.forced}"
        raise BackendUnavailable(f"{asked} cannot serve {problem}: {reason}", reason)

    def plan(backend: str, fallback: bool) -> Plan:
        def only(impl: Impl) -> str | None:
            if impl.backend == backend:
                return None
            if impl.backend not in GPU_BACKENDS:
                return f"served by {backend}"
            return ours_refuses(impl) or f"not for every stage ({reason})"

        choices = tuple(
            _complete(choose(s, only), s, fla_refusal if backend == "eager" else None) for s in needed
        )
        if backend == "fla":
            refused = {b: why for c in reversed(choices) for b, why in c.rejected}  # the first stage's
            choices = (Choice(WHOLE, Impl("fla", "fallback"), tuple(refused.items())),)
        return Plan(family, problem, device, backend, choices, reason, fallback)

    return plan(*_elsewhere(family, problem, device, policy, reason, fla_refusal, eager_refusal))


def _elsewhere(
    family: str,
    problem: Any,
    device: Device,
    policy: Policy,
    reason: str,
    fla_refusal: str | None,
    eager_refusal: str | None,
) -> tuple[str, bool]:
    """Who serves a call that no GPU backend of ours takes, and whether that is a fallback."""
    cuda = device.type == "cuda"
    if policy.forced == "fla" or (policy.forced is None and policy.fallback == "fla" and cuda):
        asked = f"{policy.forced_by}=fla" if policy.forced else f"{config.FALLBACK.name}=fla"
        if fla_refusal is not None:
            raise BackendUnavailable(f"{asked} cannot serve {problem}: {fla_refusal}", fla_refusal)
        return "fla", policy.forced is None
    if policy.forced is None and cuda and policy.fallback == "error":
        raise BackendUnavailable(
            f"{config.FALLBACK.name}=error and no GPU backend of kernel-fun serves {problem}: {reason}",
            reason,
        )
    if policy.forced is None and cuda and policy.fallback == "auto" and fla_refusal is None:
        return "fla", True
    if eager_refusal is not None:
        also = f"; fla: {fla_refusal}" if fla_refusal and cuda else ""
        raise NotImplementedError(f"{family}: {eager_refusal}{also}")
    return "eager", cuda and policy.forced is None


_module = lru_cache(maxsize=64)(importlib.import_module)


def announce(plan: Plan, op: str) -> None:
    """Say once per process and kind of problem who serves an operation, before its first launch.

    INFO when one of our backends was asked for, WARNING with the reason when the call ends up elsewhere.
    Under KERNEL_FUN_DEBUG the whole plan is logged too.
    """
    key = (op, _kind(plan.problem), plan.device, plan.backend)
    if config.DEBUG.on():
        support.log_once(("plan", key), logging.INFO, str(plan))
    where = f"kernel-fun {plan.family}: "
    if plan.fallback:
        how = "delegated to fla" if plan.backend == "fla" else "running on eager (slow on a GPU)"
        support.log_once(key, logging.WARNING, f"{where}{op} {how}: {plan.reason} ({plan.problem})")
    else:
        what = f"engaged ({op} on {plan.backend}, {plan.device.name}: {plan.problem})"
        support.log_once(key, logging.INFO, where + what)


@lru_cache(maxsize=4096)
def _kind(problem: Any) -> Any:
    return problem.kind


def _complete(choice: Choice, stage: Stage, fla_refusal: str | None) -> Choice:
    """A choice that also says why a backend without an implementation of the stage, or fla, did not run."""
    absent = [b for b in GPU_BACKENDS if all(i.backend != b for i in stage.impls)]
    more = [(b, f"no {b} kernel for {stage.name} in this release") for b in absent]
    more += [("fla", fla_refusal)] if fla_refusal is not None else []
    return Choice(choice.stage, choice.impl, (*choice.rejected, *more))


def _why_not(ours: tuple[Choice, ...], needed: tuple[Stage, ...], device: Device) -> str:
    """One sentence: the first stage no GPU backend has, and each candidate's refusal."""
    if device.type != "cuda":
        return f"tensor on {device.type}"
    on_gpu = [i for s in needed for i in s.impls if i.backend in GPU_BACKENDS]
    if on_gpu and all(i.misplaced(device) for i in on_gpu):
        return f"no kernel for {device.arch} ({device.name}) in this release"
    for choice in ours:
        if choice.impl is None:
            gpu = [f"{b}: {why}" for b, why in choice.rejected if b in GPU_BACKENDS]
            if not gpu:
                return f"no GPU backend implements {choice.stage}"
            return f"{choice.stage}: " + "; ".join(gpu)
    return "no stage is needed" if not needed else "no GPU backend"

"""Gate, then time: candidates of one case are checked on the tensors they are timed on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

import kernel_fun
from kernel_fun.bench import machine, probe, record, suite, timing
from kernel_fun.bench.record import Record, Row, Skipped
from kernel_fun.bench.suite import Candidate, Case, Family, Outputs

MEMORY = {
    "cpu": "growth of the peak resident set over one call in a fresh process",
    "cuda": "peak of torch's allocator over one warm call",
}


@dataclass(frozen=True)
class Request:
    """What to measure; every combination of shape, gate and pass is a case.

    Args:
        seconds: timing budget of one case, all candidates together.
        cold: also time the first call of a fresh process (always done on the CPU).
    """

    family: str
    shapes: Sequence[str]
    gates: Sequence[str]
    passes: Sequence[str]
    dtype: torch.dtype
    device: torch.device
    candidates: Sequence[str] | None
    seconds: float
    cold: bool


def measure(request: Request, say: Callable[[str], None]) -> Record:
    """Runs the request and returns its record, not yet written.

    Raises ValueError for an unknown family, shape, gate, pass or candidate, or a device that is not here,
    before anything runs.
    """
    machine.usable("--device", request.device)
    family = suite.load(request.family)
    _known("--shape", request.shapes, family.SHAPES)
    _known("--gate", request.gates, family.GATES)
    _known("--pass", request.passes, family.PASSES)
    candidates = family.candidates(request.device)
    if request.candidates is not None:
        _known("--candidate", request.candidates, [c.name for c in candidates])
        candidates = [c for c in candidates if c.name in request.candidates]
    taken = _empty(request.device)
    tunes = any(c.name == "fla" and c.why_not is None for c in candidates)
    if tunes and request.family == "kda" and request.device.type == "cuda":
        say("fla tunes for minutes at head shapes that TRITON_CACHE_DIR does not hold: docs/benchmarking.md")
    for shape in request.shapes:
        for gate in request.gates:
            case = family.case(family.SHAPES[shape], gate, request.dtype, request.device)
            for what in request.passes:
                say(f"{family.NAME}.{what} at {case.shape}, {gate}")
                _Comparison(family, case, what, request, taken).run(candidates)
    return taken


def _known(flag: str, names: Sequence[str], allowed: Collection[str]) -> None:
    for name in names:
        if name not in allowed:
            raise ValueError(f"`{flag}` must be one of {', '.join(allowed)}, got {name!r}")


def _empty(device: torch.device) -> Record:
    wanted = device.type if device.type == "cpu" else f"cuda:{device.index or 0}"
    commit, dirty = suite.commit()
    return Record(
        gpu=next(d["name"] for d in machine.devices() if d["device"] == wanted),
        device=device.type,
        commit=commit,
        dirty=dirty,
        utc=record.now(),
        versions=kernel_fun.versions(),
        ceilings=timing.ceilings(device),
        memory=MEMORY[device.type],
        threads=torch.get_num_threads(),
    )


class _Comparison:
    """The candidates of one pass of one case."""

    def __init__(self, family: Family, case: Case, what: str, request: Request, taken: Record) -> None:
        self.family, self.case, self.what = family, case, what
        self.request, self.record = request, taken
        self.bench = f"{family.NAME}.{what}"

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Adds a row for each candidate that is right, and a reason for each other."""
        found: dict[str, Outputs] = {}
        calls: dict[str, timing.Call] = {}
        for candidate in candidates:
            if candidate.why_not is not None:
                self._skip(candidate.name, candidate.why_not)
                continue
            try:
                calls[candidate.name] = self.family.caller(candidate.name, self.case, self.what)
                found[candidate.name] = calls[candidate.name]()
            except (RuntimeError, NotImplementedError) as error:  # refusals and out-of-memory
                self._skip(candidate.name, str(error).partition("\n")[0])
        errors = self.family.errors(self.case, self.what, found)
        del found
        right = {n: call for n, call in calls.items() if n in errors and self._gate(n, errors[n])}
        if right:
            self._time(right, errors)

    def _gate(self, candidate: str, errors: dict[str, float]) -> bool:
        """Whether every tensor is within its limit; if not, the reason is recorded."""
        limits = self.case.peer_limits.get(candidate, self.case.limits)
        wrong = [
            f"{name} {error:.1e} > {limits[name]:.0e}"
            for name, error in errors.items()
            if not error <= limits[name]
        ]
        if wrong:
            self._skip(candidate, "wrong result, relative error " + ", ".join(wrong))
        return not wrong

    def _time(self, calls: dict[str, timing.Call], errors: dict[str, dict[str, float]]) -> None:
        device = self.request.device
        samples = timing.interleaved(calls, device, seconds=self.request.seconds)
        shape = self.family.SHAPES[self.case.shape.name]
        least = self.family.work(shape, self.what, self.request.dtype)
        for name, call in calls.items():
            fresh = self._fresh(name) if self.request.cold or device.type == "cpu" else {}
            on_gpu = device.type == "cuda"
            with self.family.step(name, self.case, self.what) as step:
                host_us = timing.host_us(step, device)
            self.record.rows.append(
                Row(
                    bench=self.bench,
                    shape=self.case.shape.name,
                    gate=self.case.gate,
                    dtype=_name(self.request.dtype),
                    candidate=name,
                    ms=timing.Quantiles.of(samples[name]),
                    rounds=len(samples[name]),
                    peak_bytes=timing.cuda_peak_bytes(call, device) if on_gpu else int(fresh["peak_bytes"]),
                    host_us=host_us,
                    cold_s=fresh.get("cold_s"),
                    error=errors[name],
                    flops=least.flops,
                    bytes=least.bytes,
                )
            )

    def _fresh(self, candidate: str) -> dict[str, float]:
        return probe.in_fresh_process(
            self.family.NAME,
            self.case.shape.name,
            self.case.gate,
            _name(self.request.dtype),
            str(self.request.device),
            candidate,
            self.what,
        )

    def _skip(self, candidate: str, reason: str) -> None:
        self.record.skipped.append(
            Skipped(self.bench, self.case.shape.name, self.case.gate, candidate, reason)
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

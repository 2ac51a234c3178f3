"""`kernel-fun check`: every backend of this machine against the float64 recurrence, in seconds."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kernel_fun._cli.screen import Screen
from kernel_fun._common import config
from kernel_fun._common.plan import BACKENDS, BackendUnavailable
from kernel_fun.bench import machine

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.testing import Case

HELP = "check outputs and gradients of every backend here against the float64 recurrence"

#: Dtypes a backend is checked in.
DTYPES = {"eager": ("float64", "float32", "bfloat16", "float16")}
GPU_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Verdict:
    """One backend on one case: the error of each tensor, and the worst against its limit."""

    backend: str
    op: str
    case: str
    dtype: str
    passed: bool
    worst: str
    error: float
    limit: float
    errors: dict[str, float]
    seconds: float
    reason: str | None = None


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        action="append",
        help="check this backend alone (repeatable; default: every backend of ours that runs here; "
        "fla only when asked for, because its first calls autotune for minutes)",
    )


def run(args: argparse.Namespace, screen: Screen) -> tuple[int, dict[str, Any]]:
    backends = args.backend or available()
    verdicts: list[Verdict] = []
    start = time.perf_counter()
    with one_thread():
        for backend in backends:
            verdicts.extend(check(backend))
    seconds = time.perf_counter() - start
    _show(verdicts, seconds, screen)
    passed = all(v.passed for v in verdicts)
    data = {"passed": passed, "seconds": seconds, "checks": [asdict(v) for v in verdicts]}
    return 0 if passed else 1, data


@contextlib.contextmanager
def one_thread() -> Generator[None]:
    """One CPU thread: the oracle is thousands of tiny operations, which more threads only delay."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def available() -> list[str]:
    """Backends of ours that run on this machine."""
    found = machine.devices()
    return [b for b in BACKENDS if b != "fla" and machine.unavailable(b, found) is None]


def cases(dtype: str, device: str) -> dict[str, Case]:
    """Small problems that together reach every gate, both layouts, packing, GVA and states."""
    import torch

    from kernel_fun.testing import Case

    common: dict[str, Any] = {
        "H": 2, "K": 64, "V": 64, "dtype": getattr(torch, dtype), "device": device,
        "output_final_state": True,
    }  # fmt: skip
    return {
        "softplus gate, GVA": Case("softplus_random", B=2, T=130, HV=4, initial_state=True, **common),
        "slow gate, v-first": Case(
            "init_slow", T=200, beta="sigmoid2", initial_state=True, state_v_first=True, **common
        ),
        "bounded gate, packed": Case(
            "bounded", seqlens=(1, 63, 0, 65, 20), tail=3, initial_state=True, **common
        ),
        "gates of -1000 and -inf": Case("spikes", T=100, beta="raw", l2norm=False, **common),
    }


def check(backend: str) -> Iterator[Verdict]:
    """Every case in every dtype of a backend, chunk form with gradients and recurrent form without."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in DTYPES.get(backend, GPU_DTYPES):
        for name, case in cases(dtype, device).items():
            yield from _check_case(backend, name, case, dtype)


def _check_case(backend: str, name: str, case: Case, dtype: str) -> Iterator[Verdict]:
    from kernel_fun import testing
    from kernel_fun.kda import chunk_kda, fused_recurrent_kda, reference

    inputs = case.inputs()
    upstream = testing.make_upstream(inputs)
    truth = testing.run(reference.recurrent, inputs, **upstream, double=True)
    for op in (chunk_kda, fused_recurrent_kda):
        do, dht = (upstream["do"], upstream["dht"]) if op is chunk_kda else (None, None)
        if op is fused_recurrent_kda and backend not in ("eager", "fla"):
            continue  # one token at a time has no kernel of its own
        start = time.perf_counter()
        reason, found = None, {}
        with config.KDA_BACKEND.set(backend):
            try:
                found = testing.run(op, inputs, do=do, dht=dht)
            except (BackendUnavailable, NotImplementedError) as error:
                reason = str(error)
        seconds = time.perf_counter() - start
        yield _judge(backend, op.__name__, name, dtype, truth, found, seconds, reason)


def _judge(
    backend: str,
    op: str,
    case: str,
    dtype: str,
    truth: dict[str, Tensor],
    found: dict[str, Tensor],
    seconds: float,
    reason: str | None,
) -> Verdict:
    """The worst tensor is the one nearest to, or furthest beyond, its limit."""
    import torch

    from kernel_fun import testing

    errors = {name: testing.relative_error(truth[name], out) for name, out in found.items()}
    worst, error, limit, share = "-", 0.0, 0.0, -1.0
    passed = reason is None
    for name, out in found.items():
        allowed = testing.TOLERANCE["kda", name, getattr(torch, dtype)]
        try:
            testing.assert_close(name, truth[name], out, dtype=getattr(torch, dtype))
        except AssertionError as failure:
            passed, reason = False, reason or str(failure)
        ratio = errors[name] / allowed.relative
        if not ratio <= share:  # a NaN is the worst of all
            worst, error, limit, share = name, errors[name], allowed.relative, ratio
    return Verdict(backend, op, case, dtype, passed, worst, error, limit, errors, seconds, reason)


def _show(verdicts: list[Verdict], seconds: float, screen: Screen) -> None:
    screen.table(
        "relative error against the float64 recurrence (worst tensor of each case)",
        ("backend", "op", "case", "dtype", "", "worst", "error", "limit"),
        [
            (v.backend, v.op, v.case, v.dtype, "pass" if v.passed else "FAIL", v.worst,
             f"{v.error:.1e}", f"{v.limit:.1e}")
            for v in verdicts
        ],
        numbers=2,
    )  # fmt: skip
    for v in verdicts:
        if not v.passed:
            screen.line(f"{v.backend} {v.op}, {v.case}, {v.dtype}: {v.reason}", "red")
    good = sum(v.passed for v in verdicts)
    style = "green" if good == len(verdicts) else "bold red"
    screen.line(f"{good} of {len(verdicts)} checks passed in {seconds:.1f} s", style)

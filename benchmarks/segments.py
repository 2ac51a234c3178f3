"""Long sequences of few heads cut into segments beside the same calls uncut, on the Hopper kernels.

    python -m benchmarks.segments [--commit C] [--out benchmarks/runs]

Of each shape: median ms, forward and forward with backward, uncut and cut into segments of
half, once and twice the tokens that `kernel_fun.kda.sequence_split.cut_of` takes, whether or not it would cut
a sequence of that length; and by how much an output or gradient differs at most. K = V = 128, bf16, softplus
gate of slow decays.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from kernel_fun._common import device as devices
from kernel_fun.bench import machine
from kernel_fun.bench.suite import Outputs
from kernel_fun.kda.sequence_split import Cut, cut_of, forced

from . import kda, runs
from .shapes import Shape

K = V = 128
SHAPES = (
    *((1, T, HV) for T in (16384, 32768, 65536, 262144) for HV in (2, 4, 8)),
    (2, 32768, 4),
    (4, 65536, 4),
    (16, 16384, 4),
)
"""B, T, HV."""
COLUMNS: tuple[str, ...] = ("B", "T", "HV", "segment", "is_default", "fwd_ms", "fwdbwd_ms", "difference")


def cuts(HV: int, T: int, sms: int) -> Generator[tuple[Cut | None, bool]]:
    """None, then three cuts of a sequence that is long enough for them; and whether a call would take it."""
    usual = cut_of(HV, K, V, sms)
    assert usual is not None
    yield None, usual.least > T
    for tokens in (usual.tokens // 2, usual.tokens, 2 * usual.tokens):
        if tokens < T:
            yield Cut(tokens, tokens + 1), tokens == usual.tokens and usual.least <= T


def median_ms(
    call: Callable[[], Any], device: torch.device, least: int = 5, budget_ms: float = 60.0
) -> float:
    """Of a call's time between two events, once warm."""
    call()
    times: list[float] = []
    while len(times) < least or (sum(times) < budget_ms and len(times) < 20):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        call()
        events[1].record()
        torch.cuda.synchronize(device)
        times.append(events[0].elapsed_time(events[1]))
    return sorted(times)[len(times) // 2]


def rows(B: int, T: int, HV: int, device: torch.device) -> Generator[dict[str, Any]]:
    """A row for every cut of a shape."""
    shape = Shape(f"b{B}_t{T}_h{HV}", B, T, HV, HV, K, V)
    problem = kda.case(shape, "init_slow", torch.bfloat16, device)
    forward, both = (kda.caller("sm90", problem, what) for what in ("fwd", "fwdbwd"))
    want: Outputs | None = None
    for cut, is_default in cuts(HV, T, devices.of(device).sms):
        with forced(cut):
            found = both()
            want = want or found
            difference = max(float((found[n] - x).float().norm() / x.float().norm()) for n, x in want.items())
            del found
            values = (median_ms(forward, device), median_ms(both, device), difference)
        about = (B, T, HV, cut.tokens if cut else "", is_default)
        yield dict(zip(COLUMNS, (*about, *values), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit of a clean copy that has no git")
    parser.add_argument("--out", type=Path, help="a .csv file (default: none)")
    args = parser.parse_args(argv)
    try:
        device = machine.usable("--device", args.device)
    except ValueError as error:
        parser.error(str(error))
    table: list[dict[str, Any]] = []
    for shape in SHAPES:
        for row in rows(*shape, device):
            table.append(row)
            print(
                *(f"{n} {x:.3g}" if isinstance(x, float) else f"{n} {x}" for n, x in row.items()), flush=True
            )
    if args.out is not None:
        with args.out.open("x", encoding="utf-8", newline="") as file:
            file.write(f"# {runs.line(runs.made(device, args.commit))}\n")
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(table)
        print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

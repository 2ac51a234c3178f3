"""Errors of every output and gradient of chunk_kda beside those of a peer, over lengths and gates.

    python -m benchmarks.accuracy [--candidate sm90] [--peer fla] [--regime bounded] [--initial-state]
        [--out FOLDER]

Both run on the same bf16 inputs; the truth is the eager backend in float64. An error is the norm of the
difference over that of the truth, all tokens, heads and seeds together: dA_log is one number a head, and in a
head whose terms cancel its own error says little. What is 0, as the gate's gradient of one token, has none.

Rows are written as they come, so that several processes may share the gates and none is lost to a time limit.
fla runs with the launch configs kept in benchmarks/data whatever the length, for each of which it would
otherwise search anew; they decide about warps and tiles, not about what is rounded.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from kernel_fun import testing

from . import kda, kept, runs

REGIMES = ("softplus_random", "init_slow", "bounded", "spikes")
LENGTHS = {1: 8, 15: 16, 16: 16, 63: 16, 64: 16, 65: 16, 130: 8, 1000: 4, 8192: 1}
"""T -> seeds."""
ON_HOST = 130
"""Tokens up to which the truth is computed on the CPU: it makes thousands of small launches, for which
processes that share a GPU wait in turn."""
HEADS = {"H": 32, "HV": 32, "K": 128, "V": 128}
COLUMNS: tuple[str, ...] = (
    "regime",
    "T",
    "seeds",
    "tensor",
    "candidate",
    "error",
    "peer",
    "peer_error",
    "ratio",
)


def rows(
    candidate: str, peer: str, regime: str, T: int, device: torch.device, initial_state: bool = False
) -> Generator[dict[str, Any]]:
    """A row for every tensor of one gate and length; ``initial_state``: each sequence begins with one."""
    sums: dict[str, list[float]] = {}
    for seed in range(LENGTHS[T]):
        _add(sums, regime, T, seed, (candidate, peer), device, initial_state)
    for name, (ours, theirs, size) in sums.items():
        if size == 0.0:
            continue
        error, peer_error = (ours / size) ** 0.5, (theirs / size) ** 0.5
        ratio = error / peer_error if peer_error else math.inf
        values = (regime, T, LENGTHS[T], name, candidate, error, peer, peer_error, ratio)
        yield dict(zip(COLUMNS, values, strict=True))


def _add(
    sums: dict[str, list[float]],
    regime: str,
    T: int,
    seed: int,
    names: tuple[str, str],
    device: torch.device,
    initial_state: bool,
) -> None:
    problem: dict[str, Any] = {
        **HEADS,
        "dtype": torch.bfloat16,
        "output_final_state": True,
        "initial_state": initial_state,
    }
    inputs = testing.make_inputs(regime, T=T, device=str(device), seed=seed, **problem)
    upstream = testing.make_upstream(inputs, seed=seed + 1)
    peculiar = {"safe_gate": True} if regime == "bounded" else {}
    outputs: list[dict[str, Any]] = []
    for name in (*names, "eager"):
        function, context = kda.function(name)
        given, do = {**inputs, **(peculiar if name == "fla" else {})}, upstream
        if name == "eager" and T <= ON_HOST:
            given, do = _on_host(given), _on_host(do)
        with context():
            outputs.append(testing.run(function, given, **do, double=name == "eager"))
    *both, truth = outputs
    for name, want in truth.items():
        into = sums.setdefault(name, [0.0, 0.0, 0.0])
        theirs = (found[name].to(want.device) for found in both)
        for i, x in enumerate((*(x - want for x in theirs), want)):
            into[i] += float(x.double().square().sum())


def _on_host(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--candidate", default="sm90")
    parser.add_argument("--peer", default="fla")
    parser.add_argument("--regime", action="append", choices=REGIMES, help="repeatable (default: all)")
    parser.add_argument(
        "--length", action="append", type=int, choices=LENGTHS, help="repeatable (default: all)"
    )
    parser.add_argument(
        "--initial-state",
        action="store_true",
        help="with a random initial state, and the error of its gradient",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit of a clean copy that has no git")
    parser.add_argument("--out", type=Path, help="folder of records, or a .csv file (default: none)")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    torch.set_num_threads(max(1, torch.get_num_threads() // len(REGIMES)))
    regimes, lengths = args.regime or REGIMES, args.length or tuple(LENGTHS)
    about = runs.made(device, args.commit)
    named = [*(args.regime or []), *(["states"] if args.initial_state else [])]
    path = None if args.out is None else _path(args.out, about, named)
    with ExitStack() as stack:
        if args.peer == "fla" and "FLA_CACHE_MODE" not in os.environ:
            stack.enter_context(kept.kept_configs(kept.archives(), HEADS["H"], HEADS["V"], exactly=False))
        table = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("x", encoding="utf-8", newline="", buffering=1))
            begins = ", from an initial state" if args.initial_state else ""
            file.write(f"# {runs.line(about)}; {HEADS}, bfloat16{begins}\n")
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
        for regime in regimes:
            for T in lengths:
                found = list(rows(args.candidate, args.peer, regime, T, device, args.initial_state))
                shown = (f"{r['tensor']} {r['error']:.2e} ({r['ratio']:.2f})" for r in found)
                print(f"{regime} T{T}", *shown, flush=True)
                if table is not None:
                    table.writerows(found)
    if path is not None:
        print(f"wrote {path}")
    return 0


def _path(out: Path, about: dict[str, Any], named: Sequence[str]) -> Path:
    if out.suffix == ".csv":
        return out
    stamp = re.sub(r"[^0-9TZ]", "", about["utc"])
    name = "-".join([stamp, about["commit"][:12], "accuracy", *named])
    return runs.folder(out, about) / f"{name}.csv"


if __name__ == "__main__":
    raise SystemExit(main())

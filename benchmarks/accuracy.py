"""Errors of every output and gradient of chunk_kda beside those of a peer, over lengths and gates.

    python -m benchmarks.accuracy [--candidate sm90] [--peer fla] [--out benchmarks/results]

Both run on the same bf16 inputs; the truth is the eager backend in float64. An error is the norm of the
difference over that of the truth, all tokens, heads and seeds together: dA_log is one number a head, and in a
head whose terms cancel its own error says little. What is 0, as the gate's gradient of one token, has none.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import kernel_fun
from kernel_fun import testing
from kernel_fun.bench import machine, record, suite

from . import kda

REGIMES = ("softplus_random", "init_slow", "bounded", "spikes")
LENGTHS = {1: 8, 15: 8, 16: 8, 63: 8, 64: 8, 65: 8, 130: 4, 1000: 4, 8192: 2}
"""T -> seeds."""
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


def rows(candidate: str, peer: str, device: torch.device) -> list[dict[str, Any]]:
    """A row for every gate, length and tensor."""
    found: list[dict[str, Any]] = []
    for regime in REGIMES:
        for T, seeds in LENGTHS.items():
            sums: dict[str, list[float]] = {}
            for seed in range(seeds):
                _add(sums, regime, T, seed, (candidate, peer), device)
            for name, (ours, theirs, size) in sums.items():
                if size == 0.0:
                    continue
                error, peer_error = (ours / size) ** 0.5, (theirs / size) ** 0.5
                ratio = error / peer_error if peer_error else math.inf
                values = (regime, T, seeds, name, candidate, error, peer, peer_error, ratio)
                found.append(dict(zip(COLUMNS, values, strict=True)))
    return found


def _add(
    sums: dict[str, list[float]], regime: str, T: int, seed: int, names: tuple[str, str], device: torch.device
) -> None:
    problem: dict[str, Any] = {**HEADS, "dtype": torch.bfloat16, "output_final_state": True}
    inputs = testing.make_inputs(regime, T=T, device=str(device), seed=seed, **problem)
    upstream = testing.make_upstream(inputs, seed=seed + 1)
    peculiar = {"safe_gate": True} if regime == "bounded" else {}
    outputs: list[dict[str, Any]] = []
    for name in (*names, "eager"):
        function, context = kda.function(name)
        given = {**inputs, **(peculiar if name == "fla" else {})}
        with context():
            outputs.append(testing.run(function, given, **upstream, double=name == "eager"))
    *both, truth = outputs
    for name, want in truth.items():
        into = sums.setdefault(name, [0.0, 0.0, 0.0])
        for i, x in enumerate((both[0][name] - want, both[1][name] - want, want)):
            into[i] += float(x.double().square().sum())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--candidate", default="sm90")
    parser.add_argument("--peer", default="fla")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit of a clean copy that has no git")
    parser.add_argument("--out", type=Path, help="folder of records, or a .csv file (default: none)")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    wanted = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
    gpu = next(d["name"] for d in machine.devices() if d["device"] == wanted)
    commit, _ = suite.commit()
    commit = args.commit if commit == "unknown" and args.commit else commit
    utc = record.now()
    found = rows(args.candidate, args.peer, device)
    for regime in REGIMES:
        for T in LENGTHS:
            shown = [r for r in found if (r["regime"], r["T"]) == (regime, T)]
            print(f"{regime} T{T}", *(f"{r['tensor']} {r['error']:.2e} ({r['ratio']:.2f})" for r in shown))
    if args.out is not None:
        folder = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
        stamp = re.sub(r"[^0-9TZ]", "", utc)
        path = (
            args.out
            if args.out.suffix == ".csv"
            else args.out / folder / f"{stamp}-{commit[:12]}-accuracy.csv"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        versions = ", ".join(f"{n} {v}" for n, v in kernel_fun.versions().items() if v)
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(f"# {gpu}, commit {commit}, {utc}, {HEADS}, bfloat16; {versions}\n")
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows(found)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Errors of chunk_kda over the ranks of a group beside those of one rank, all of them on one GPU, over gloo.

    python -m benchmarks.ranks [--ranks 2] [--packing packed] [--layout zigzag] [--seeds 8] [--out FOLDER]

The cases and the comparison are those of tests/kda/test_context_parallel.py, so this runs in a checkout. The
truth is the eager backend in float64 on the same rounded inputs; an error is the norm of the difference over
that of the truth. A tensor of few numbers (dA_log) differs by chance between two equally good runs: of
several seeds the rows "all" hold the root mean squares, and for eight or more their limit is 1.1 times that
of one rank, with no allowance for chance. The exit status says whether every error was within its limit and
every rank gathered once in each direction.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from . import runs

TESTS = Path(__file__).resolve().parent.parent / "tests"
COLUMNS: tuple[str, ...] = (
    "packing",
    "layout",
    "ranks",
    "seed",
    "tensor",
    "error_of_one",
    "error",
    "ratio",
    "limit",
    "gathers_forward",
    "gathers_backward",
)
Row = dict[str, Any]
ENOUGH = 8
"""Seeds from which on the errors of all of them together are compared."""


def shared() -> Any:
    """The problems of the tests."""
    for folder in (TESTS, TESTS / "kda"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import over_ranks  # pyright: ignore[reportMissingImports]

    return over_ranks


def cases(
    worlds: Sequence[int],
    packings: Sequence[str],
    layouts: Sequence[str],
    seeds: int,
    device: str,
    backend: str,
) -> Generator[list[Row]]:
    """The rows of one case after another: those of its seeds, then those of all of them."""
    problems = shared()
    from ranks import Ranks  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    processes: Any = Ranks(sizes=tuple(worlds))
    try:
        for packing, layout in product(packings, layouts):
            found: dict[int, list[Row]] = {world: [] for world in worlds}
            for seed in range(seeds):
                p = problems.on_hopper(packing, layout)
                p = replace(p, device=device, backend=backend, seed=2 * seed)
                for world in worlds:
                    parts = processes.run(world, problems.on_rank, p)
                    found[world] += _rows((packing, layout, world, seed), problems.errors(p, parts), parts)
            for rows in found.values():
                yield rows + (together(rows) if seeds > 1 else [])
    finally:
        processes.stop()


def together(rows: Sequence[Row]) -> list[Row]:
    """Of each tensor the root mean square of its errors over the seeds, and the most all-gathers."""
    found: list[Row] = []
    for tensor in dict.fromkeys(r["tensor"] for r in rows):
        mine = [r for r in rows if r["tensor"] == tensor]
        one, several = (
            math.sqrt(statistics.fmean(r[e] ** 2 for r in mine)) for e in ("error_of_one", "error")
        )
        limit = max(1.1 * one, 1e-6) if len(mine) >= ENOUGH else max(r["limit"] for r in mine)
        gathers = {g: max(r[g] for r in mine) for g in ("gathers_forward", "gathers_backward")}
        errors = {"error_of_one": one, "error": several, "ratio": several / one if one else 1.0}
        found.append({**mine[0], "seed": "all", **errors, "limit": limit, **gathers})
    return found


def _rows(where: tuple[str, str, int, int], errors: Sequence[Any], parts: Sequence[Any]) -> Generator[Row]:
    # the most of any rank
    forward = max(part["forward"] for part in parts)
    backward = max(len(part["gathers"]) - part["forward"] for part in parts)
    for e in errors:
        ratio = e.several / e.one if e.one else 1.0
        values = (*where, e.tensor, e.one, e.several, ratio, e.limit, forward, backward)
        yield dict(zip(COLUMNS, values, strict=True))


def failures(rows: Sequence[Row]) -> list[str]:
    """What is not as it must be, a sentence each."""
    found: list[str] = []
    for r in rows:
        where = f"{r['packing']}, {r['layout']}, {r['ranks']} ranks, seed {r['seed']}"
        if not r["error"] <= r["limit"]:
            found.append(f"{where}: error of {r['tensor']} {r['error']:.3e} > {r['limit']:.3e}")
        gathers = r["gathers_forward"], r["gathers_backward"]
        if gathers != (1, 1):
            found.append(f"{where}: {gathers[0]} and {gathers[1]} all-gathers, not one a direction")
    return list(dict.fromkeys(found))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", action="append", type=int, choices=(2, 3, 4), help="default: 2 and 4")
    problems = shared()
    for what, of in (("packing", tuple(problems.ON_HOPPER)), ("layout", problems.LAYOUTS)):
        parser.add_argument(f"--{what}", action="append", choices=of, help="default: all")
    parser.add_argument("--seeds", type=int, default=1, help="of each case (default: %(default)s)")
    parser.add_argument("--backend", default="sm90")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit of a clean copy that has no git")
    parser.add_argument("--out", type=Path, help="folder of runs, or a .csv file (default: none)")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {args.seeds}")
    about = runs.made(torch.device(args.device), args.commit)
    wrong: list[str] = []
    with ExitStack() as stack:
        table = None
        if args.out is not None:
            path = _path(args.out, about)
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("x", encoding="utf-8", newline="", buffering=1))
            file.write(f"# {runs.line(about)}; {args.backend}, gloo, bfloat16\n")
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
        asked = args.ranks or (2, 4), args.packing or problems.ON_HOPPER, args.layout or problems.LAYOUTS
        chosen = [tuple(dict.fromkeys(words)) for words in asked]
        for rows in cases(*chosen, args.seeds, args.device, args.backend):
            last = [r for r in rows if r["seed"] == rows[-1]["seed"]]
            shown = (f"{x['tensor']} {x['error']:.2e} ({x['ratio']:.3f})" for x in last)
            r = last[0]
            where = f"{r['packing']}, {r['layout']}, {r['ranks']} ranks, seed {r['seed']}:"
            print(where, *shown, flush=True)
            wrong += failures(rows)
            if table is not None:
                table.writerows(rows)
    print(*wrong or ["every error within its limit, one all-gather in each direction"], sep="\n")
    return int(bool(wrong))


def _path(out: Path, about: dict[str, Any]) -> Path:
    if out.suffix == ".csv":
        return out
    stamp = re.sub(r"[^0-9]", "", about["utc"])[:8]
    return runs.folder(out, about) / f"{stamp}-{about['commit'][:7]}-ranks.csv"


if __name__ == "__main__":
    raise SystemExit(main())

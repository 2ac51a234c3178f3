"""Errors of chunk_kda over the ranks of a group beside those of one rank, all of them on one GPU, over gloo.

    python -m benchmarks.ranks [--ranks 2] [--out benchmarks/runs]

The cases and the comparison are those of tests/kda/test_context_parallel.py, so this runs in a checkout. The
truth is the eager backend in float64 on the same rounded inputs; an error is the norm of the difference over
that of the truth. The exit status says whether every error was within its limit and every rank gathered once
in each direction.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import runs

TESTS = Path(__file__).resolve().parent.parent / "tests"
COLUMNS: tuple[str, ...] = (
    "packing",
    "layout",
    "ranks",
    "tensor",
    "error_of_one",
    "error",
    "ratio",
    "limit",
    "gathers_forward",
    "gathers_backward",
)
Row = dict[str, Any]


def cases(worlds: Sequence[int], device: str, backend: str) -> Generator[list[Row]]:
    """The rows of one case after another."""
    for folder in (TESTS, TESTS / "kda"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import over_ranks  # pyright: ignore[reportMissingImports]

    from ranks import Ranks  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    processes: Any = Ranks(sizes=tuple(worlds))
    shared: Any = over_ranks
    try:
        for packing in shared.ON_HOPPER:
            for layout in shared.LAYOUTS:
                p = replace(shared.on_hopper(packing, layout), device=device, backend=backend)
                for world in worlds:
                    parts = processes.run(world, shared.on_rank, p)
                    yield list(_rows((packing, layout, world), shared.errors(p, parts), parts))
    finally:
        processes.stop()


def _rows(where: tuple[str, str, int], errors: Sequence[Any], parts: Sequence[Any]) -> Generator[Row]:
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
        where = f"{r['packing']}, {r['layout']}, {r['ranks']} ranks"
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
    parser.add_argument("--backend", default="sm90")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit of a clean copy that has no git")
    parser.add_argument("--out", type=Path, help="folder of runs, or a .csv file (default: none)")
    args = parser.parse_args(argv)
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
        for rows in cases(args.ranks or (2, 4), args.device, args.backend):
            r = rows[0]
            shown = (f"{x['tensor']} {x['error']:.2e} ({x['ratio']:.3f})" for x in rows)
            print(f"{r['packing']}, {r['layout']}, {r['ranks']} ranks:", *shown, flush=True)
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

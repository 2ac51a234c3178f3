"""`kernel-fun bench`: candidates side by side in one process, and a record of it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_fun._cli import places
from kernel_fun._cli.screen import Screen

if TYPE_CHECKING:
    from kernel_fun.bench.record import Record, Row

HELP = "time our backends, fla and transformers side by side, and write a record"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--family", default="kda", metavar="NAME", help="what to bench: kda or cconv (default: kda)")
    add("--shape", action="append", metavar="NAME", help="a shape of benchmarks/shapes.py (repeatable)")
    add("--gate", action="append", metavar="NAME", help="softplus_random, init_slow or bounded "
        "(repeatable; default: softplus_random)")  # fmt: skip
    add("--pass", action="append", dest="what", metavar="NAME", help="fwd or fwdbwd (repeatable; "
        "default: both)")  # fmt: skip
    add("--candidate", action="append", metavar="NAME",
        help="a backend of ours, fla or transformers (repeatable; default: all that run here)")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float16", "float32"),
        help="default: bfloat16 on a GPU, float32 on the CPU")  # fmt: skip
    add("--device", help="default: cuda if there is one, else cpu")
    add("--seconds", type=float, default=10.0, metavar="S",
        help="timing budget of one case, all candidates together (default: 10)")  # fmt: skip
    add("--cold", action="store_true", help="also time the first call of a fresh process on a GPU")
    add("--cp", type=int, metavar="N", help="one sequence over N GPUs of this host, beside one of them")
    add("--layout", metavar="NAME",
        help="with --cp: contiguous or zigzag (default: contiguous)")  # fmt: skip
    add("--out", type=places.named, metavar="PATH",
        help="record to write, a .json file or a directory (default: none)")  # fmt: skip
    add("--commit", metavar="ID", help="commit of a clean copy that has no git, for the record")
    add("--plot", type=places.named, metavar="PNG",
        help="also draw the record into this file, bars and a roofline (needs matplotlib: the extra "
        "cli)")  # fmt: skip
    add("--list", action="store_true", help="list shapes, gates and passes, measure nothing")


def run(args: argparse.Namespace, screen: Screen) -> tuple[int, dict[str, Any]]:
    import torch

    from kernel_fun.bench import machine, plot, runner, suite

    if args.family not in suite.FAMILIES:
        raise ValueError(f"`--family` must be one of {', '.join(suite.FAMILIES)}, got {args.family!r}")
    family = suite.load(args.family)
    if args.list:
        names = {name: str(shape) for name, shape in family.SHAPES.items()}
        sizes = [(name, text.removeprefix(name).strip(" ()")) for name, text in names.items()]
        screen.table("shapes", ("name", "sizes"), sizes)
        screen.line(f"gates: {', '.join(family.GATES)}; passes: {', '.join(family.PASSES)}")
        return 0, {"shapes": names, "gates": list(family.GATES), "passes": list(family.PASSES)}
    if not 0 < args.seconds < math.inf:
        raise ValueError(f"`--seconds` must be positive and finite, got {args.seconds}")
    if args.cp is not None and args.plot is not None:
        raise ValueError(f"`--plot` draws no ranks, got {args.plot} with --cp {args.cp}")
    _check_places(args.out, args.plot)
    if args.cp is not None:
        return _context_parallel(args, screen)
    if args.layout is not None:
        raise ValueError(f"`--layout` is of ranks: it needs `--cp`, got {args.layout!r} alone")
    device = machine.usable("--device", args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    taken = runner.measure(
        runner.Request(
            family=args.family,
            shapes=args.shape or family.DEFAULT[device.type],
            gates=args.gate or list(family.GATES)[:1],
            passes=args.what or family.PASSES,
            dtype=getattr(torch, dtype),
            device=device,
            candidates=args.candidate,
            seconds=args.seconds,
            cold=args.cold,
        ),
        screen.line,
    )
    taken.made_at(args.commit)
    _show(taken, screen)
    _write(taken, args.out, screen)
    if args.plot is not None:
        plot.draw(taken, args.plot)
        screen.line(f"wrote {args.plot}")
    failed = any(s.reason.startswith("wrong result") for s in taken.skipped)
    return 1 if failed or not taken.rows else 0, taken.as_json()


def _context_parallel(args: argparse.Namespace, screen: Screen) -> tuple[int, dict[str, Any]]:
    from kernel_fun.bench import suite

    family: Any = suite.load("context_parallel")
    gate = (args.gate or ["softplus_random"])[0]
    candidates = family.candidates_here(args.candidate)
    taken = family.measure(
        args.cp, args.shape or family.DEFAULT, gate, candidates, args.layout or "contiguous"
    )
    taken.made_at(args.commit)
    screen.table(
        f"{taken.gpu}, {gate}, bfloat16",
        ("shape", "what", "candidate", "ms", "p20 - p80", "memory of a rank"),
        [
            (r.shape, r.bench, r.candidate, _number(r.ms.p50), f"{_number(r.ms.p20)} - {_number(r.ms.p80)}",
             memory(r.peak_bytes))
            for r in taken.rows
        ],
        numbers=3,
    )  # fmt: skip
    found = family.efficiencies(taken, args.cp)
    for shape, what, candidate, efficiency in found:
        screen.line(f"{candidate}, {what} at {shape}: efficiency of {args.cp} ranks {efficiency:.1%}")
    for s in taken.skipped:
        screen.line(f"not timed: {s.candidate} at {s.shape}: {s.reason}")
    _write(taken, args.out, screen)
    return 0 if found else 1, taken.as_json()


def _check_places(out: Path | None, png: Path | None) -> None:
    """ValueError for a place nothing can be written to, before anything is measured."""
    from kernel_fun.bench import plot

    if out is not None:
        places.check("--out", out, is_file=out.suffix == ".json", replaces=False)
    if png is not None:
        plot.check(png)
        places.check("--plot", png, is_file=True, replaces=True)


def _write(taken: Record, out: Path | None, screen: Screen) -> None:
    if out is not None:
        path = out if out.suffix == ".json" else taken.default_path(out)
        taken.write(path)
        screen.line(f"wrote {path}")


def _show(taken: Record, screen: Screen) -> None:
    cases = list(dict.fromkeys((r.bench, r.shape, r.gate) for r in taken.rows))
    for case in cases:
        rows = [r for r in taken.rows if (r.bench, r.shape, r.gate) == case]
        _show_case(rows, taken, screen)
    screen.line(
        f"{taken.gpu}, {taken.threads} CPU threads, torch {taken.versions['torch']}; copy "
        f"{taken.ceilings['copy_TBps']:.3g} TB/s, matrix product "
        f"{taken.ceilings['gemm_TFLOPs']:.3g} TFLOP/s; memory: {taken.memory}"
    )
    reasons = dict.fromkeys((s.candidate, s.reason) for s in taken.skipped)
    for candidate, reason in reasons:
        style = "red" if reason.startswith("wrong result") else None
        screen.line(f"not timed: {candidate}: {reason}", style)


def _show_case(rows: list[Row], taken: Record, screen: Screen) -> None:
    best = min(r.ms.p50 for r in rows)
    screen.table(
        f"{rows[0].bench} @ {rows[0].shape}, {rows[0].gate}, {rows[0].dtype}",
        ("candidate", "ms", "p20 - p80", "x best", "memory", "host us", "first s", "of bytes",
         "of FLOPs", "worst error"),
        [
            (
                r.candidate,
                _number(r.ms.p50),
                f"{_number(r.ms.p20)} - {_number(r.ms.p80)}",
                f"{r.ms.p50 / best:.2f}",
                memory(r.peak_bytes),
                "-" if r.host_us is None else f"{r.host_us:.0f}",
                "-" if r.cold_s is None else f"{r.cold_s:.2f}",
                f"{floor_ms(r, taken)[0] / r.ms.p50:.1%}",
                f"{floor_ms(r, taken)[1] / r.ms.p50:.1%}",
                "{1} {0:.0e}".format(*max((e, n) for n, e in r.error.items())),
            )
            for r in sorted(rows, key=lambda r: r.ms.p50)
        ],
        numbers=9,
    )  # fmt: skip


def _number(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def memory(size: int) -> str:
    """A size in the unit that reads best."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def floor_ms(row: Row, taken: Record) -> tuple[float, float]:
    """Milliseconds the device's copy and matrix ceilings allow at best: (bytes, FLOPs)."""
    return (
        row.bytes / taken.ceilings["copy_TBps"] / 1e9,
        row.flops / taken.ceilings["gemm_TFLOPs"] / 1e9,
    )

"""`kernel-fun compile`: build kernels where there is no GPU, for machines that shall not compile."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

from kernel_fun._cli import explain, places
from kernel_fun._cli.screen import Screen
from kernel_fun._common import config

HELP = "build the CuTe kernels of a head shape into a directory, without a GPU; KERNEL_FUN_KERNELS loads them"


def arguments(parser: argparse.ArgumentParser) -> None:
    explain.problem_arguments(parser)
    add = parser.add_argument
    add("--arch", default="sm_90a", help="target (default: sm_90a)")
    add("--out", type=places.named, required=True, metavar="DIR", help="where the kernels go")
    add("--exactly", action="store_true", help="only what the one call described needs; default: also other "
        "batches, packed sequences, prefill into a cache, and continuing from one")  # fmt: skip


def run(args: argparse.Namespace, screen: Screen) -> tuple[int, dict[str, Any]]:
    from kernel_fun.warming import build

    described = explain.problem(args)
    problems = [described]
    if not args.exactly:
        inference = replace(described, needs_grad=False, keep=False, wants_ht=True)
        dense = (described, inference, replace(inference, has_h0=True))
        problems += [replace(p, B=1, N=N) for N in (None, 2) for p in dense]  # one of each kind is followed
    report = build(
        problems, args.arch, args.out, exactly=args.exactly, on_kernel=lambda entry: screen.line(str(entry))
    )
    seconds = sum(entry.seconds for entry in report)
    screen.line(f"{len(report)} kernels for {args.arch} in {args.out}, {seconds:.1f} s")
    screen.line(f"to use them: {config.KERNELS.name}={args.out.resolve()}")
    return 0, {
        "arch": args.arch,
        "out": str(args.out),
        "seconds": seconds,
        "kernels": [asdict(e) for e in report],
    }

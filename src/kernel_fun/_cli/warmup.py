"""`kernel-fun warmup`: compile and load what a first call would wait for."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from kernel_fun._cli.screen import Screen

HELP = "compile the kernels of one head shape and run them once, so that no training step waits"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--K", type=int, default=128, metavar="N", help="key head dim (default: 128)")
    add("--V", type=int, default=128, metavar="N", help="value head dim (default: 128)")
    add("--HV", type=int, default=16, metavar="N", help="value heads (default: 16)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda", help="default: cuda")
    add("--l2norm", action=argparse.BooleanOptionalAction, default=True)
    add("--gate-in-kernel", action=argparse.BooleanOptionalAction, default=True)


def run(args: argparse.Namespace, screen: Screen) -> tuple[int, dict[str, Any]]:
    import torch

    from kernel_fun._cute import objects
    from kernel_fun.bench import machine
    from kernel_fun.kda import warmup

    machine.named("--device", args.device)
    try:
        seconds = warmup(
            K=args.K,
            V=args.V,
            HV=args.HV,
            dtype=getattr(torch, args.dtype),
            device=args.device,
            use_qk_l2norm=args.l2norm,
            use_gate_in_kernel=args.gate_in_kernel,
        )
    except RuntimeError as error:  # nothing was warmed, and the message says why
        screen.line(str(error), "red")
        return 1, {"error": str(error)}
    what = f"K={args.K} V={args.V} HV={args.HV} {args.dtype} on {args.device}"
    kernels = objects.ready()
    for kernel in kernels:
        screen.line(f"{kernel.seconds:8.2f} s  {kernel.how:14}  {kernel.name} {kernel.config}")
    screen.line(f"warm: chunk_kda {what}, {seconds:.1f} s")
    return 0, {"seconds": seconds, "problem": what, "kernels": [asdict(k) for k in kernels]}

"""The first forward and backward of causal_conv1d in fresh processes, with Triton's cache empty, then warm.

    python -m benchmarks.cconv_cold [--shape b16_8k_d2048] [--out benchmarks/runs]

Of each process: how long torch took to import and the GPU to be ready; then, with the inputs there, the
import of kernel_fun.cconv, the first forward and the first backward, each until the device is idle.
`call_s` is forward and backward, `from_import_s` is from before the import to the end of the backward. In
the last process torch has done a backward of its own before: what the first one costs whatever the
operation is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WARM = 2
"""Processes that find a warm cache."""


def child(sizes: Sequence[int], device: str, after_torch: bool) -> dict[str, float]:
    """In a fresh process: seconds of each step, and of a second call."""
    B, T, D, W = sizes
    marks = [("", time.perf_counter())]

    def done(step: str) -> None:
        if device != "cpu":
            torch.cuda.synchronize()
        marks.append((step, time.perf_counter()))

    import torch

    marks.append(("import_torch_s", time.perf_counter()))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.zeros(8, device=device).sum().item()
    done("device_s")
    x, dy = (torch.randn(B, T, D, device=device, dtype=dtype) for _ in range(2))
    weight = torch.randn(D, W, device=device)
    x.requires_grad_()
    weight.requires_grad_()
    done("inputs_s")
    if after_torch:
        (torch.zeros(8, device=device, requires_grad=True) * 2).backward(torch.ones(8, device=device))
        done("backward_of_torch_s")
    start = time.perf_counter()
    from kernel_fun.cconv import causal_conv1d

    done("import_s")
    y, _ = causal_conv1d(x, weight, activation="silu")
    done("forward_s")
    torch.autograd.grad(y, (x, weight), dy)
    done("backward_s")
    end = time.perf_counter()
    torch.autograd.grad(causal_conv1d(x, weight, activation="silu")[0], (x, weight), dy)
    done("second_call_s")
    steps = {name: after - before for (_, before), (name, after) in zip(marks, marks[1:])}
    return {**steps, "call_s": steps["forward_s"] + steps["backward_s"], "from_import_s": end - start}


def in_fresh_process(
    sizes: Sequence[int], device: str, backend: str, cache: Path, after_torch: bool
) -> dict[str, Any]:
    """:func:`child`, and the seconds of the whole process. RuntimeError with its last line if it fails."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "KERNEL_FUN_CCONV_BACKEND": backend}
    command = [
        sys.executable,
        "-m",
        "benchmarks.cconv_cold",
        "--child",
        json.dumps([*sizes]),
        "--device",
        device,
    ]
    start = time.perf_counter()
    ran = subprocess.run(
        [*command, *["--after-torch"] * after_torch],
        env=environment,
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"causal_conv1d in a fresh process: {last}")
    return {**json.loads(ran.stdout.strip().splitlines()[-1]), "process_s": seconds}


def measure(sizes: Sequence[int], device: str, backend: str) -> list[dict[str, Any]]:
    """The processes one after another: the one that fills the cache, the warm ones, the one after torch."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(WARM + 2):
            after_torch = i == WARM + 1
            ran = in_fresh_process(sizes, device, backend, Path(folder), after_torch)
            found.append({"cache": "warm" if i else "empty", "after_a_backward_of_torch": after_torch, **ran})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="b16_8k_d2048")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit of a clean copy that has no git")
    parser.add_argument("--out", type=Path, help="folder of runs, or a .json file (default: none)")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--after-torch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child is not None:
        print(json.dumps(child(args.child, args.device, args.after_torch)))
        return 0
    import torch

    from . import runs
    from .cconv import SHAPES

    if args.shape not in SHAPES:
        parser.error(f"--shape must be one of {', '.join(SHAPES)}, got {args.shape}")
    shape = SHAPES[args.shape]
    found = measure((shape.B, shape.T, shape.D, shape.W), args.device, args.backend)
    for r in found:
        after = ", after a backward of torch's own" * r["after_a_backward_of_torch"]
        print(
            f"{r['cache']} cache{after}: call {r['call_s']:.2f} s (forward {r['forward_s']:.2f}, backward "
            f"{r['backward_s']:.2f}), from import {r['from_import_s']:.2f}, process {r['process_s']:.2f}"
        )
    if args.out is not None:
        about = runs.made(torch.device(args.device), args.commit)
        about = {**about, "backend": args.backend, "shape": str(shape), "processes": found}
        print(f"wrote {runs.write(args.out, about, 'cconv-cold')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

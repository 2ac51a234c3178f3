"""The first forward and backward of an operation in fresh processes, with empty caches, then warm ones.

    python -m benchmarks.cold cconv|kda [--shape b16_8k_d2048] [--out benchmarks/runs]

The caches are those of Triton and of our CuTe kernels, in a folder of their own; KERNEL_FUN_KERNELS is
ignored, so that kda needs the compiler. Of each process: how long torch took to import and the GPU to be
ready; then, with the inputs there, the import of the operation, the first forward and the first
backward, each until the device is idle. `call_s` is forward and backward, `from_import_s` is from before the
import to the end of the backward. In the last process torch has done a backward of its own before: what the
first one costs whatever the operation is not in it.
"""

from __future__ import annotations

import argparse
import importlib
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

FAMILIES = {
    "cconv": ("causal_conv1d", "b16_8k_d2048", "triton"),
    "kda": ("chunk_kda", "b8_4k_h32", "sm90"),
}
"""Family -> its operation, and the shape and the backend unless others are asked for."""


def inputs_of(family: str, sizes: Sequence[int], device: str) -> tuple[list[Any], dict[str, Any], Any]:
    """What has a gradient, the other arguments, and dy. ``sizes``: those of the family's shape, in order."""
    import torch

    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    if family == "cconv":
        B, T, D, W = sizes
        leaves, others = [random(B, T, D), random(D, W, dtype=torch.float32)], {"activation": "silu"}
        dy = random(B, T, D)
    else:
        B, T, H, HV, K, V = sizes
        leaves = [
            random(B, T, H, K),
            random(B, T, H, K),
            random(B, T, HV, V),
            random(B, T, HV, K),
            random(B, T, HV),
        ]
        flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
        others = {
            "A_log": random(HV, dtype=torch.float32),
            "dt_bias": random(HV * K, dtype=torch.float32),
            **dict.fromkeys(flags, True),
        }
        dy = random(B, T, HV, V)
    return [x.requires_grad_() for x in leaves], others, dy


def child(family: str, sizes: Sequence[int], device: str, after_torch: bool) -> dict[str, float]:
    """In a fresh process: seconds of each step, and of a second call."""
    marks = [("", time.perf_counter())]

    def done(step: str) -> None:
        if device != "cpu":
            torch.cuda.synchronize()
        marks.append((step, time.perf_counter()))

    import torch

    marks.append(("import_torch_s", time.perf_counter()))
    torch.zeros(8, device=device).sum().item()
    done("device_s")
    leaves, others, dy = inputs_of(family, sizes, device)
    done("inputs_s")
    if after_torch:
        (torch.zeros(8, device=device, requires_grad=True) * 2).backward(torch.ones(8, device=device))
        done("backward_of_torch_s")
    start = time.perf_counter()
    op = getattr(importlib.import_module(f"kernel_fun.{family}"), FAMILIES[family][0])
    done("import_s")
    y = op(*leaves, **others)[0]
    done("forward_s")
    torch.autograd.grad(y, leaves, dy)
    done("backward_s")
    end = time.perf_counter()
    torch.autograd.grad(op(*leaves, **others)[0], leaves, dy)
    done("second_call_s")
    steps = {name: after - before for (_, before), (name, after) in zip(marks, marks[1:])}
    return {**steps, "call_s": steps["forward_s"] + steps["backward_s"], "from_import_s": end - start}


def in_fresh_process(
    family: str, sizes: Sequence[int], device: str, backend: str, caches: Path, after_torch: bool
) -> dict[str, Any]:
    """:func:`child`, and the seconds of the whole process. RuntimeError with its last line if it fails."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "KERNEL_FUN_KERNELS"},
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "KERNEL_FUN_CACHE_DIR": str(caches / "kernel-fun"),
        f"KERNEL_FUN_{family.upper()}_BACKEND": backend,
    }
    command = [
        sys.executable,
        "-m",
        "benchmarks.cold",
        family,
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
        raise RuntimeError(f"{FAMILIES[family][0]} in a fresh process: {last}")
    return {**json.loads(ran.stdout.strip().splitlines()[-1]), "process_s": seconds}


def measure(family: str, sizes: Sequence[int], device: str, backend: str) -> list[dict[str, Any]]:
    """The processes one after another: the one that fills the cache, the warm ones, the one after torch."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(WARM + 2):
            after_torch = i == WARM + 1
            ran = in_fresh_process(family, sizes, device, backend, Path(folder), after_torch)
            found.append({"cache": "warm" if i else "empty", "after_a_backward_of_torch": after_torch, **ran})
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--shape", help="one of the family's")
    parser.add_argument("--backend")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit of a clean copy that has no git")
    parser.add_argument("--out", type=Path, help="folder of runs, or a .json file (default: none)")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--after-torch", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child is not None:
        print(json.dumps(child(args.family, args.child, args.device, args.after_torch)))
        return 0
    import torch

    from kernel_fun.bench import machine

    from . import runs

    try:
        machine.usable("--device", args.device)
    except ValueError as error:
        parser.error(str(error))
    shapes = importlib.import_module(f"benchmarks.{args.family}").SHAPES
    _, usual_shape, usual_backend = FAMILIES[args.family]
    name, backend = args.shape or usual_shape, args.backend or usual_backend
    if name not in shapes:
        parser.error(f"--shape must be one of {', '.join(shapes)}, got {name}")
    shape = shapes[name]
    sizes = "BTDW" if args.family == "cconv" else ("B", "T", "H", "HV", "K", "V")
    found = measure(args.family, [getattr(shape, x) for x in sizes], args.device, backend)
    for r in found:
        after = ", after a backward of torch's own" * r["after_a_backward_of_torch"]
        print(
            f"{r['cache']} cache{after}: call {r['call_s']:.2f} s (forward {r['forward_s']:.2f}, backward "
            f"{r['backward_s']:.2f}), from import {r['from_import_s']:.2f}, process {r['process_s']:.2f}"
        )
    if args.out is not None:
        about = runs.made(torch.device(args.device), args.commit)
        about = {**about, "backend": backend, "shape": str(shape), "processes": found}
        print(f"wrote {runs.write(args.out, about, f'{args.family}-cold')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

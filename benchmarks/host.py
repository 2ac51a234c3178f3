"""What chunk_kda costs the host: the first call of a fresh process, and a warm call beside torch's own share.

    python -m benchmarks.host [--candidate sm90] [--out benchmarks/runs]

A warm call is timed from the call until it returns, the device idle before it, at a size where the kernels
take less than the host; a forward also among others, none of them waited for. Below stand times of the same
machine that no code of ours can go under: each launch alone, an allocation, a sum, and torch's autograd
around a Function that computes nothing. A thread of the autograd engine takes a backward over, and waking
threads that slept costs more the longer they slept; so the Function is timed a second time holding each pass
as long as ours.
`torch.autograd.set_multithreading_enabled(False)` keeps the backward in the calling thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kernel_fun._common import config
from kernel_fun.bench import probe
from kernel_fun.kda import autograd, chunk_kda

from . import runs
from .shapes import SHAPES

COLD = (("kimi_8k", "bounded"), ("b8_4k_h32", "softplus_random"))
SMALL = {"B": 1, "T": 512, "H": 32, "K": 128, "V": 128}
REPEATS, WARM_S = 200, 0.5
"""Calls that are timed, and seconds of calls before them: a process that has just begun, on a host that was
idle, is slower than one at work."""


def median_us(call: Callable[[], Any], device: torch.device) -> float:
    """Median host time of a warm call, begun on an idle device."""
    taken: list[float] = []
    warm_until = time.perf_counter() + WARM_S
    while len(taken) < REPEATS:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if start > warm_until:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def in_a_row_us(call: Callable[[], Any], device: torch.device) -> float:
    """Median time from one warm call to the next, none of them waited for: what the host takes where it takes
    longer than the kernels. The device must not hold them back, so they are few."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun: list[float] = []
    for _ in range(2 * REPEATS):
        begun.append(time.perf_counter())
        call()
    return statistics.median([b - a for a, b in pairwise(begun)]) * 1e6


def inputs(device: torch.device, **sizes: int) -> dict[str, Any]:
    """Leaves, and the flags of a KDA layer."""
    B, T, H, K, V = (sizes[letter] for letter in ("B", "T", "H", "K", "V"))

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    flags = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    return {
        "q": leaf(B, T, H, K),
        "k": leaf(B, T, H, K),
        "v": leaf(B, T, H, V),
        "g": leaf(B, T, H, K),
        "beta": leaf(B, T, H),
        "A_log": leaf(H, dtype=torch.float32),
        "dt_bias": leaf(H * K, dtype=torch.float32),
        **dict.fromkeys(flags, True),
    }


def warm(device: torch.device, sizes: dict[str, int]) -> dict[str, float]:
    """Host times of warm calls, in microseconds."""
    x = inputs(device, **sizes)
    leaves = [t for t in x.values() if isinstance(t, torch.Tensor)]
    do = torch.ones_like(x["v"])

    def forward() -> torch.Tensor:
        return chunk_kda(**x)[0]

    def both() -> None:
        torch.autograd.grad(forward(), leaves, do)

    with torch.no_grad():
        found = {
            "forward, no graph": median_us(forward, device),
            "forward, no graph, calls in a row": in_a_row_us(forward, device),
        }
    found["forward"] = median_us(forward, device)
    found["forward and backward"] = median_us(both, device)
    with backward_timed() as taken:
        median_us(both, device)
    found["of which backward"] = statistics.median(taken[-REPEATS:]) * 1e6
    with torch.autograd.set_multithreading_enabled(False):
        found["forward and backward, one thread"] = median_us(both, device)
    passes = found["forward"], found["of which backward"]
    found["autograd alone"] = standing_us(device, 0.0, 0.0)
    found["autograd alone, passes as long as ours"] = standing_us(device, *passes)
    with torch.autograd.set_multithreading_enabled(False):
        found["autograd alone, passes as long as ours, one thread"] = standing_us(device, *passes)
    empty = torch.empty(SMALL["T"], device=device)
    found["an allocation"] = median_us(lambda: torch.empty_like(empty), device)
    partial = torch.zeros(8, sizes["H"], sizes["K"], device=device)
    found["a sum over chunks"] = median_us(lambda: partial.sum(0), device)
    return found | launches(both, device)


@contextmanager
def backward_timed() -> Generator[list[float]]:
    """Within the block the time each backward takes, in seconds, is appended to the list."""
    real, taken = autograd.ChunkKDA.backward, list[float]()

    def timed(ctx: Any, *upstream: Any) -> Any:
        start = time.perf_counter()
        results = real(ctx, *upstream)
        taken.append(time.perf_counter() - start)
        return results

    autograd.ChunkKDA.backward = staticmethod(timed)
    try:
        yield taken
    finally:
        autograd.ChunkKDA.backward = staticmethod(real)


class Standing(torch.autograd.Function):
    """Seven inputs and their gradients, fifteen tensors saved, and nothing computed for a while."""

    @staticmethod
    def forward(ctx: Any, passes: tuple[float, float], *tensors: torch.Tensor) -> torch.Tensor:
        _stand(passes[0])
        ctx.passes = passes
        ctx.save_for_backward(*tensors, *[t.detach() for t in tensors], tensors[0])
        return tensors[0].detach()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        _stand(ctx.passes[1])
        return (None, *saved[7:14])


def _stand(microseconds: float) -> None:
    until = time.perf_counter() + microseconds * 1e-6
    while time.perf_counter() < until:
        pass


def standing_us(device: torch.device, forward: float, backward: float) -> float:
    """What autograd adds to passes that take so long."""
    leaves = [torch.zeros(8, device=device, requires_grad=True) for _ in range(7)]
    do = torch.ones(8, device=device)

    def both() -> None:
        torch.autograd.grad(Standing.apply((forward, backward), *leaves), leaves, do)

    return median_us(both, device) - forward - backward


def launches(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Each kernel launch that a call makes, alone, in order."""
    from kernel_fun._cute.compile import Jit

    made: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = []
    real = Jit.__call__

    def recording(self: Any, config: Any) -> Callable[..., None]:
        launch = real(self, config)

        def record_and_launch(*tensors: Any) -> None:
            made.append((self.module.rpartition(".")[2], launch, tensors))
            launch(*tensors)

        return record_and_launch

    Jit.__call__ = recording
    try:
        call()
    finally:
        Jit.__call__ = real
    return {
        f"launch {i}: {name}": median_us(lambda launch=launch, given=given: launch(*given), device)
        for i, (name, launch, given) in enumerate(made, 1)
    }


def cold(candidate: str, device: torch.device) -> list[dict[str, Any]]:
    """The first forward and backward of fresh processes."""
    found: list[dict[str, Any]] = []
    for shape, gate in COLD:
        start = time.perf_counter()
        fresh = probe.in_fresh_process("kda", shape, gate, "bfloat16", str(device), candidate, "fwdbwd")
        found.append(
            {
                "shape": str(SHAPES[shape]),
                "gate": gate,
                "cold_s": fresh["cold_s"],
                "process_s": time.perf_counter() - start,
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--candidate", default="sm90")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-cold", action="store_true", help="no fresh processes")
    parser.add_argument("--commit", help="commit of a clean copy that has no git")
    parser.add_argument("--out", type=Path, help="folder of runs, or a .json file (default: none)")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    data: dict[str, Any] = {
        **runs.made(device, args.commit),
        "candidate": args.candidate,
        "prebuilt": bool(config.KERNELS.read()),
        "cold": [] if args.no_cold else cold(args.candidate, device),
        "sizes": SMALL,
    }
    with config.KDA_BACKEND.set(args.candidate):
        data["host_us"] = warm(device, SMALL)
    for case in data["cold"]:
        print(f"cold {case['shape']} {case['gate']}: {case['cold_s']:.2f} s")
    for what, microseconds in data["host_us"].items():
        print(f"{what}: {microseconds:.0f} us")
    if args.out is not None:
        print(f"wrote {runs.write(args.out, data, f'host-{args.candidate}')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

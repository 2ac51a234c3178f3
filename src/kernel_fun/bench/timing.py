"""How a time, a peak and a ceiling are measured. Times in milliseconds, memory in bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

#: GPU clock cycles of idling before a timed launch, so that the host is ahead of the device.
_HEAD_START_CYCLES = 4_000_000
#: Bytes written between launches: more than the L2 of any GPU the package runs on.
_FLUSH_BYTES = 512 << 20


@dataclass(frozen=True)
class Quantiles:
    """20th, 50th and 80th percentile in milliseconds."""

    p20: float
    p50: float
    p80: float

    @staticmethod
    def of(samples: list[float]) -> Quantiles:
        """Quantiles by linear interpolation; ValueError without a sample."""
        if not samples:
            raise ValueError("no sample was taken")
        ordered = torch.tensor(samples, dtype=torch.float64)
        levels = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        p20, p50, p80 = torch.quantile(ordered, levels).tolist()
        return Quantiles(p20, p50, p80)


def interleaved(
    calls: Mapping[str, Call], device: torch.device, *, seconds: float, least: int = 5, most: int = 200
) -> dict[str, list[float]]:
    """Times every call in turn, round after round, so that all see the same machine.

    The first of a round rotates. Every call has been made once before: nothing is compiled here.

    Args:
        seconds: stop starting rounds after this long.
        least, most: rounds to run whatever the time.
    """
    timed = _Cuda(device).ms if device.type == "cuda" else _cpu_ms
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    start = time.perf_counter()
    for i in range(most):
        if i >= least and time.perf_counter() - start > seconds:
            break
        for name in (*names[i % len(names) :], *names[: i % len(names)]):
            samples[name].append(timed(calls[name]))
    return samples


def _cpu_ms(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


class _Cuda:
    """Device time of one call between two events, with a cold L2 and the host ahead."""

    def __init__(self, device: torch.device) -> None:
        self.flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def ms(self, call: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(_HEAD_START_CYCLES)  # pyright: ignore
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def host_us(call: Call, device: torch.device, repeats: int = 100) -> float | None:
    """Median time until a warm call returns, the device idle before it; None where the host computes."""
    if device.type != "cuda":
        return None
    call()
    samples: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        samples.append(_cpu_ms(call) * 1e3)
    torch.cuda.synchronize(device)
    return Quantiles.of(samples).p50


def cuda_peak_bytes(call: Call, device: torch.device) -> int:
    """Most memory a call holds from torch's allocator beyond what was held before."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def ceilings(device: torch.device) -> dict[str, float]:
    """What the device reaches: copy (read + written) in TB/s, square matrix product in TFLOP/s.

    The product is bf16 8192^3 on a GPU and fp32 1024^3 on the CPU, the dtype each is used in.
    """
    on_gpu = device.type == "cuda"
    source = torch.empty((2 << 30) if on_gpu else (128 << 20), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    n, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source), "gemm": lambda: a @ b}
    for call in calls.values():
        call()
    samples = interleaved(calls, device, seconds=1.0, least=5, most=20)
    copy, gemm = (Quantiles.of(samples[name]).p50 * 1e-3 for name in ("copy", "gemm"))
    return {
        "copy_TBps": 2 * source.numel() / copy / 1e12,
        "gemm_TFLOPs": 2 * n**3 / gemm / 1e12,
    }

"""What this machine has: its devices, and which backends can run on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_fun._common import support

if TYPE_CHECKING:
    import torch


def devices() -> list[dict[str, Any]]:
    """The CPU, then every CUDA device torch sees."""
    import platform

    import torch

    from kernel_fun._common import device

    found: list[dict[str, Any]] = [
        {
            "device": "cpu",
            "arch": "cpu",
            "name": _cpu_name() or platform.machine(),
            "detail": f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        }
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = device.of(torch.device("cuda", index))
        memory = torch.cuda.mem_get_info(index)[1] / 2**30
        found.append(
            {
                "device": f"cuda:{index}",
                "arch": facts.arch,
                "name": facts.name,
                "detail": f"{facts.sms} SMs, {memory:.0f} GiB, CUDA {torch.version.cuda}",
            }
        )
    return found


def named(flag: str, word: str | torch.device) -> torch.device:
    """The device a flag names. ValueError where it is neither the CPU nor a CUDA device, of any machine."""
    import torch

    try:
        found = torch.device(word)
    except RuntimeError:
        found = None
    if found is not None and str(found) in ("cpu", "cpu:0"):
        return torch.device("cpu")
    if found is None or found.type != "cuda":
        raise ValueError(f"`{flag}` must be cpu, cuda or cuda:N, got {str(word)!r}")
    return found


def usable(flag: str, word: str | torch.device) -> torch.device:
    """The device a flag names. ValueError where it is neither the CPU nor a CUDA device torch sees."""
    import torch

    found = named(flag, word)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        sees = f"only {', '.join(f'cuda:{i}' for i in range(count))}" if count else "no CUDA device"
        raise ValueError(f"`{flag}` must be a device of this machine, got {str(word)!r}: torch sees {sees}")
    return found


def _cpu_name() -> str | None:
    """The processor's own name, where the kernel tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return None


def unavailable(backend: str, found: list[dict[str, Any]]) -> str | None:
    """Why a backend of chunk_kda cannot run on this machine, or None."""
    from kernel_fun.kda.dispatch import STAGES

    if backend == "eager":
        return None
    archs = {d["arch"] for d in found}
    on_cuda = any(d["device"].startswith("cuda") for d in found)
    if backend == "fla":
        return support.missing("fla") or (None if on_cuda else "fla runs on CUDA, no CUDA device here")
    without = [s.name for s in STAGES if all(i.backend != backend for i in s.impls)]
    if without:
        return f"no kernel for {', '.join(without)} of chunk_kda in this release"
    missing = support.missing("triton" if backend == "triton" else "cute")
    if missing is not None:
        return missing
    if backend == "triton":
        return None if on_cuda else "needs a CUDA device"
    return None if backend in archs else f"needs a device of {backend}, here: {', '.join(archs)}"

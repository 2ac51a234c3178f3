"""Facts about a device, as plain data, so that plans for any device can be made anywhere."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Device:
    """A device as the dispatcher sees it.

    ``arch`` is ``cpu``, ``sm90``, ``sm100`` (capabilities 10.0 and 10.3, one instruction set
    family), another ``smXY``, or the torch device type for anything else.
    """

    type: str
    arch: str
    name: str
    sms: int = 0
    smem_bytes: int = 0


_NAMED = {
    "cpu": Device("cpu", "cpu", "CPU"),
    "sm80": Device("cuda", "sm80", "A100", 108, 166_912),
    "sm90": Device("cuda", "sm90", "H100/H200", 132, 232_448),
    "sm100": Device("cuda", "sm100", "B200", 148, 232_448),
}
ARCHS = tuple(_NAMED)


def named(arch: str) -> Device:
    """A typical device of an architecture, for planning without one."""
    if arch not in _NAMED:
        raise ValueError(f"arch must be one of {', '.join(_NAMED)}, got {arch!r}")
    return _NAMED[arch]


def arch_of(capability: tuple[int, int]) -> str:
    """Architecture family of a CUDA compute capability."""
    major, minor = capability
    return "sm100" if (major, minor) in ((10, 0), (10, 3)) else f"sm{major}{minor}"


_pretended: Device | None = None


@contextmanager
def pretend(arch: str) -> Generator[None]:
    """Within the block every tensor counts as one on a typical device of an architecture, so that a plan
    for it can be followed to the launches where no such device is."""
    global _pretended
    from kernel_fun._common import known

    known.forget()  # answers name tensors by their device, which now counts as another
    before, _pretended = _pretended, named(arch)
    try:
        yield
    finally:
        _pretended = before
        known.forget()


def of(device: torch.device) -> Device:
    """Facts of a torch device; CUDA properties are read once per device index."""
    if _pretended is not None:
        return _pretended
    if device.type != "cuda":
        return _NAMED["cpu"] if device.type == "cpu" else Device(device.type, device.type, device.type)
    import torch

    return _cuda(int(device.index if ":" in str(device) else torch.cuda.current_device()))


@cache
def _cuda(index: int) -> Device:
    import torch

    p = torch.cuda.get_device_properties(index)
    smem = int(getattr(p, "shared_memory_per_block_optin", 0))
    return Device("cuda", arch_of((p.major, p.minor)), p.name, p.multi_processor_count, smem)

"""One call in a fresh process: how long the first takes, and on the CPU what it adds to memory.

`python -m kernel_fun.bench.probe FAMILY SHAPE GATE DTYPE DEVICE CANDIDATE PASS` prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def in_fresh_process(
    family: str, shape: str, gate: str, dtype: str, device: str, candidate: str, what: str
) -> dict[str, Any]:
    """Runs the probe; RuntimeError with the last line it wrote if it fails."""
    command = [sys.executable, "-m", __name__, family, shape, gate, dtype, device, candidate, what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{candidate} in a fresh process: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(argv: list[str]) -> int:
    import torch

    from kernel_fun.bench import suite

    name, shape, gate, dtype, where, candidate, what = argv
    family, device = suite.load(name), torch.device(where)
    case = family.case(family.SHAPES[shape], gate, getattr(torch, dtype), device)
    call = family.caller(candidate, case, what)
    (torch.randn(64, 64, device=device) @ torch.randn(64, 64, device=device)).sum().item()

    before = _resident() if where == "cpu" else 0
    start = time.perf_counter()
    kept = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    peak = _peak_resident() - before if where == "cpu" else None
    del kept
    sys.stdout.write(json.dumps({"cold_s": seconds, "peak_bytes": peak}) + "\n")
    return 0


def _resident() -> int:
    """Resident set of this process in bytes. Its peak is forgotten; where the kernel refuses that, what
    :func:`_peak_resident` says of a later call is at least what that call took."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS") or _peak_resident()


def _peak_resident() -> int:
    """Peak resident set in bytes: since :func:`_resident` on Linux, since the start elsewhere."""
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(name: str) -> int | None:
    """A field of Linux's account of this process, in bytes; None elsewhere."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

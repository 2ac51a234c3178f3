"""What ptxas made of a kernel's groups of products."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest


def waits(content: bytes, folder: Path) -> list[int]:
    """How many groups of products each wait leaves in flight, in program order."""
    found = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d+)", disassembled(content, folder))
    return [int(n, 16) for n in found]


def disassembled(content: bytes, folder: Path) -> str:
    """The machine code of a kernel as text."""
    from kernel_fun._cute import inspect

    tool = shutil.which("nvdisasm")
    if tool is None:
        triton = pytest.importorskip("triton")
        tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm")
    if not Path(tool).exists():
        pytest.skip("no nvdisasm")
    (folder / "kernel.cubin").write_bytes(next(inspect._cuda_elfs(content)))
    return subprocess.run(
        [tool, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout

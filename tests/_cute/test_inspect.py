"""Registers and stack are read from real machine code; garbage is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from tests._cute import scaler

from kernel_fun._cute import inspect
from kernel_fun._cute.compile import Jit


def test_resources_of_a_compiled_kernel(cache_dir: Path):
    (kernel,) = inspect.resources(Jit(scaler.build, "sm_90a").object(scaler.Config(64)))
    assert "scaler" in kernel.name
    assert 4 <= kernel.registers <= 32
    assert kernel.stack_bytes == 0


@pytest.mark.parametrize("content", [b"", b"\x7fELF" + bytes(200), bytes(1000)])
def test_no_kernel_is_an_error(content: bytes):
    with pytest.raises(ValueError, match="found none"):
        inspect.resources(content)

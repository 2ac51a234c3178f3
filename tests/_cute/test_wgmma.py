"""The register layouts the verbs rely on, and their compiled form."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutlass import BFloat16, Float32, Int32, cute
from tests._cute import tiles

from kernel_fun._cute import inspect, wgmma
from kernel_fun._cute.compile import Jit


def test_an_accumulator_and_an_operand_are_the_same_registers():
    found: list[tuple[Any, ...]] = []

    @cute.jit
    def host(stream: Int32):
        thr = wgmma.mma(BFloat16, 128).get_slice(0)
        acc, rA = wgmma.accumulator(thr, 128), wgmma.operand_a(thr, 128)
        found.append((str(acc.layout), cute.size(acc), cute.size(rA), acc.element_type, rA.element_type))
        factor = cute.make_rmem_tensor((2, 16), Float32)
        found.append((cute.size(factor), str(wgmma.as_accumulator(rA, acc).layout)))

    cute.compile(host, Int32(0), options="--gpu-arch sm_90a")
    (layout, accumulated, operand, acc_type, a_type), (factors, view) = found
    assert layout == view == "((2,2,16),1,1):((1,2,4),0,0)"
    assert accumulated == operand == 2 * factors
    assert (acc_type, a_type) == (Float32, BFloat16)


def nvdisasm() -> str | None:
    found = shutil.which("nvdisasm")
    if found:
        return found
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return str(path) if path.exists() else None


def test_products_read_a_from_registers_and_run_unserialised(cache_dir: Any, tmp_path: Path):
    tool = nvdisasm()
    if tool is None:
        pytest.skip("nvdisasm is not installed")
    content = Jit(tiles.build, "sm_90a").object(tiles.Config())
    elf = next(inspect._cuda_elfs(content))
    path = tmp_path / "kernel.cubin"
    path.write_bytes(elf)
    sass = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True).stdout
    products = [line for line in sass.splitlines() if "HGMMA.64x64x16.F32.BF16" in line]
    assert len(products) == tiles.K // 16
    assert all(line.split(",")[1].strip().startswith("R") for line in products)
    assert sass.count("WARPGROUP.DEPBAR") == 1
    assert "LDSM.16.MT88.4" in sass
    assert "STSM.16.MT88.4" in sass

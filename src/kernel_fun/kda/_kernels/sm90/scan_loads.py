"""What the first STATE warp of a scan loads of every chunk, each into a slot that all warpgroups have freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from kernel_fun.kda._kernels.sm90.scan_config import DECAYS, ScanConfig


@dataclass(frozen=True)
class Loads:
    """(TMA atom, shared, global) of tiles, and rows of decays, by chunk of the chain."""

    raws: Any
    """q, k, g."""
    rows: Any
    """v or do, A, Aqk."""
    gTotal: cute.Tensor
    sTotal: cute.Tensor
    gAround: cute.Tensor
    """Decays before and after each block, which BUILD reads."""


class Loader:
    """Of a kernel with a config."""

    config: ScanConfig

    @cute.jit
    def load_raw(self, raw, at, loads: Loads, n: Int32):
        """q, k, g of chunk n, once the slot is free; the decays around its blocks to L2."""
        raw.wait_empty(at)
        barrier = raw.expect(at)
        for tma, tXsX, tXgX in loads.raws:
            cute.copy(tma, tXgX[None, n], tXsX[None, at.index], tma_bar_ptr=barrier)
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
                read_only_args=[loads.gAround[n, None].iterator.toint(), Int32(4 * self.config.K * DECAYS)],
            )

    @cute.jit
    def load_row(self, row, at, loads: Loads, n: Int32):
        """What else the kernel reads of chunk n, and its total decay, once the slot is free."""
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=32 * self.config.K)
        row.wait_empty(at)
        barrier = row.expect(at)
        for tma, tXsX, tXgX in loads.rows:
            cute.copy(tma, tXgX[None, n], tXsX[None, at.index], tma_bar_ptr=barrier)
        with cute.arch.elect_one():
            cute.copy(bulk, loads.gTotal[n, None], loads.sTotal[None, at.index], mbar_ptr=barrier)

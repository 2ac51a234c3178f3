"""What the parts of bwd_grads share: sizes, roles, places in shared memory, the compile key."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kernel_fun._cute import pipe, sweep
from kernel_fun._cute.pipe import Role
from kernel_fun._cute.tile import SMEM_BYTES
from kernel_fun.kda._kernels.sm90.chunk_config import ChunkConfig

BT = 64
EIGHTS = BT // sweep.EIGHT
CHANNELS = 128
"""Channels of an item; those past K are zeros."""
BV = 64
"""Values a turn of the ring."""
MATH = Role(0, 8, 240)
LOAD = Role(8, 4, 24)
STORE = Role(11, 1)
"""The last warp of LOAD."""
THREADS = MATH.threads + LOAD.threads
HALF_BYTES = BT * sweep.ROW_BYTES
"""64 channels, or 64 values, of 64 tokens."""
BLOCK_BYTES = 16 * sweep.ROW_BYTES
TOKEN_VECTORS = ("beta", "q_factor", "b_factor", "k_factor", "diagonal")
"""fp32 a token: beta; scale rstd, beta rstd, rstd of Q, B, K, the first two then -(dy . y) rstd^2 of the norms; dAqk_ii."""
ADDRESSES = ("q", "k", "g", "X", "Y", "A", *TOKEN_VECTORS, "base", "seen", "dvb_v")
"""Fields of shared memory that threads address by themselves."""
DO, V_NEW, DV2, V = range(4)
"""Places of the [64, 64] tiles of a ring slot."""


class Barrier(IntEnum):
    """Named barriers of the MATH role."""

    MATH = 1
    HALF = 2


@dataclass(frozen=True)
class Config(ChunkConfig):
    """Static facts of one kernel: the compile key.

    ``shared``: a query head has several value heads; dq and dk are then their fp32 shares, not yet normalised.
    """

    shared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if pipe.register_budget(THREADS, (MATH, LOAD)) < 0:
            raise ValueError("MATH and LOAD must not take more registers than a CTA gets at entry")
        if self.smem_bytes > SMEM_BYTES:
            raise ValueError(f"{self} needs {self.smem_bytes} bytes of shared memory, more than {SMEM_BYTES}")

    @property
    def stages(self) -> int:
        """Slots of the ring."""
        return 1 if self.g == "float32" else 2

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the storage."""
        ring = self.stages * 2 * (2 * CHANNELS * BV + 4 * BT * BV)
        g = (4 if self.g == "float32" else 2) * BT * CHANNELS
        tiles = 2 * (2 + 2) * BT * CHANNELS + g + 2 * 2 * BT * BT
        vectors = (len(TOKEN_VECTORS) + 2) * BT + 2 * CHANNELS + 128 // 4
        return ring + tiles + 4 * vectors + 8 * (2 * self.stages + 8)

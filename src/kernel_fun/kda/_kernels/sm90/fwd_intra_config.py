"""What the parts of fwd_intra share: sizes, roles, the compile key."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_fun._cute import trisolve
from kernel_fun._cute.tile import ALIGN_BYTES, SMEM_BYTES
from kernel_fun.kda._kernels.sm90.chunk_config import ChunkConfig

BT = 64
BC = 8
WARPS = 8
SOLVERS = 4
"""Warps that merge inverses; the first of the others asks for the next item."""

PASS = 64
"""Channels of one pass: a row of 128 bytes, two channels a lane."""

ROW_WORDS = 32
SLOT_WORDS = BC * ROW_WORDS
HALF_WORDS = BT * ROW_WORDS
THREADS = 32 * WARPS
FAR = 6
"""16 x 16 blocks below those on the diagonal, a warp each."""

CTA_RESERVED_BYTES = 1024
SM_SMEM_BYTES = 233472
SM_REGISTERS = 65536
CTAS = 2
"""CTAs of an SM: 128 registers a thread are as many as the kernel wants."""


@dataclass(frozen=True)
class Resources:
    smem_bytes: int
    threads: int
    registers: int
    """Most a thread may use."""
    ctas_per_sm: int


@dataclass(frozen=True)
class Config(ChunkConfig):
    """Static facts of one kernel: the compile key."""

    overlapped: bool = False
    """The scan runs beside it, see :mod:`overlap`: a CTA has an SM to itself and as many teams as it holds."""
    quotients: bool = False
    """Scores are made of quotients of decays, see :mod:`fwd_intra_quotients`, which bounded gates allow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quotients and not (self.gate == "bounded" and takes_quotients(self.io, self.g, self.K)):
            raise ValueError(
                f"`quotients` must be False but for bounded gates, bf16, 16-bit g and K = 128, got {self}"
            )

    @property
    def passes(self) -> int:
        return self.K // PASS

    @property
    def k_words(self) -> int:
        """32-bit words from q to k in shared memory."""
        return self.passes * HALF_WORDS

    @property
    def g_words(self) -> int:
        """32-bit words from q to g."""
        return 2 * self.k_words

    @property
    def blocks(self) -> int:
        """Blocks of tokens whose decays are known."""
        return BT // 16 if self.quotients else WARPS

    @property
    def between_words(self) -> int:
        """Decays between blocks, a word for two channels: of every far block, or of the four pairs of eights in it."""
        return FAR * (1 if self.quotients else 4) * self.K // 2

    @property
    def scales(self) -> int:
        """Three of a row; with quotients, sums of the other half of the channels as well."""
        return (6 if self.quotients else 3) * BT

    def tile_bytes(self) -> int:
        return 4 * (self.g_words + self.k_words * (2 if self.g == "float32" else 1))

    @property
    def team_bytes(self) -> int:
        """Shared memory of the threads that work on one item."""
        smem = (
            1024 + self.tile_bytes() + trisolve.TILE_BYTES + BT * BT * 2
        )  # the first: barrier, places, alignment
        smem += 4 * (BT + self.scales + (self.blocks + 1) * self.K + self.between_words)
        return -(-smem // ALIGN_BYTES) * ALIGN_BYTES if self.overlapped else smem

    @property
    def teams(self) -> int:
        """Items a CTA works on at a time."""
        return CTAS if self.overlapped else 1

    def resources(self) -> Resources:
        smem, threads = self.team_bytes * self.teams, THREADS * self.teams
        ctas = min(CTAS // self.teams, SM_SMEM_BYTES // (smem + CTA_RESERVED_BYTES))
        if smem > SMEM_BYTES:
            raise ValueError(f"shared memory of {self} is {smem} bytes, more than {SMEM_BYTES}")
        return Resources(smem, threads, min(255, SM_REGISTERS // (threads * ctas) // 8 * 8), ctas)


def takes_quotients(io: str, g: str, K: int) -> bool:
    """Whether scores can be made of quotients: bf16 has their range, and two warps share a block's channels."""
    return io == "bfloat16" and g != "float32" and K == 2 * PASS

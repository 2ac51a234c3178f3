"""What the parts of fwd_intra share: sizes, roles, the compile key."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_fun._cute import trisolve
from kernel_fun._cute.decay import GATES
from kernel_fun._cute.tile import ALIGN_BYTES, SMEM_BYTES

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
PAIRS = 24
"""Pairs of blocks, one left of the other, that are not the two of one 16 x 16 block."""

BETA_MODES = ("raw", "sigmoid", "sigmoid2")
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
class Config:
    """Static facts of one kernel: the compile key. Dtypes by torch name."""

    io: str
    g: str
    beta: str
    K: int
    gate: str
    beta_mode: str
    l2norm: bool
    has_A_log: bool
    has_dt_bias: bool
    packed: bool
    overlapped: bool = False
    """The scan runs beside it, see :mod:`overlap`: a CTA has an SM to itself and as many teams as it holds."""

    def __post_init__(self) -> None:
        floats = ("bfloat16", "float16", "float32")
        for name, given, allowed in (
            ("io", self.io, floats[:2]),
            ("g", self.g, floats),
            ("beta", self.beta, floats),
            ("K", self.K, (64, 128)),
            ("gate", self.gate, GATES),
            ("beta_mode", self.beta_mode, BETA_MODES),
        ):
            if given not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(map(str, allowed))}, got {given}")
        if self.gate == "log" and (self.has_A_log or self.has_dt_bias):
            raise ValueError("`A_log` and `dt_bias` must be None with gate 'log', which has no parameters")

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
    def between_words(self) -> int:
        """Decays between blocks, a word for two channels."""
        return PAIRS * self.K // 2

    def tile_bytes(self) -> int:
        return 4 * (self.g_words + self.k_words * (2 if self.g == "float32" else 1))

    @property
    def team_bytes(self) -> int:
        """Shared memory of the threads that work on one item."""
        smem = (
            1024 + self.tile_bytes() + trisolve.TILE_BYTES + BT * BT * 2
        )  # the first: barrier, places, alignment
        smem += 4 * (4 * BT + (WARPS + 1) * self.K + self.between_words)
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

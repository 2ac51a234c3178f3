"""What both scans share: their sizes and roles, and the chunks of one sequence and value head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from kernel_fun._cute import pipe, wgmma
from kernel_fun._cute.decay import GATES
from kernel_fun._cute.pipe import Role
from kernel_fun._cute.tile import ALIGN_BYTES, SMEM_BYTES, Tile, tma_parts
from kernel_fun.kda._kernels.sm90.chunk_config import BETA_MODES

BT = 64
ROWS = wgmma.M
"""Columns of V a STATE warpgroup owns: the rows of its products."""
BC = 16
"""Tokens of a block, a BUILD warp's for 64 channels."""
BLOCKS = BT // BC
BARRIER_BYTES = 128
DECAYS = 1 + 2 * BLOCKS
"""Rows of K decays fwd_intra gives of a chunk: of all of it, before each block, after each block."""


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """Static facts both scans share.

    ``io``, ``g``, ``beta``: torch dtype names. ``index``: dtype of cu_seqlens, empty for a dense batch.
    """

    io: str
    g: str
    beta: str
    K: int
    BV: int
    gate: str
    beta_mode: str
    l2norm: bool = False
    has_A_log: bool = True
    has_dt_bias: bool = True
    state_v_first: bool = False
    index: str = ""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("io", ("bfloat16", "float16")),
            ("g", (self.io, "float32")),
            ("beta", (self.io, "float32")),
            ("K", (64, 128)),
            ("BV", (64, 128)),
            ("gate", GATES),
            ("beta_mode", BETA_MODES),
            ("index", ("", "int32", "int64")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {allowed}, got {getattr(self, name)!r}")
        if self.smem_bytes > SMEM_BYTES:
            raise ValueError(f"{self} needs {self.smem_bytes} bytes of shared memory, more than {SMEM_BYTES}")
        if pipe.register_budget(self.threads, (self.build, self.state)) < 0:
            raise ValueError(f"{self} takes more registers than an SM has")

    @property
    def is_packed(self) -> bool:
        return bool(self.index)

    @property
    def wide_g(self) -> bool:
        return self.g == "float32"

    @property
    def builders(self) -> int:
        """BUILD warpgroups: a warp for each block of 64 channels."""
        return self.K // 64

    @property
    def is_tight(self) -> bool:
        """Whether a BUILD thread has too few registers for all words of its block at once."""
        return self.BV == 128

    @property
    def batch(self) -> int:
        """Tokens whose words a BUILD thread reads at once."""
        if not self.is_tight:
            return 4
        return 1 if self.wide_g else 2

    @property
    def holders(self) -> int:
        """STATE warpgroups, 64 columns of V each."""
        return self.BV // ROWS

    @property
    def build(self) -> Role:
        return Role(0, 4 * self.builders, self.registers[0])

    @property
    def state(self) -> Role:
        return Role(4 * self.builders, 4 * self.holders, self.registers[1])

    @property
    def registers(self) -> tuple[int, int]:
        """Of a BUILD and of a STATE thread."""
        by_tile = {(128, 128): (64, 192), (128, 64): (128, 240), (64, 128): (88, 208), (64, 64): (128, 240)}
        return by_tile[self.K, self.BV]

    @property
    def reads_q(self) -> bool:
        """Whether the kernel wants qE."""
        return True

    @property
    def reads_beta(self) -> bool:
        """Whether STATE wants beta."""
        return True

    @property
    def threads(self) -> int:
        return self.build.threads + self.state.threads

    @property
    def raw_bytes(self) -> int:
        """q, k, g of a chunk."""
        return BT * self.K * (2 + 2 * self.reads_q + (4 if self.wide_g else 2))

    @property
    def squares(self) -> int:
        """Tiles [BT, BT] of a chunk."""
        raise NotImplementedError

    @property
    def out_bytes(self) -> int:
        """What results are staged in."""
        raise NotImplementedError

    @property
    def row_stages(self) -> int:
        return 2

    @property
    def raw_stages(self) -> int:
        return 3 if self.bytes_with(3) <= SMEM_BYTES else 2

    @property
    def betas(self) -> int:
        """Vectors of a chunk's beta in shared memory."""
        return self.betas_with(self.raw_stages)

    def betas_with(self, raw_stages: int) -> int:
        """By slot where STATE reads them, else one of each half of BUILD."""
        return raw_stages if self.reads_beta else self.builders

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the storage, alignment included."""
        return self.bytes_with(self.raw_stages)

    def bytes_with(self, raw_stages: int) -> int:
        """Shared memory with so many slots for q, k and g."""
        rstds = 2 * BC * self.build.warps * self.l2norm
        small = 4 * (BT * self.betas_with(raw_stages) + self.K * self.row_stages + rstds) + BARRIER_BYTES
        row = 2 * BT * (self.BV + self.squares * BT)
        tiles = self.raw_bytes * raw_stages + row * self.row_stages + self.out_bytes
        return tiles + -(-small // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class Chain:
    """The chunks of one sequence and value head: NT of them, the first at token ``start`` of batch row ``b``.

    ``first``: its first chunk among those of the call.
    """

    n: Any
    b: Any
    start: Any
    length: Any
    first: Any
    NT: Any

    @classmethod
    def of(cls, n: Any, T: Any, mCu: Any, mFirst: Any) -> Chain:
        """Sequence n of a packing, or batch row n of T tokens where ``mCu`` is None."""
        if mCu is None:
            return cls(n, n, Int32(0), T, n * ((T + BT - 1) // BT), (T + BT - 1) // BT)
        start = Int32(mCu[n])
        length = Int32(mCu[n + 1]) - start
        return cls(n, Int32(0), start, length, Int32(mFirst[n]), (length + BT - 1) // BT)

    def load(self, atom: cute.CopyAtom, mX: cute.Tensor, head: Any, tile: Tile, field: Any) -> Any:
        """(atom, shared, global) of a TMA copy of (tokens, dims) tiles of the chain."""
        gX = cute.domain_offset((self.start, 0), mX[None, None, head, self.b])
        return atom, *tma_parts(atom, cute.local_tile(gX, tile.shape, (None, 0)), tile.view(field))

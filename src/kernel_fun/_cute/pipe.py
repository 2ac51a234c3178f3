"""Pipelines between the roles of a warp-specialised kernel: rings of mbarriers declared by who writes and who reads.

    raw = Pipe(3, writer=LOAD, readers=(BUILD, STATE), tx_bytes=...)      # TMA fills, its bytes complete the phase
    built = Pipe(3, writer=BUILD)                                         # ordinary stores; nothing to free

Arrival counts follow from the roles: a TMA writer arrives once, any other role once a warp. A kernel says *what* is
ready; which barrier and which parity that is, the ring and its cursor know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass._mlir.dialects import llvm

WARP = 32
WARPGROUP = 128


@dataclass(frozen=True)
class Role:
    """Warps of a CTA that run one method. ``regs``: registers a thread while it runs, 0 = as at entry."""

    first_warp: int
    warps: int
    regs: int = 0

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def last_warp(self) -> int:
        return self.first_warp + self.warps - 1


@dataclass(frozen=True)
class Pipe:
    """A ring of ``stages`` slots.

    ``tx_bytes``: bytes TMA delivers into a slot; 0 for a writer that stores with ordinary instructions. ``readers``:
    the roles that must free a slot before it is written again; none where another pipe already says so.
    """

    stages: int
    writer: Role
    readers: tuple[Role, ...] = ()
    tx_bytes: int = 0

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ValueError(f"`stages` must be at least 1, got {self.stages}")
        if self.tx_bytes < 0 or self.tx_bytes >= 1 << 20:
            raise ValueError(f"`tx_bytes` must be in [0, 2^20), got {self.tx_bytes}")
        taken = [w for role in self.readers for w in range(role.first_warp, role.last_warp + 1)]
        if len(taken) != len(set(taken)):
            raise ValueError("`readers` must not share warps")

    @property
    def full_arrivals(self) -> int:
        return 1 if self.tx_bytes else self.writer.warps

    @property
    def empty_arrivals(self) -> int:
        return sum(role.warps for role in self.readers)

    @property
    def barriers(self) -> int:
        return self.stages * (2 if self.readers else 1)

    @property
    def smem_bytes(self) -> int:
        return 8 * self.barriers

    def field(self) -> Any:
        return cute.struct.MemRange[cutlass.Int64, self.barriers]

    def bind(self, field: Any) -> Ring:
        """The ring over its storage. Every thread calls it; one initialises. :func:`start` must follow."""
        full = field.data_ptr()
        ring = Ring(self, full, full + self.stages)
        _initialise(ring)
        return ring


@dataclass(frozen=True)
class Ring:
    """A pipe's barriers in shared memory. Every method is called by whole warps."""

    pipe: Pipe
    full: Any
    empty: Any

    def write_cursor(self) -> Any:
        """Where a writer begins: every slot is free."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.pipe.stages)

    def read_cursor(self) -> Any:
        """Where a reader begins: no slot is full."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.pipe.stages)

    def wait_empty(self, at: Any) -> None:
        cute.arch.mbarrier_wait(self.empty + at.index, at.phase)

    def wait_full(self, at: Any) -> None:
        cute.arch.mbarrier_wait(self.full + at.index, at.phase)

    def expect(self, at: Any) -> Any:
        """Announce the slot's bytes; returns the barrier to give to the TMA copies."""
        barrier = self.full + at.index
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.pipe.tx_bytes)
        return barrier

    def publish(self, at: Any) -> None:
        """A warp's ordinary stores into a slot are done and visible to ordinary loads, WGMMA and TMA alike."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.full + at.index)

    def free(self, at: Any) -> None:
        """A warp has read all it needs of a slot."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + at.index)


@cute.jit
def _initialise(ring: Any):
    pipe = ring.pipe
    if index_of_warp() == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(pipe.stages):
                cute.arch.mbarrier_init(ring.full + i, pipe.full_arrivals)
                if cutlass.const_expr(pipe.empty_arrivals > 0):
                    cute.arch.mbarrier_init(ring.empty + i, pipe.empty_arrivals)


def start() -> None:
    """Make the initialised barriers visible; no role may run before it."""
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def take_registers(role: Role, at_entry: int) -> None:
    """Set the calling warpgroups' registers to the role's."""
    if role.regs > at_entry:
        cute.arch.setmaxregister_increase(role.regs)
    elif 0 < role.regs < at_entry:
        cute.arch.setmaxregister_decrease(role.regs)


def registers_at_entry(threads: int) -> int:
    """Registers a thread ptxas may use before any role asks for its own, one CTA to an SM."""
    return min(255, 65536 // threads) // 8 * 8


def register_budget(threads: int, roles: tuple[Role, ...]) -> int:
    """Registers an SM's file has left when every role has taken its own; negative means a launch that hangs."""
    entry = registers_at_entry(threads)
    return threads * entry - sum(role.threads * (role.regs or entry) for role in roles)


def index_of_warp() -> Int32:
    """This thread's warp, known to be the same for its lanes."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


def thread_again() -> Int32:
    """This thread's index, read where it is called: what is computed from it is not kept in registers across a loop."""
    thread = llvm.inline_asm(Int32.mlir_type, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)
    return Int32(thread)

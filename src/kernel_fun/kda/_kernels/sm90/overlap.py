"""fwd_state beside fwd_intra: when, and how a chunk is handed over.

On a small grid the scan leaves most SMs free, and of fwd_intra it needs no more than the chunk it comes to. Then
fwd_intra, which goes through the chunks in order, gets the SMs that the scan does not take, one CTA to an SM, and
the scan starts behind it by programmatic dependent launch. The bits of all results are those of one after the other.

Handing over. ``ready`` [H, NT] int32 begins as zeros and counts, of each chunk and query head, the value heads that
are written. An item of fwd_intra is written by all threads of a team; behind their barrier one of them adds 1 with
release semantics at GPU scope. One warp of a CTA of the scan looks with acquire semantics until the count is G, and
passes on what it has seen: to TMA by a proxy fence, to the warps that build operands by the mbarrier of the loads it
issues afterwards. Everything else that the scan reads is older than fwd_intra.

Nothing waits for ever. (1) The scan's grid starts once every CTA of fwd_intra has executed launch_dependents, which is
the first thing it does, so all of them are resident then. (2) A resident CTA of fwd_intra waits for nothing but its own
loads. So the counts a CTA of the scan waits for arrive, whatever else is on the GPU, a second pair of the two from
another stream included: a waiting CTA only ever waits for resident ones that wait for nobody. Where the launch is not
programmatic after all, the scan starts after fwd_intra and finds every count complete.

Order of what follows. A grid launched behind the scan starts when the scan has ended, which of itself says nothing of
fwd_intra. Therefore every CTA of the scan executes griddepcontrol.wait before it ends: "causes the executing thread to
wait until all prerequisite grids in flight have completed and all the memory operations from the prerequisite grids are
performed and made visible to the current grid" (PTX ISA, griddepcontrol). So the end of the scan implies that of
fwd_intra, for the stream, its events and a graph alike.

What the host has to see to: nothing is launched between the two that the scan reads, and no memory that fwd_intra reads
is given back before the scan has been launched: the allocator would hand it out as if fwd_intra had ended.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass._mlir.dialects import llvm

from kernel_fun.kda._kernels.sm90.chunk_inputs import v_tile
from kernel_fun.kda._kernels.sm90.scan_config import BT

CHUNKS = 32
"""Chunks of a sequence from which on it pays: what is saved of each has to make up for the start."""


def scan_ctas(chains: int, V: int, T: int, sms: int) -> int:
    """SMs fwd_intra leaves to the scan of dense sequences of T tokens beside it; 0: the scan comes after it.

    ``chains`` = B HV. With more than half of the SMs for the scan fwd_intra is what both wait for.
    """
    ctas = chains * (V // v_tile(chains, V, sms))
    return ctas if 2 * ctas <= sms and T >= CHUNKS * BT else 0


@cute.jit
def publish(mReady: cute.Tensor, h: Int32, chunk: Int32):
    """One more value head of a chunk is written. By one thread, behind a barrier of all that wrote."""
    address = cute.domain_offset((h, chunk), mReady).iterator.toint()
    llvm.inline_asm(
        None,
        [address.ir_value(), Int32(1).ir_value()],
        "red.release.gpu.global.add.u32 [$0], $1;",
        "l,r,~{memory}",
        has_side_effects=True,
    )


@cute.jit
def follow(counts: cute.Tensor, seen: cute.Tensor, wanted: Int32, complete: Int32):
    """Until the first ``wanted`` chunks of a sequence are there. By one warp, which then may read them and load them.

    ``counts``: of the chunks of the sequence. ``seen`` [1]: how many of its first chunks are known to be there; a
    look goes 32 chunks ahead.
    """
    while seen[0] < wanted:
        n = cutlass.min(seen[0] + cute.arch.lane_idx(), cute.size(counts) - 1)
        found = Int32(
            llvm.inline_asm(
                Int32.mlir_type,
                [(counts.iterator + n).toint().ir_value()],
                "ld.acquire.gpu.global.u32 $0, [$1];",
                "=r,l,~{memory}",
                has_side_effects=True,
            )
        )
        there = Int32(cute.arch.vote_ballot_sync(found == complete))
        cute.arch.sync_warp()  # what a lane has acquired, all have
        cute.arch.fence_proxy("async")
        first = cute.arch.popc(there & ~(there + 1))
        seen[0] = seen[0] + first
        if first == 0:
            cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(PAUSE_NS)])


PAUSE_NS = 100
"""Between two looks at a count."""


def begin() -> None:
    """Of every CTA of the scan: what kernels before fwd_intra wrote is read from where they wrote it, whatever a
    launch that is not a boundary of the stream leaves in an SM's cache."""
    cute.arch.fence_acq_rel_gpu()


def end() -> None:
    """Of every CTA of the scan: not before fwd_intra has ended, see above."""
    cute.arch.griddepcontrol_wait()

"""Kernels of small grids beside each other instead of one after the other: when, and why that is safe.

Two pairs: fwd_state, the scan, beside fwd_intra, and bwd_state beside the rescan of the same chunks, of which it reads
nothing. The bits of all results are those of one after the other. First fwd_intra and the scan.

On a small grid the scan leaves many SMs free, and of fwd_intra it needs no more than the chunk it comes to. Then
fwd_intra, which goes through the chunks in order, gets the SMs that the scan does not take, one CTA to an SM, and
the scan starts behind it by programmatic dependent launch.

Handing over. ``ready`` [HV, NT] int32 says of each chunk and value head whether it is written. Before a CTA of fwd_intra
executes launch_dependents it writes 0 for every item that will be its own, fences at GPU scope, and meets. An item is
written by all threads of a team; behind their barrier one of them stores 1 with release semantics at GPU scope. One
warp of a CTA of the scan looks with acquire semantics until it sees 1, there and at the first value head of the
group, which writes the norms; it passes on what it has seen: to TMA by a proxy fence, to the warps that build operands
by the mbarrier of the loads it issues afterwards. Everything else that the scan reads is older than fwd_intra.

Nothing waits for ever. (1) The scan's grid starts once every CTA of fwd_intra has executed launch_dependents, so all of
them are resident then, or have ended, and no 1 of an earlier use of the memory is left. (2) A resident CTA of fwd_intra
waits for nothing but its own loads. So what a CTA of the scan waits for arrives, whatever else is on the GPU, a second
pair of the two from another stream included: a waiting CTA only ever waits for resident ones that wait for nobody.
Where the launch is not programmatic after all, the scan starts after fwd_intra and finds everything written.

Order of what follows. A grid launched behind the scan starts when the scan has ended, which of itself says nothing of
fwd_intra. Therefore every CTA of the scan executes griddepcontrol.wait before it ends: "causes the executing thread to
wait until all prerequisite grids in flight have completed and all the memory operations from the prerequisite grids are
performed and made visible to the current grid" (PTX ISA, griddepcontrol). So the end of the scan implies that of
fwd_intra, for the stream, its events and a graph alike.

bwd_state starts behind the rescan in the same way, once all CTAs of that are resident, waits for nothing but its end, by
the same instruction at its own, and everything that it reads is older than the rescan.

What the host has to see to: nothing is launched between the two of a pair, and no memory that the first one reads is
given back before the second one has been launched: the allocator would hand it out as if the first one had ended.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects import llvm

from kernel_fun.kda._kernels.sm90.chunk_inputs import CHUNK_TIME, v_tile
from kernel_fun.kda._kernels.sm90.scan_config import BT

TOKENS = 64 * BT
"""Of a sequence, from which on it may pay: what is saved of each chunk has to make up for the start,"""
WORK = 1 << 16
"""and so many tokens of all chains together."""
ITEM_TIME = 14
"""SM time of fwd_intra for a chunk of one head, in the unit of CHUNK_TIME."""
MARGIN = 1.08
"""What it has to win by."""


def scan_ctas(chains: int, V: int, T: int, sms: int) -> int:
    """SMs fwd_intra leaves to the scan of dense sequences of T tokens beside it; 0: the scan comes after it.

    ``chains`` = B HV. Beside each other the two take as long as the slower one, on the SMs it has.
    """
    BV = v_tile(chains, V, sms)
    ctas = chains * (V // BV)
    if T < TOKENS or chains * T < WORK or ctas >= sms:
        return 0
    apart = CHUNK_TIME[BV] + ITEM_TIME * chains / sms
    beside = max(CHUNK_TIME[BV], ITEM_TIME * chains / (sms - ctas))
    return ctas if MARGIN * beside < apart else 0


def scans_fit(chains: int, V: int, sms: int) -> bool:
    """Whether the SMs hold all CTAs of two scans at once. ``chains`` = B HV."""
    return 2 * chains * (V // v_tile(chains, V, sms)) <= sms


def withdraw(mReady: cute.Tensor, hv: Int32, chunk: Int32) -> None:
    """A chunk of a value head is not written yet."""
    mReady[hv, chunk] = Int32(0)


def allow() -> None:
    """The scan may start, as far as this CTA is concerned: by all its threads, once they have withdrawn their items."""
    cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_launch_dependents()


def publish(mReady: cute.Tensor, hv: Int32, chunk: Int32) -> None:
    """A chunk of a value head is written. By one thread, behind a barrier of all that wrote."""
    llvm.inline_asm(
        None,
        [address(mReady, hv, chunk).ir_value(), Int32(1).ir_value()],
        "st.release.gpu.global.u32 [$0], $1;",
        "l,r,~{memory}",
        has_side_effects=True,
    )


def address(mReady: cute.Tensor, hv: Any, chunk: Any) -> Int64:
    return cute.domain_offset((hv, chunk), mReady).iterator.toint()


def look(at: Int64) -> Int32:
    """Is it written? 1 if it is."""
    asm = "ld.acquire.gpu.global.u32 $0, [$1];"
    return Int32(
        llvm.inline_asm(Int32.mlir_type, [at.ir_value()], asm, "=r,l,~{memory}", has_side_effects=True)
    )


def begin() -> None:
    """Of every CTA of a second kernel: what kernels before the first one wrote is read from where they wrote it, whatever
    a launch that is not a boundary of the stream leaves in an SM's cache."""
    cute.arch.fence_acq_rel_gpu()


@cute.jit
def follow(own: Int64, leader: Int64, seen: cute.Tensor, wanted: Int32, NT: Int32):
    """Until the first ``wanted`` of the NT chunks of a sequence are there. By one warp, which then may read and load.

    ``own``, ``leader``: where it says so of the first chunk, of the value head and of the first one of its group.
    ``seen`` [1]: how many of the first chunks are known to be there; a look goes 32 chunks ahead.
    """
    while seen[0] < wanted:
        at = 4 * Int64(cutlass.min(seen[0] + cute.arch.lane_idx(), NT - 1))
        written = look(own + at) & look(leader + at)
        there = Int32(cute.arch.vote_ballot_sync(written == 1))
        cute.arch.sync_warp()  # what a lane has acquired, all have
        cute.arch.fence_proxy("async")
        first = cute.arch.popc(there & ~(there + 1))
        seen[0] = seen[0] + first
        if first == 0:
            cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(PAUSE_NS)])


PAUSE_NS = 100
"""Between two looks."""


def end() -> None:
    """Of every CTA of a second kernel: not before the first one has ended, see above."""
    cute.arch.griddepcontrol_wait()

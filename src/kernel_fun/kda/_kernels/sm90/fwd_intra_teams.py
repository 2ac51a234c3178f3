"""The threads of fwd_intra as its file names them: whose they are, what memory they have, where they meet.

A team works on an item; beside the scan a CTA has two.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from kernel_fun._cute import trisolve
from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.pipe import thread_again
from kernel_fun._cute.tile import ALIGN_BYTES, words_of
from kernel_fun.kda._kernels.sm90.fwd_intra_config import BT, ROW_WORDS, SOLVERS, THREADS, Config
from kernel_fun.kda._kernels.sm90.fwd_intra_items import PLACE_WORDS, PLACES, Items


class Teams(Items):
    """Of a kernel with a ``Storage``: the type of a team's memory."""

    c: Config
    Storage: Any

    def team(self, tid: Int32) -> Any:
        """Which team of its CTA a thread belongs to."""
        return cute.arch.make_warp_uniform(tid // THREADS) if self.c.overlapped else 0

    def first_item(self, tid: Int32) -> Any:
        block = cute.arch.block_idx()[0]
        return self.c.teams * block + self.team(tid) if self.c.overlapped else block

    def within(self, tid: Int32) -> Int32:
        """A thread's index in its team."""
        return tid % THREADS if self.c.overlapped else tid

    def own(self, tid: Int32) -> Any:
        """The shared memory of a thread's team."""
        if not self.c.overlapped:
            return SmemAllocator().allocate(self.Storage)
        size = self.c.team_bytes
        assert self.Storage.size_in_bytes() <= size
        memory = SmemAllocator().allocate(size * self.c.teams, ALIGN_BYTES)
        return self.Storage(memory + cute.assume(self.team(tid) * size, divby=ALIGN_BYTES))

    def meet(self) -> None:
        """Barrier of a team."""
        if self.c.overlapped:
            team = self.team(cute.arch.thread_idx()[0])
            cute.arch.barrier(barrier_id=1 + team, number_of_threads=THREADS)
        else:
            cute.arch.sync_threads()

    def solve(self) -> None:
        """The inverse from its 16 x 16 blocks, by four warps that meet among themselves."""
        trisolve.merge_16(self.L, self.warp, self.lane)
        rows = trisolve.rows_of_L(self.L, self.warp, self.lane)
        self.solvers_meet()
        trisolve.multiply_32(self.L, self.warp, self.lane, rows)
        rows = trisolve.rows_of_X(self.L, self.warp, self.lane)
        self.solvers_meet()
        trisolve.merge_32(self.L, self.warp, self.lane, rows)

    def solvers_meet(self) -> None:
        """Barrier of a team's first warps."""
        team = self.team(cute.arch.thread_idx()[0])
        cute.arch.barrier(barrier_id=1 + self.c.teams + team, number_of_threads=32 * SOLVERS)

    def all_meet(self, st: Any) -> None:
        """A barrier, and the lane anew: its latency passes while others come."""
        tid = thread_again()
        self.meet()
        self.lanes(st, tid)

    def lanes(self, st: Any, tid: Int32) -> None:
        """Views of shared memory and a thread's position."""
        c = self.c
        tid = self.within(tid)
        self.warp, self.lane = cute.arch.make_warp_uniform(tid >> 5), tid & 31
        self.r, self.t = self.lane >> 2, self.lane & 3
        # q, k and g are neighbours: one base and constant offsets reach all three
        self.words = words_of(st.q, c.tile_bytes() // 4)
        self.at = st.q.data_ptr().toint()
        self.L = st.L.get_tensor(cute.make_layout(trisolve.SIZE * trisolve.PITCH))
        self.D = st.D.get_tensor(cute.make_layout(c.blocks * c.K))
        self.beta = words_of(st.beta, BT)
        self.parameters = st.parameters.get_tensor(cute.make_layout(self.c.K + 1))
        self.place = words_of(st.place, PLACES * PLACE_WORDS + 1)
        self.between = words_of(st.between, c.between_words)
        self.Aqk_words = words_of(st.Aqk, BT * ROW_WORDS)
        self.Aqk_values = st.Aqk.get_tensor(cute.make_layout(BT * BT))
        self.scales = st.scales.get_tensor(cute.make_layout(c.scales))

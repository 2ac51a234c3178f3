"""The items of fwd_intra, as its file names them: where each is, what is asked for of the next one, where results go.

Plain methods are Python, traced inline; the others hold branches of the kernel.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
from cutlass import Float32, Int16, Int32, Int64, cute

from kernel_fun._cute import trisolve
from kernel_fun._cute.pipe import thread_again
from kernel_fun._cute.tile import tma_parts
from kernel_fun._cute.warp import as_float, bits_of, load4, pack, put_global, select
from kernel_fun.kda._kernels.sm90.fwd_intra_config import BT, SOLVERS
from kernel_fun.kda._kernels.sm90.fwd_intra_scores import Scores


class Place(IntEnum):
    """What a CTA knows of an item: words in shared memory, written by the warp that fetches it.

    Of three items: while one is worked on, the next is written, and warps may still read where the last one is.
    """

    CHUNK = 0
    HV = 1
    FIRST = 2
    VALID = 3
    H = 4
    IN_GROUP = 5
    PHASE = 6


PLACE_WORDS = 8
PLACES = 3
TABLE_ROW_BYTES = 16


class Items(Scores):
    """Of a kernel whose CTAs, or teams of them, work on one item while the next one arrives.

    ``divisors``: by HV, by the heads of a group, by the chunks that take turns. ``inputs``: of q, k and g a copy, the
    tensor, its tile and where it goes.
    """

    divisors: Any
    inputs: Any

    def row_of_total(self, b: Int32, n: Int32, T: Int32) -> Int32:
        """Of chunk n of sequence b, in a dense batch."""
        return b * ((T + (BT - 1)) // BT) + n

    def turn_to(self, here: Int32, now: cute.Tensor) -> None:
        """The item that comes: its place, valid tokens and phase; and this thread."""
        for n, x in enumerate(
            (here, self.place[here + Place.VALID], self.place[here + Place.PHASE], thread_again())
        ):
            now[n] = x

    @cute.jit
    def locate(self, item: Int32, items: Int32, T: Int32, here: Int32, mTable: cute.Tensor | None):
        """Where an item is, to ``here``. No valid token past the last item."""
        by_HV, by_G, by_turn = self.divisors
        place = self.place
        if self.warp == SOLVERS:
            valid, phase = Int32(0), place[PLACES * PLACE_WORDS]
            cute.arch.sync_warp()
            if item < items:
                chunk, hv = divmod(item, by_HV)
                h, in_group = divmod(hv, by_G)
                if cutlass.const_expr(self.c.packed):
                    first, valid = row_of_table(mTable.iterator.toint() + Int64(chunk) * TABLE_ROW_BYTES)
                else:
                    if cutlass.const_expr(self.c.overlapped):
                        c, b = divmod(chunk, by_turn)
                        chunk = self.row_of_total(b, c, T)
                    else:
                        b, c = divmod(chunk, by_turn)
                    first, valid = b * T + c * BT, cutlass.min(T - c * BT, BT)
                known = (chunk, hv, first, h, in_group, phase)
                names = (Place.CHUNK, Place.HV, Place.FIRST, Place.H, Place.IN_GROUP, Place.PHASE)
                for n, x in zip(names, known, strict=True):
                    place[here + n] = Int32(x)
                if valid > 0:
                    place[PLACES * PLACE_WORDS] = phase ^ 1
                    for tma, _, tXgX in self.tiles_at(first, h, hv):
                        cute.prefetch(tma, tXgX)
            place[here + Place.VALID] = valid

    @cute.jit
    def fetch(self, here: Int32, full: cute.Pointer):
        """The tiles of the item whose place is ``here``, by TMA."""
        place = self.place
        if place[here + Place.VALID] > 0:
            first, h, hv = (place[here + n] for n in (Place.FIRST, Place.H, Place.HV))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.c.tile_bytes())
            for tma, tXsX, tXgX in self.tiles_at(first, h, hv):
                for p in cutlass.range_constexpr(self.c.passes):
                    cute.copy(tma, tXgX[None, p], tXsX[None, p], tma_bar_ptr=full)

    def tiles_at(
        self, first: Int32, h: Int32, hv: Int32
    ) -> list[tuple[cute.CopyAtom, cute.Tensor, cute.Tensor]]:
        """Of q, k and g: a copy, where it goes and what it reads."""
        found = []
        for (tma, mX, tile, field), head in zip(self.inputs, (h, h, hv), strict=True):
            rows = cute.domain_offset((first, 0), mX[None, None, head])
            found.append(
                (tma, *tma_parts(tma, cute.local_tile(rows, tile.shape, (0, None)), tile.view(field)))
            )
        return found

    @cute.jit
    def ask(
        self, here: Int32, mBeta: cute.Tensor, mA_log: cute.Tensor | None, mDt_bias: cute.Tensor | None
    ) -> tuple[Int32, Float32, Float32]:
        """beta of a row of an item, as it is in memory, and dt_bias of a channel, a thread of the last warps; A_log."""
        thread = 32 * (self.warp - SOLVERS) + self.lane
        word, bias, A_log = Int32(0), Float32(0.0), Float32(0.0)
        if self.warp >= SOLVERS:
            valid = self.place[here + Place.VALID]
            if valid > 0:
                hv = self.place[here + Place.HV]
                kind = Int32 if cutlass.const_expr(self.c.beta == "float32") else Int16
                raw = cute.make_tensor(cute.recast_ptr(mBeta.iterator, dtype=kind), mBeta.layout)
                row = cutlass.min(thread & (BT - 1), valid - 1)
                word = Int32(raw[self.place[here + Place.FIRST] + row, hv])
                if cutlass.const_expr(self.c.has_dt_bias):
                    bias = mDt_bias[hv * self.c.K + (thread & (self.c.K - 1))]
                if cutlass.const_expr(self.c.has_A_log):
                    A_log = mA_log[hv]
        return word, bias, A_log

    @cute.jit
    def keep(self, asked: tuple[Int32, Float32, Float32]):
        """What was asked for, to where the passes find it."""
        word, bias, A_log = asked
        beta, parameters = self.beta, self.parameters
        thread = 32 * (self.warp - SOLVERS) + self.lane
        if self.warp >= SOLVERS:
            if thread < BT:
                beta[thread] = word
            if cutlass.const_expr(self.c.has_dt_bias):
                if thread < self.c.K:
                    parameters[thread] = bias
            if cutlass.const_expr(self.c.has_A_log):
                if thread == 0:
                    parameters[self.c.K] = A_log

    @cute.jit
    def store_rstds(self, mQ_rstd: cute.Tensor, mK_rstd: cute.Tensor, here: Int32, valid: Int32):
        """Norms of the rows that are tokens, once a head of q, by the threads that :meth:`keep` the next beta there."""
        row = 32 * (self.warp - SOLVERS) + self.lane
        if row < valid and self.place[here + Place.IN_GROUP] == 0:
            first, h = self.place[here + Place.FIRST], self.place[here + Place.H]
            mQ_rstd[first + row, h] = as_float(self.beta[row])
            mK_rstd[first + row, h] = self.scales[2 * BT + row]

    def unit_of_A(self) -> tuple[Int32, Int32]:
        """Row and unit of eight columns of A a thread stores; eight lanes that read together: four units, two rows."""
        row = 4 * self.warp + ((self.lane >> 2) & 1) + 2 * (self.lane >> 4)
        return row, (self.lane & 3) + 4 * ((self.lane >> 3) & 1)

    def rows_of_A(self, mA: cute.Tensor, here: Int32) -> tuple[Int64, Int64]:
        """Where :meth:`store_A` begins, and how far 32 rows are."""
        row, unit = self.unit_of_A()
        return self.rows_from(mA, here, row, 16 * unit, 32)

    @cute.jit
    def store_A(self, to: Int64, step: Int64, valid: Int32):
        """Rows of A that are tokens: eight columns a thread in every 32nd row."""
        row, unit = self.unit_of_A()
        J, odd = unit >> 1, self.warp >> 2
        at = self.L.iterator.toint() + 4 * (row * trisolve.PITCH + 8 * unit)
        found = []
        for n in cutlass.range_constexpr(2):
            moved = select((J == 2 * n) & (odd == 1), Int32(4 * trisolve.shift(1, 0)), Int32(0))
            x, y = (load4(at + 4 * 32 * n * trisolve.PITCH + moved + 16 * e) for e in range(2))
            found.append(
                [select(J <= 2 * n + odd, pack(*z, self.io), Int32(0)) for z in zip(x, y, strict=True)]
            )
        for n in cutlass.range_constexpr(2):
            put_global(to + n * step, found[n], 32 * n + row < valid)

    @cute.jit
    def store_Aqk(self, mAqk: cute.Tensor, here: Int32, valid: Int32):
        """Rows of Aqk that are tokens, by 128 threads: eight columns a thread in every sixteenth row."""
        row, unit = 4 * (self.warp & 3) + (self.lane >> 3), self.lane & 7
        to, step = self.rows_from(mAqk, here, row, 16 * unit, 16)
        from_ = self.Aqk_words.iterator.toint() + row * 128 + ((unit ^ (row & 7)) << 4)
        found = [[bits_of(x) for x in load4(from_ + 16 * 128 * I)] for I in range(BT // 16)]
        for I in cutlass.range_constexpr(BT // 16):
            words = [select((unit >> 1) <= I, w, Int32(0)) for w in found[I]]
            put_global(to + I * step, words, 16 * I + row < valid)

    def rows_from(
        self, mX: cute.Tensor, here: Int32, row: Int32, byte: Int32, rows: int
    ) -> tuple[Int64, Int64]:
        """Address of a byte in a row of the item in a [tokens, HV, 64] result, and how far ``rows`` rows are."""
        HV, first, hv = mX.shape[1], self.place[here + Place.FIRST], self.place[here + Place.HV]
        start = (Int64(first + row) * HV + hv) * (2 * BT)
        return mX.iterator.toint() + start + byte, Int64(HV * (2 * BT * rows))


def row_of_table(address: Int64) -> tuple[Int32, Int32]:
    """First token and valid tokens of a chunk, the first two words of its row of the table."""
    return cute.arch.inline_ptx(
        "ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32, Int32], read_only_args=[address]
    )

"""The LOAD and STORE roles of bwd_grads: which item, what TMA brings for it, what it takes away.

A tile to move: (TMA atom, global tensor, :class:`Tile`, field of shared memory), of tokens and dims of a head.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from kernel_fun._cute.tile import Tile, tma_parts
from kernel_fun._cute.varlen import FIRST, VALID
from kernel_fun.kda._kernels.sm90.bwd_grads_config import BT


def place(item: Int32, mTable: cute.Tensor | None, T: Int32, HV: Int32) -> tuple[Any, Any, Any, Any]:
    """(chunk, value head, first token, tokens) of an item."""
    chunk, hv = item // HV, item % HV
    if mTable is not None:
        return chunk, hv, mTable[chunk, FIRST], mTable[chunk, VALID]
    NT = (T + (BT - 1)) // BT
    first, valid = chunk // NT * T + chunk % NT * BT, cutlass.min(T - chunk % NT * BT, BT)
    return chunk, hv, first, valid


@cute.jit
def load_ring(ring, states, rows, mTable, T: Int32, items: Int32, HV: Int32, NV: Int32):
    """LOAD: the states and the rows of 64 values, all turns of all items; tiles in the order of their places."""
    at = ring.write_cursor()
    grid = cute.arch.grid_dim()[0]
    for item in cutlass.range(cute.arch.block_idx()[0], items, grid, unroll=1):
        chunk, hv, first, valid = place(item, mTable, T, HV)
        if valid > 0:
            for n in cutlass.range(NV, unroll=1):
                ring.wait_empty(at)
                barrier = ring.expect(at)
                for i, (tma, mX, tile, field) in enumerate(states):
                    gX = cute.local_tile(mX[None, None, hv, chunk], tile.shape, (0, None))
                    sX, gX = tma_parts(tma, gX, tile.view(field))
                    cute.copy(tma, gX[None, n], sX[None, len(states) * at.index + i], tma_bar_ptr=barrier)
                for i, (tma, mX, tile, field) in enumerate(rows):
                    sX, gX = parts(tma, mX, tile, field, first, hv)
                    cute.copy(tma, gX[None, n], sX[None, len(rows) * at.index + i], tma_bar_ptr=barrier)
                at.advance()


@cute.jit
def load_tiles(to, of, then, of_then, mTable, T: Int32, items: Int32, HV: Int32, G: Int32):
    """LOAD: tiles that an item needs once, of one pipe and, if there is one, of another; G value heads share one."""
    at, at_then = to.write_cursor(), then.write_cursor()
    grid = cute.arch.grid_dim()[0]
    for item in cutlass.range(cute.arch.block_idx()[0], items, grid, unroll=1):
        _, hv, first, valid = place(item, mTable, T, HV)
        if valid > 0:
            load_into(to, at, of, first, hv // G)
            at.advance()
            if cutlass.const_expr(len(of_then) > 0):
                load_into(then, at_then, of_then, first, hv // G)
                at_then.advance()


def load_into(to: Any, at: Any, of: Any, first: Int32, head: Int32) -> None:
    to.wait_empty(at)
    barrier = to.expect(at)
    for tma, mX, tile, field in of:
        sX, gX = parts(tma, mX, tile, field, first, head)
        cute.copy(tma, gX[None, 0], sX[None, 0], tma_bar_ptr=barrier)


@cute.jit
def store_tiles(out_qk, qk, of_qk, out_g, gates, of_g, mTable, T: Int32, items: Int32, HV: Int32):
    """STORE: gradients of whole chunks; then their tiles are free."""
    at_out_qk, at_out_g, at_qk, at_g = (x.read_cursor() for x in (out_qk, out_g, qk, gates))
    grid = cute.arch.grid_dim()[0]
    for item in cutlass.range(cute.arch.block_idx()[0], items, grid, unroll=1):
        _, hv, first, valid = place(item, mTable, T, HV)
        if valid > 0:
            out_qk.wait_full(at_out_qk)
            if valid == BT:
                store_from(of_qk, first, hv)
            qk.free(at_qk)
            out_g.wait_full(at_out_g)
            if valid == BT:
                store_from(of_g, first, hv)
            gates.free(at_g)
            at_out_qk.advance()
            at_out_g.advance()
            at_qk.advance()
            at_g.advance()
    cute.arch.cp_async_bulk_wait_group(0)


def store_from(of: Any, first: Int32, head: Int32) -> None:
    for tma, mX, tile, field in of:
        sX, gX = parts(tma, mX, tile, field, first, head)
        cute.copy(tma, sX[None, 0], gX[None, 0])
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)


def parts(tma: Any, mX: Any, tile: Tile, field: Any, first: Int32, head: Int32) -> Any:
    """A tile in shared memory and the chunk of a head that it is of, as TMA sees them."""
    gX = cute.local_tile(cute.domain_offset((first, 0), mX[None, None, head]), tile.shape, (0, None))
    return tma_parts(tma, gX, tile.view(field))

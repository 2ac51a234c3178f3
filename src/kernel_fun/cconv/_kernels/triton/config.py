"""Pinned tile sizes: which tile a problem runs with is this table, never a search at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Call

ENOUGH_PROGRAMS = 1024
"""Below this many programs a launch takes shorter tiles."""
SHORTEST = 16
"""Shortest tile; at least the 7 tokens of the widest window."""


@dataclass(frozen=True)
class Tile:
    """BD channels by BT tokens for one program of ``warps`` warps, U tokens loaded at a time."""

    BD: int
    BT: int
    U: int
    warps: int
    maxnreg: int | None = None

    def __post_init__(self) -> None:
        powers = all(n & (n - 1) == 0 for n in (self.BD, self.BT))
        if not powers or self.BD < 32 or self.BT < SHORTEST or self.BT % self.U:
            raise ValueError(f"no such tile: {self}")


TILES = {
    # nothing but x is read: all loads of a short tile at once keep the memory busiest
    "fwd": Tile(BD=512, BT=16, U=16, warps=4),
    # packed, or with a residual or initial states: what a tile reads beside x is worth a longer one
    "longer fwd": Tile(BD=512, BT=64, U=8, warps=4),
    "bwd": Tile(BD=512, BT=128, U=8, warps=4, maxnreg=128),
    "packed bwd": Tile(BD=512, BT=128, U=4, warps=4, maxnreg=128),
    # state gradients: more registers a token
    "bwd with states": Tile(BD=512, BT=128, U=4, warps=4),
    # W > 4: windows twice as long, half as many channels in a thread
    "wide fwd": Tile(BD=256, BT=64, U=8, warps=4),
    "wide bwd": Tile(BD=256, BT=128, U=4, warps=4),
    # packed with initial states: any token may load one, and unrolled that takes long to compile
    "packed states fwd": Tile(BD=512, BT=64, U=2, warps=4),
    "packed states bwd": Tile(BD=512, BT=128, U=2, warps=4),
}
STATE_BD = 256
"""Channels of a program that works on one sequence's state."""
REDUCE = (64, 32)
"""Partials and columns of one step of the reduction."""


def parts(n: int, size: int) -> int:
    """Parts of a size that n needs; ``triton.cdiv`` takes constants of kernels apart first, at each call."""
    return -(-n // size)


def fwd_tile(c: Call) -> Tile:
    """The tile of the forward."""
    if c.cu_seqlens is not None and c.initial_state is not None:
        return fitted("packed states fwd", *c.x.shape)
    if c.weight.shape[1] > 4:
        return fitted("wide fwd", *c.x.shape)
    more = c.cu_seqlens is not None or c.residual is not None or c.initial_state is not None
    return fitted("longer fwd" if more else "fwd", *c.x.shape)


def bwd_tile(c: Call, dht: Tensor | None) -> Tile:
    """The tile of the backward."""
    if c.cu_seqlens is not None and c.initial_state is not None:
        return fitted("packed states bwd", *c.x.shape)
    if c.weight.shape[1] > 4:
        return fitted("wide bwd", *c.x.shape)
    if c.initial_state is not None or dht is not None:
        return fitted("bwd with states", *c.x.shape)
    return fitted("bwd" if c.cu_seqlens is None else "packed bwd", *c.x.shape)


@lru_cache(maxsize=4096)
def fitted(name: str, B: int, T: int, D: int) -> Tile:
    """A pinned tile, narrowed to D channels and shortened until the launch fills the device."""
    pinned = TILES[name]
    BD = pinned.BD
    while BD >= 2 * max(D, 32):
        BD //= 2
    channels_per_warp = pinned.BD // pinned.warps
    BT = pinned.BT
    while BT > SHORTEST and B * parts(T, BT) * parts(D, BD) < ENOUGH_PROGRAMS:
        BT //= 2
    return replace(pinned, BD=BD, BT=BT, warps=max(1, BD // channels_per_warp))

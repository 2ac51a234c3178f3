"""Decays as products (docs/kda.md): the factors of six dyadic levels, built in place.

For a tile of per-token decays a = exp(l) and a power of two s, in s-aligned groups of tokens:

    f[i]  product of a from the group's first token to i, i included
    r[j]  product of a after j to the group's last token, j excluded

For i in the right and j in the left half of one 2s-group, the decay from j to i is f[i] r[j]. Nothing is
ever subtracted or divided, so a = 0 needs no special case, and no factor exceeds 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Left and right halves of the 2s-groups of tokens: views ``[X, BT/2s, s, D]`` of ``x [X, BT, D]``."""
    grouped = x.unflatten(1, (-1, 2, s))
    return grouped[:, :, 0], grouped[:, :, 1]


def levels(f: Tensor, r: Tensor) -> Iterator[int]:
    """Yield s = 1, 2, 4, ... BT/2 with ``f`` and ``r`` ``[X, BT, K]`` holding that level's factors.

    Start with ``f`` = a and ``r`` = 1. Both are doubled in place after each yield; after the last they
    are E = f and R = r of the whole chunk.
    """
    s, BT = 1, f.shape[1]
    while s < BT:
        yield s
        double(f, r, s)
        s *= 2


def double(f: Tensor, r: Tensor, s: int) -> None:
    """From level s to level 2s."""
    f_left, f_right = halves(f, s)
    r_left, _ = halves(r, s)
    r_left.mul_(f_right[:, :, -1:])
    f_right.mul_(f_left[:, :, -1:])


def whole(f: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """E and R of the whole chunk, in place: decay from its start to i, and after j to its end."""
    for _ in levels(f, r):
        pass
    return f, r


def level_blocks(S: Tensor, s: int) -> Tensor:
    """The (right, left) blocks of level s of square tiles: a view ``[X, s, s, BT/2s]`` of ``[X, BT, BT]``."""
    grouped = S.unflatten(2, (-1, 2, s)).unflatten(1, (-1, 2, s))
    return grouped[:, :, 1, :, :, 0, :].diagonal(dim1=1, dim2=3)

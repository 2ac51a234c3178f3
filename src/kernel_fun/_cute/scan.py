"""Running products of per-token decays inside aligned groups, for tokens that sit in one thread.

For a group size s (1, 2, 4, ...) and a token i of the group [u s, (u + 1) s):

    f_s[i] = a[u s] ... a[i]                  from the group's first token, i included
    r_s[i] = a[i + 1] ... a[(u + 1) s - 1]    to the group's last token, i excluded
    D_s    = f_s of the group's last token

Doubling s multiplies the right half's f by D of the left half and the left half's r by D of the right half:
one product per token. Nothing is divided or subtracted, so a = 0 is a number like any other.
"""

from __future__ import annotations

from typing import Any

Column = list[Any]
"""One value per token; None stands for 1."""


def start(a: Column) -> tuple[Column, Column]:
    """f_1 and r_1."""
    return list(a), [None] * len(a)


def double(f: Column, r: Column, s: int) -> None:
    """f_s, r_s to f_2s, r_2s, in place. Plain Python, traced inline: ``s`` and the length are static."""
    for first in range(0, len(f), 2 * s):
        left, right = f[first + s - 1], f[first + 2 * s - 1]
        for i in range(first, first + s):
            r[i] = times(r[i], right)
            f[i + s] = times(f[i + s], left)


def times(x: Any, y: Any) -> Any:
    """x y, where None stands for 1."""
    if x is None or y is None:
        return y if x is None else x
    return x * y


def right_half(s: int, tokens: int) -> list[int]:
    """Tokens in the right half of their group of 2 s: token n of the list has n // s as its group."""
    return [i for i in range(tokens) if i // s % 2]


def left_half(s: int, tokens: int) -> list[int]:
    """Tokens in the left half of their group of 2 s, in the order of :func:`right_half`."""
    return [i for i in range(tokens) if not i // s % 2]

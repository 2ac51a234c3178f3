"""Running products against their definition, and the claim the kernels rest on: levels are the pairwise decays."""

from __future__ import annotations

import pytest
import torch

from kernel_fun._cute import scan

TOKENS = (8, 16, 64)


def column(tokens: int, zeros: bool) -> list[torch.Tensor]:
    a = torch.rand(tokens, 3, dtype=torch.float64)
    if zeros:
        a[torch.rand(tokens, 3) < 0.2] = 0.0
    return list(a)


def levels(a: list[torch.Tensor]):
    """(s, f_s, r_s) for every group size below the number of tokens."""
    f, r = scan.start(a)
    s = 1
    while s < len(a):
        yield s, f, r
        scan.double(f, r, s)
        s *= 2
    yield s, f, r


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_running_products(tokens: int, zeros: bool):
    a = column(tokens, zeros)
    one = torch.ones(3, dtype=torch.float64)
    for s, f, r in levels(a):
        for i in range(tokens):
            first = i // s * s
            before = torch.stack([one, *a[first : i + 1]]).prod(0)
            after = torch.stack([one, *a[i + 1 : first + s]]).prod(0)
            torch.testing.assert_close(f[i], before, rtol=1e-13, atol=0)
            torch.testing.assert_close(one if r[i] is None else r[i], after, rtol=1e-13, atol=0)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_pair_belongs_to_one_level(tokens: int, zeros: bool):
    a = column(tokens, zeros)
    found: dict[tuple[int, int], torch.Tensor] = {}
    for s, f, r in levels(a):
        right, left = scan.right_half(s, tokens), scan.left_half(s, tokens)
        for m, i in enumerate(right):
            for n, j in enumerate(left):
                if m // s == n // s:
                    assert (i, j) not in found
                    found[i, j] = scan.times(f[i], r[j])
    assert set(found) == {(i, j) for i in range(tokens) for j in range(i)}
    for (i, j), decay in found.items():
        torch.testing.assert_close(decay, torch.stack(a[j + 1 : i + 1]).prod(0), rtol=1e-13, atol=0)


def test_none_stands_for_one():
    assert scan.times(None, 3.0) == 3.0
    assert scan.times(3.0, None) == 3.0
    assert scan.times(None, None) is None
    assert scan.times(2.0, 3.0) == 6.0

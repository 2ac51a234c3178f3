"""The row table of packed sequences in Triton's interpreter; run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from kernel_fun._triton.packed import packed_rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "lengths, tail",
    [((5,), 0), ((3, 0, 0, 4), 2), ((0, 0, 1), 0), ((), 3), ((0,), 3), ((1,) * 33, 1), ((700, 1, 0, 300), 5)],
    ids=lambda v: str(v)[:20],
)
def test_rows(lengths: tuple[int, ...], tail: int, dtype: torch.dtype) -> None:
    expected = [(p, n, length - 1 - p) for n, length in enumerate(lengths) for p in range(length)]
    expected += [(-1, 0, 0)] * tail
    cu = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    found = packed_rows(cu, sum(lengths) + tail)
    assert found.dtype == torch.int32
    assert [tuple(row) for row in found.T.tolist()] == expected


def test_boundaries_outside_the_rows_point_nowhere_else() -> None:
    """Boundaries on a GPU are not checked: a wrong one must not lead a kernel before the first row."""
    pos = packed_rows(torch.tensor([-9, 4, 100]), 8)[0]
    assert (pos <= torch.arange(8)).all()

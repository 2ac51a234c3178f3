"""The row table of a packed call, built once and kept with the call for its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_fun._triton.packed import packed_rows

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Call


def rows_of(c: Call) -> Tensor | None:
    """int32 [3, T] of a packed call, None for a dense one."""
    if c.cu_seqlens is None:
        return None
    if "rows" not in c.memo:
        c.memo["rows"] = packed_rows(c.cu_seqlens, c.x.shape[1])
    return c.memo["rows"]

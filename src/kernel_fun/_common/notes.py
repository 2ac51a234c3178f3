"""What a backend worked out for a pass, for the next pass with the same facts to take over.

The facts of a pass are the shapes, strides and dtypes of the tensors that enter it, and its flags.
Which kernels it launches, with what sizes and into what memory, follows from them; where a tensor begins does
not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

FEW = 16
"""Passes of other facts that notes keep; beyond it all are forgotten: ever new ones keep no memory."""


class Notes(dict[Any, Any]):
    """Plans of one pass, under whatever names a backend gives them, and no tensor. Whoever hands notes to a
    pass has made sure that its facts are those of the passes before it."""

    def __init__(self) -> None:
        super().__init__()
        self._others: dict[Hashable, Notes] = {}

    def of(self, *tensors: Tensor | None) -> Notes:
        """The notes of a pass that begins where this one ended, and reads these tensors, on its device."""
        facts = tuple([None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors])
        found = self._others.get(facts)
        if found is None:
            if len(self._others) >= FEW:
                self._others.clear()
            found = self._others[facts] = Notes()
        return found

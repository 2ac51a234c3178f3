"""Names that move between releases of the CuTe DSL, and the releases this package was tested with."""

from __future__ import annotations

from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

DSL_TESTED = ("4.8.1",)

__all__ = ["DSL_TESTED", "LayoutEnum", "SmemAllocator"]

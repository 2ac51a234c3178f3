"""The contract of each stage: what it reads, what it returns. One signature, every backend.

Letters: B batch, T tokens per row, D channels, W taps, N sequences (B when dense). Stages take validated
arguments, compute in fp32 (fp64 where x is float64) and modify none of them but a Step's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Call, Step


class Gradients(NamedTuple):
    """Gradients, each in the dtype of its input; None for what is absent or was not asked for."""

    dx: Tensor
    """``[B, T, D]``; rows outside every sequence are 0."""
    dweight: Tensor | None
    """``[D, W]``."""
    dbias: Tensor | None
    """``[D]``."""
    dh0: Tensor | None
    """``[N, D, W]``; None without an initial state."""


class Fwd(Protocol):
    """The forward."""

    def __call__(self, c: Call) -> tuple[Tensor, Tensor | None]:
        """y ``[B, T, D]`` in x's dtype, 0 in rows outside every sequence; the final state ``[N, D, W]``
        in x's dtype if asked for."""
        ...


class Bwd(Protocol):
    """The backward."""

    def __call__(self, c: Call, dy: Tensor, dht: Tensor | None, wants_dw: bool) -> Gradients:
        """``dy [B, T, D]`` and ``dht [N, D, W]`` with any strides and float dtype; ``wants_dw``: the
        gradients of weight and bias are needed. The residual's gradient is not a stage: it is dy."""
        ...


class Update(Protocol):
    """One token per sequence."""

    def __call__(self, s: Step) -> Tensor:
        """y ``[N, D]`` in x's dtype; shifts ``s.cache`` in place and appends x."""
        ...

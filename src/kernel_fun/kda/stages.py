"""The contract of each stage: what it reads, what it returns. One signature, every backend.

Shapes use the letters of docs/kda.md. NT counts all chunks of a call (B*ceil(T/BT) dense, the sum of
ceil(len/BT) packed, in sequence order); *io* is the dtype q, k and v promote to; states are K-first
inside, whatever layout the caller asked for. Every stage takes the validated :class:`Call` and rebuilds
the gate, the normalised q and k and the activated beta from the caller's own tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernel_fun.kda.call import Call


AGAIN = "again"
"""Under this name a backend may leave an :class:`Again` in the notes of a call, or None."""

DECAYS = 9
"""Of a chunk and a channel, kept for the scans and the backward."""


class Intra(NamedTuple):
    """What the rows of one chunk know of each other."""

    A: Tensor
    """(I + L)^-1, ``[B, T, HV, BT]`` io."""
    Aqk: Tensor
    """scale * q k^T with decay, lower triangular, ``[B, T, HV, BT]`` io."""
    q_rstd: Tensor | None
    """1 / sqrt(sum q^2 + 1e-6), ``[B, T, H]`` fp32; None without l2norm."""
    k_rstd: Tensor | None
    total: Tensor | None
    """Decays of a chunk, ``[NT, HV, DECAYS K]`` fp32: of the whole, then before and after each block of 16
    tokens; None from a backend that rebuilds them from g."""

    def of_tokens(self, cut: Callable[[Tensor], Tensor], total: Tensor | None) -> Intra:
        """That of some tokens, or of them in another shape: what ``cut`` makes of all but the decays of
        chunks, which are ``total``."""
        q_rstd, k_rstd = (None if x is None else cut(x) for x in (self.q_rstd, self.k_rstd))
        return Intra(cut(self.A), cut(self.Aqk), q_rstd, k_rstd, total)


class Scan(NamedTuple):
    """The forward recurrence over chunks."""

    o: Tensor | None
    """``[B, T, HV, V]`` io; rows outside every sequence are 0. None without ``output``."""
    ht: Tensor | None
    """State after the last token, ``[N, HV, K, V]`` fp32 (``[N, HV, V, K]`` if v-first)."""
    h: Tensor | None
    """State at the start of each chunk, ``[NT, HV, K, V]``; on request."""
    v_new: Tensor | None
    """Value minus what the state already holds, times A and beta, ``[B, T, HV, V]``; on request."""


class ReverseScan(NamedTuple):
    """The backward recurrence over chunks. With ``only_dh0`` all but dh0 is None."""

    dh: Tensor | None
    """Gradient of the state at the end of each chunk, ``[NT, HV, K, V]``."""
    dv2: Tensor | None
    """Gradient of v_new, ``[B, T, HV, V]``."""
    dh0: Tensor | None
    """Gradient of the initial state, fp32, in its layout; None without one and without ``only_dh0``."""
    h: Tensor | None
    v_new: Tensor | None


class Grads(NamedTuple):
    """Gradients, each in the dtype of its input."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dA_log: Tensor | None
    """Per-chunk partial sums, ``[NT, HV]`` fp32; the chain adds them up in order."""
    ddt_bias: Tensor | None
    """Per-chunk partial sums, ``[NT, HV, K]`` fp32."""


class FwdIntra(Protocol):
    def __call__(self, call: Call, *, scan_next: bool = False) -> Intra:
        """``scan_next``: ``fwd_state`` of the same call follows at once; a backend may run the two beside
        each other."""
        ...


class FwdState(Protocol):
    def __call__(self, call: Call, intra: Intra, *, keep: bool, output: bool = True) -> Scan:
        """``keep``: return h and v_new as well; without ``return_intermediate_states`` a backend may
        decline, and its backward rebuilds them. ``output`` False: no o; with ``keep`` a rescan, h and v_new
        and nothing else, without it a summary, the final state if the call wants one and nothing else."""
        ...


class BwdState(Protocol):
    def __call__(
        self,
        call: Call,
        intra: Intra,
        do: Tensor | None,
        dht: Tensor | None,
        h: Tensor | None,
        v_new: Tensor | None,
        *,
        only_dh0: bool = False,
    ) -> ReverseScan:
        """``h`` and ``v_new`` None: not kept by the forward, rebuilt here. Else they are only handed on.
        ``only_dh0``: a summary, the gradient of the state before the first token and nothing else, with an
        initial state or without one; ``h`` and ``v_new`` are neither read nor rebuilt."""
        ...


class BwdGrads(Protocol):
    def __call__(self, call: Call, intra: Intra, scan: ReverseScan, do: Tensor | None) -> Grads: ...


class Again(Protocol):
    """The forward of a dense call that keeps no states, with the facts of one before: (o, ht, Intra). None
    where these tensors need more. A_log and dt_bias are None where the gate does not read them."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        h0: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Intra] | None: ...

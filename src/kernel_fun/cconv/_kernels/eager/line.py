"""What the eager stages share: every sequence on one line of rows, behind the W inputs before its first.

    line = [history 0 | tokens 0 | history 1 | tokens 1 | ... ]        [L, D] wide

A row's convolution reads the W-1 rows above it, which are its own sequence's or its history's, so dense and
packed calls, with and without an initial state, are the same sums over shifted rows: a packed sequence gets
the bits it gets alone. A packed line ends with a spare row of zeros for the tokens outside every sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.cconv.call import Call

BLOCK = 1 << 16
"""Elements of a block one CPU thread works on: a few of them stay in its cache."""


class Line(NamedTuple):
    """Where the tokens and states of a call stand on its line."""

    B: int
    T: int
    W: int
    N: int
    rows: Tensor | None
    """Packed: the row of each token, [T]; the last row for tokens outside every sequence."""
    covered: Tensor | None
    """Packed: which tokens are in a sequence, [T, 1]."""
    first: Tensor | None
    """Packed: the W rows of each sequence's history, [N * W]."""
    last: Tensor | None
    """Packed: the last W rows of each sequence, history included, [N * W]."""

    @property
    def length(self) -> int:
        """L."""
        return self.B * (self.W + self.T) if self.rows is None else self.T + self.N * self.W + 1

    def place(self, tokens: Tensor, out: Tensor) -> None:
        """Write ``tokens [B, T, D]`` to their rows of ``out [L, D]``; those of no sequence to nowhere."""
        if self.rows is None:
            self._dense(out)[:, self.W :] = tokens
        else:
            out.index_copy_(0, self.rows, tokens[0].to(out.dtype))
            out[-1].zero_()

    def tokens(self, line: Tensor) -> Tensor:
        """[B, T, D] of the rows of the tokens; zero for those of no sequence."""
        if self.rows is None:
            return self._dense(line)[:, self.W :]
        assert self.covered is not None
        return torch.where(self.covered, line.index_select(0, self.rows), 0.0)[None]

    def clear_history(self, out: Tensor) -> None:
        """Zero the rows of ``out`` where no token stands."""
        if self.first is None:
            self._dense(out)[:, : self.W].zero_()
        else:
            out.index_fill_(0, self.first, 0.0)
            out[-1].zero_()

    def place_history(self, state: Tensor, out: Tensor) -> None:
        """Write a state [N, D, W] to the history rows of ``out``."""
        if self.first is None:
            self._dense(out)[:, : self.W] = state.mT
        else:
            out.index_copy_(0, self.first, state.mT.flatten(0, 1).to(out.dtype))

    def history(self, line: Tensor) -> Tensor:
        """The history rows as a state [N, D, W]."""
        if self.first is None:
            return self._dense(line)[:, : self.W].mT
        return line.index_select(0, self.first).unflatten(0, (self.N, self.W)).mT

    def ends(self, line: Tensor) -> Tensor:
        """The last W rows of each sequence as a state [N, D, W]."""
        if self.last is None:
            return self._dense(line)[:, self.T :].mT
        return line.index_select(0, self.last).unflatten(0, (self.N, self.W)).mT

    def add_to_ends(self, state: Tensor, out: Tensor) -> None:
        """Add a state [N, D, W] to the last W rows of each sequence."""
        if self.last is None:
            self._dense(out)[:, self.T :] += state.mT.to(out.dtype)
        else:
            rows = out.index_select(0, self.last)
            out.index_copy_(0, self.last, rows + state.mT.flatten(0, 1).to(out.dtype))

    def _dense(self, line: Tensor) -> Tensor:
        return line.view(self.B, self.W + self.T, line.shape[1])


def line_of(c: Call) -> Line:
    """The line of a call; packed, made from cu_seqlens without waiting for the device."""
    (B, T, _), W, N = c.x.shape, c.weight.shape[1], c.N
    if c.cu_seqlens is None:
        return Line(B, T, W, N, None, None, None, None)
    cu = c.cu_seqlens.long()
    t = torch.arange(T, device=cu.device)
    sequences = torch.searchsorted(cu, t, right=True)  # counted from 1
    covered = sequences <= N
    rows = torch.where(covered, t + sequences * W, T + N * W)
    history = torch.arange(N * W, device=cu.device)
    n = history // W
    return Line(B, T, W, N, rows, covered[:, None], history + cu[n], history + cu[n + 1])


def wide(c: Call) -> torch.dtype:
    """The dtype of all arithmetic."""
    return torch.float64 if c.x.dtype == torch.float64 else torch.float32


def inputs(c: Call, line: Line) -> Tensor:
    """x and the initial state on the line, [L, D] wide."""
    placed = torch.zeros(line.length, c.x.shape[2], dtype=wide(c), device=c.x.device)
    line.place(c.x, placed)
    if c.initial_state is not None:
        line.place_history(c.initial_state, placed)
    return placed


def blocks(line: Tensor, first: int) -> Iterator[tuple[int, int]]:
    """Spans of rows from ``first`` on, to be worked on in turn: of a cache's size on a CPU, else one."""
    L, D = line.shape
    step = max(1, L)
    if line.device.type == "cpu":
        step = max(1, BLOCK * torch.get_num_threads() // max(1, D))
    for begin in range(first, L, step):
        yield begin, min(begin + step, L)


def taps(c: Call) -> tuple[Tensor, ...]:
    """w_j = weight[:, W-1-j] for j from 0 to W-1, each [D] wide."""
    return tuple(c.weight.to(wide(c)).mT.contiguous().flip(0).unbind(0))


def pre_activation(placed: Tensor, w: tuple[Tensor, ...], bias: Tensor | None, r: int, end: int) -> Tensor:
    """z of rows r to end."""
    oldest = len(w) - 1
    above = placed[r - oldest : end - oldest]
    z = above * w[oldest] if bias is None else torch.addcmul(bias, above, w[oldest])
    for j in range(oldest - 1, -1, -1):
        z.addcmul_(placed[r - j : end - j], w[j])
    return z


def one_plus_exp(z: Tensor) -> Tensor:
    """1 + exp(-z). Unlike ``torch.sigmoid``, which computes the last few elements of a tensor by another
    exponential, this has the same bits wherever an element stands."""
    return z.neg().exp_().add_(1.0)

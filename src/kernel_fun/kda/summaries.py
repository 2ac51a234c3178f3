"""What a run of tokens does to the state, ``[S_loc | M]``, and how runs after one another do: for context
parallel (see :mod:`kernel_fun.kda.context_parallel`).

Folds are in float64, where no setting of the process narrows a product, and cost a few matrices.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernel_fun.kda.stages import FwdState, Intra

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernel_fun._common.context_parallel import Split
    from kernel_fun.kda.call import Call


class Carried(NamedTuple):
    """What a backward needs of the exchange of its forward."""

    states: Tensor | None
    """State at the start of each piece's first sequence, ``[pieces, HV, K, V]``, 0 where it begins there; of
    pieces cut into rows, at the start of each row."""
    transitions: Tensor | None
    """M of each piece that one sequence fills, ``[such pieces, HV, K, K]``; of pieces cut into rows, of the
    rows that have one."""


def fold(gathered: Tensor, split: Split, slots: range, V: int) -> Tensor:
    """``S = M S + S_loc`` over slots, beginning with the first one's S_loc: ``[HV, K, V]`` in float64."""
    S: Tensor | None = None
    for slot in slots:
        rank, part = split.home(slot)
        summary = gathered[rank, part]
        local = summary[..., :V].double()
        S = local if S is None else torch.baddbmm(local, summary[..., V:].double(), S)
    assert S is not None
    return S


def compose(local: Tensor, M: Tensor | None, through: bool, *, backwards: bool = False) -> Tensor:
    """Summaries of each run with all before it, in float64, of runs with S_loc ``[runs, HV, K, V]`` and M
    ``[runs, HV, K, K]``: ``[runs, HV, K, V + K]``. ``backwards``: with all after it, M transposed.

    Without ``through`` the outermost S_loc begins at what was beyond all of them, and there is no M of them:
    ``[runs, HV, K, V]``, from an M of all runs but the outermost, ``[runs - 1, HV, K, K]``.

    With M the runs of a head stand together in memory, so that :func:`apply` is one product a head.
    """
    runs, HV, K, V = local.shape
    wide = None if M is None else M.double()
    if wide is None or not through:
        found = local.to(torch.float64, copy=True)
    else:
        found = local.new_zeros(HV, runs, K, V + K, dtype=torch.float64).transpose(0, 1)
        found[..., :V] = local
    if wide is None:
        return found
    order = range(runs - 1, -1, -1) if backwards else range(runs)
    if through:
        found[order[0], ..., V:] = wide[order[0]]
    for inner, i in pairwise(order):
        found[i].baddbmm_(wide[i if through or backwards else i - 1], found[inner])
    return found


def apply(summaries: Tensor, S: Tensor | None, out: Tensor) -> None:
    """``M S + S_loc`` of each summary ``[runs, HV, K, V + K]`` into ``out`` ``[runs, HV, K, V]``; S_loc where
    S is None."""
    runs, _, K, V = out.shape
    local = summaries[..., :V]
    if S is None:
        out.copy_(local)
        return
    by_head = summaries.transpose(0, 1).flatten(1, 2)
    carried = torch.bmm(by_head[..., V:], S).unflatten(1, (runs, K)).transpose(0, 1)
    torch.add(local, carried, out=out)


def part(
    call: Call, cut: Callable[[Tensor], Tensor], cu: Tensor | None = None, cu_cpu: Tensor | None = None
) -> Call:
    """The call on some of its tokens, or on them in another shape, without states; states are K-first."""
    q, k, v, g, beta = (cut(x) for x in (call.q, call.k, call.v, call.g, call.beta))
    return call.like(
        notes=call.notes.of(q, k, v, g, beta, cu),
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=None,
        output_final_state=False,
        state_v_first=False,
        cu_seqlens=cu,
        cu_seqlens_cpu=cu_cpu,
        verbatim={},
        memo={},
    )


def final_states(rows: Call, intra: Intra, start: Tensor | None, fwd_state: FwdState) -> Tensor:
    """States after the sequences of a call, K-first, and nothing else."""
    notes = rows.notes.of(rows.v, start)
    scan = fwd_state(
        rows.like(notes=notes, initial_state=start, output_final_state=True), intra, keep=False, output=False
    )
    assert scan.ht is not None
    return scan.ht


def unread(call: Call, chunks: int) -> tuple[Tensor, Tensor]:
    """In place of h and v_new: a reverse scan reads neither, it only hands them on."""
    HV, K, V = sizes(call)
    one = call.q.new_empty(1, dtype=call.wide())
    return one.expand(chunks, HV, K, V), one.expand(*call.q.shape[:2], HV, V)


def without(states: Tensor, rows: list[int]) -> Tensor:
    """States with zeros in the rows of sequences that another rank answers for."""
    for n in rows:
        states[n] = 0
    return states


def k_first(states: Tensor, call: Call) -> Tensor:
    return (states.mT if call.state_v_first else states).to(call.wide())


def as_asked(states: Tensor, call: Call) -> Tensor:
    """K-first states in the caller's layout."""
    return states.mT.contiguous() if call.state_v_first else states


def message(split: Split, HV: int, K: int, V: int) -> tuple[int, ...]:
    """Shape of what a rank gives to an all-gather: ``[S | M]`` of each of its pieces; S alone where there are
    two slots, and no third between them that a state passes through."""
    pieces = len(split.pieces)
    return (pieces, HV, K, V + K if split.ranks * pieces > 2 else V)


def sizes(call: Call) -> tuple[int, int, int]:
    """HV, K, V."""
    HV, V = call.v.shape[2:]
    return HV, call.q.shape[3], V


def zeros(call: Call, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=call.wide(), device=call.q.device)

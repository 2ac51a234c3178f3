"""Context parallel where every piece of a rank holds one sequence, or its part of one, and nothing else.

A scan of one sequence is serial, and at few heads leaves most of a GPU idle. A rank summarises its tokens for
the others anyway; summaries of shorter runs cost no more, and let it scan the runs side by side. So the local
tokens are read as a dense batch of equal rows, those of a piece one after another, without a copy. All rows
are summarised, composed to what the piece sends, and scanned from starts that follow from what came from
the ranks before. The backward is the mirror image. A piece in one row needs no more than the exchange does.

Every rank sends when its summaries are done, and does nothing until those of all ranks have come: a gather
that waits holds SMs, and a kernel with about as many CTAs as there are SMs takes up to twice as long without.

What is exchanged does not tell how many rows there were: the other ranks may do as they like.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch

from kernel_fun._common import device
from kernel_fun.kda import chain
from kernel_fun.kda.call import BT
from kernel_fun.kda.stages import BwdState, FwdIntra, FwdState, Grads, Intra, ReverseScan
from kernel_fun.kda.summaries import (
    Carried,
    apply,
    as_asked,
    compose,
    final_states,
    fold,
    k_first,
    part,
    sizes,
    unread,
    without,
    zeros,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun._common.context_parallel import Split
    from kernel_fun._common.exchange import Exchange
    from kernel_fun._common.plan import Plan
    from kernel_fun.kda.call import Call

TOKENS = 4096
"""A row has at least so many: what scans save has to make up for composing, which is serial over the rows."""
ROWS: int | None = None
"""Of a piece, where a test or a measurement says how many; None: as many as fill the GPU."""


def count(call: Call, split: Split) -> int:
    """Rows a piece is cut into: as many as fill the GPU with the widest tiles of V that scans have."""
    if not split.begun_elsewhere() and not split.ended_elsewhere():
        return 1  # nothing else would need a summary
    HV, _, V = sizes(call)
    ctas = len(split.pieces) * HV * (V // 128 if V % 128 == 0 else -(-V // 64))
    most = min(device.of(call.q.device).sms // ctas, split.piece_rows // TOKENS) if ROWS is None else ROWS
    # of whole chunks: those of a piece are the same however it is cut
    return next((n for n in range(most, 1, -1) if split.piece_rows % (n * BT) == 0), 1)


def begin(call: Call, plan: Plan, split: Split) -> tuple[Call, Intra]:
    """The call as rows, and their Intra. Rows of whole chunks have the chunks of the tokens as they were
    given; then fwd_intra reads those, and is launched before anything else is done."""
    fwd_intra = cast(FwdIntra, plan.load("fwd_intra"))
    n = count(call, split) * len(split.pieces)
    if call.q.shape[1] % (n * call.BT):
        rows = part(call, lambda x: _cut(x, n))
        return rows, fwd_intra(rows)
    whole = fwd_intra(part(call, lambda x: x))
    return part(call, lambda x: _cut(x, n)), whole.of_tokens(lambda x: _cut(x, n), whole.total)


def forward(
    call: Call, plan: Plan, split: Split, exchange: Exchange, begun: tuple[Call, Intra]
) -> tuple[chain.Forward, Carried]:
    """See :func:`kernel_fun.kda.context_parallel.forward`. ``begun``: what :func:`begin` gave."""
    rows, intra = begun
    S = rows.q.shape[0] // len(split.pieces)
    chain._settle(call)
    fwd_state = cast(FwdState, plan.load("fwd_state"))
    own = _own(call.initial_state, call, split.begun_elsewhere())
    composed, transitions = _summaries(split, S, rows, intra, own, fwd_state)
    chain._settle(call)
    given = {i: composed[i][-1] for i, piece in enumerate(split.pieces) if piece.post}
    exchange.send_rows(given)
    gathered = exchange.arrive()
    states = _states(call, split, S, own, _before(gathered, split, call), composed)
    states = None if states is None else states.flatten(0, 1)
    keep = call.return_intermediate_states or (call.disable_recompute and plan.problem.needs_grad)
    whole = rows.like(
        notes=rows.notes.of(states), initial_state=states, output_final_state=call.output_final_state
    )
    scan = fwd_state(whole, intra, keep=keep)
    exchange.confirm()
    chain._settle(call)
    assert scan.o is not None
    ht = None if scan.ht is None else _asked(scan.ht, S, S - 1, split.ended_elsewhere(), call)
    # detached: what is a view of another tensor could not be changed in place by who gets it
    o = _joined(scan.o).detach()
    return chain.Forward(o, ht, scan.h, scan.v_new, intra), Carried(states, transitions)


def backward(
    call: Call,
    plan: Plan,
    split: Split,
    exchange: Exchange,
    intra: Intra,
    carried: Carried,
    upstream: tuple[Tensor, Tensor | None],
    kept: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Tensor | None]:
    """See :func:`kernel_fun.kda.context_parallel.backward`."""
    n = intra.A.shape[0]
    S = n // len(split.pieces)
    bwd_state = cast(BwdState, plan.load("bwd_state"))
    rows, do = part(call, lambda x: _cut(x, n)), _cut(upstream[0], n)
    whole = rows.like(notes=rows.notes.of(carried.states), initial_state=carried.states)
    own = _own(upstream[1], call, split.ended_elsewhere())
    gives = bool(split.begun_elsewhere())
    composed: dict[int, Tensor] = {}
    scan: ReverseScan | None = None
    if gives and S == 1 and not split.ended_elsewhere():
        # the ordinary reverse scan waits for nobody, and is the summary
        scan = _reverse(whole, intra, do, own, bwd_state)
        assert scan.dh0 is not None
        composed = {i: dh0[None] for i, dh0 in enumerate(scan.dh0)}
    else:
        composed = _reverse_summaries(split, S, rows, intra, carried.transitions, do, own, bwd_state)
    chain._settle(call)
    given = {i: composed[i][0] for i, piece in enumerate(split.pieces) if piece.pre}
    exchange.send_rows(given)
    gathered = exchange.arrive()
    h, v_new = kept
    if h is None or v_new is None:
        states = cast(FwdState, plan.load("fwd_state"))(whole, intra, keep=True, output=False)
        h, v_new = states.h, states.v_new
        assert h is not None
        assert v_new is not None
    if scan is None:
        ends = _states(call, split, S, own, _after(gathered, split, call), composed, backwards=True)
        ends = None if ends is None else ends.flatten(0, 1)
        scan = _reverse(whole, intra, do, ends, bwd_state)
    grads = chain.gradients(whole, plan, intra, scan._replace(h=h, v_new=v_new), do)
    exchange.confirm()
    dh0 = None
    if call.initial_state is not None:
        assert scan.dh0 is not None
        dh0 = _asked(scan.dh0, S, 0, split.begun_elsewhere(), call)
    dq, dk, dv, dg, dbeta = (_joined(x) for x in grads[:5])
    return Grads(dq, dk, dv, dg, dbeta, grads.dA_log, grads.ddt_bias), dh0


def _summaries(
    split: Split, S: int, rows: Call, intra: Intra, own: Tensor | None, fwd_state: FwdState
) -> tuple[dict[int, Tensor], Tensor | None]:
    """Of each piece the summaries of each row with all before it, as far as anyone needs them; and M of the
    rows of :func:`_with_transition`. The first row of a sequence begins with the caller's state."""
    pieces = split.pieces
    wanted = _span(i for i in range(S * len(pieces)) if i % S < S - 1 or pieces[i // S].post)
    if not wanted:
        return {}, None
    start = None
    if own is not None:
        start = own.new_zeros(len(pieces), S, *own.shape[1:])
        start[:, 0] = own
        start = start.flatten(0, 1)[wanted.start : wanted.stop]
    local = final_states(*_some(rows, intra, wanted), start, fwd_state)
    mapped, M = _with_transition(split, S), None
    if mapped:
        M = _transitions(*_some(rows, intra, mapped), fwd_state)
    found: dict[int, Tensor] = {}
    for i, piece in enumerate(pieces):
        through, at = piece.pre > 0, range(i * S, (i + 1) * S if piece.post else (i + 1) * S - 1)
        if at:
            found[i] = compose(_rows(local, wanted, at), _of(M, mapped, at if through else at[1:]), through)
    return found, M


def _transitions(rows: Call, intra: Intra, fwd_state: FwdState) -> Tensor:
    """M ``[rows, HV, K, K]`` of every row, in float64: the product of those of its parts, which are scanned
    side by side. A scan of values that are 0 from the identity; all rows and heads read the same 0."""
    HV, K, _ = sizes(rows)
    R, T = rows.v.shape[:2]
    chunks = T // rows.BT if T % rows.BT == 0 else 1
    n = _parts(R * HV * -(-K // 128), chunks, device.of(rows.q.device).sms)

    def cut(x: Tensor) -> Tensor:
        return x.reshape(R * n, T // n, *x.shape[2:])

    nothing = rows.v.new_zeros(1, T // n, 1, K).expand(R * n, T // n, HV, K)
    parts = part(rows, cut)
    parts = parts.like(notes=parts.notes, v=nothing)
    identity = torch.eye(K, dtype=rows.wide(), device=rows.q.device).expand(R * n, HV, K, K)
    found = final_states(parts, intra.of_tokens(cut, intra.total), identity, fwd_state)
    by_part = found.view(R, n, HV, K, K).transpose(0, 1)
    by_part = by_part.to(torch.float64, memory_format=torch.contiguous_format)
    M = by_part[0]
    for later in by_part[1:]:
        M = torch.bmm(later.flatten(0, 1), M.flatten(0, 1)).view(M.shape)
    return M


PARTS = (1, 2, 4)


def _parts(chains: int, chunks: int, sms: int) -> int:
    """Into how many parts a row is cut whose chunks ``chains`` CTAs go through: what takes the fewest steps,
    in waves of a CTA for each SM. As of a row, a part has at least TOKENS: products take time too."""
    able = [n for n in PARTS if chunks % n == 0 and (n == 1 or chunks // n >= TOKENS // BT)]
    return min(able, key=lambda n: -(-chains * n // max(sms, 1)) * (chunks // n))


def _reverse_summaries(
    split: Split,
    S: int,
    rows: Call,
    intra: Intra,
    M: Tensor | None,
    do: Tensor,
    own: Tensor | None,
    bwd_state: BwdState,
) -> dict[int, Tensor]:
    """Of each piece the summaries, for the gradient, of each row with all after it, as :func:`_summaries`."""
    pieces = split.pieces
    wanted = _span(i for i in range(S * len(pieces)) if i % S or pieces[i // S].pre)
    if not wanted:
        return {}
    end = None
    if own is not None:
        end = own.new_zeros(len(pieces), S, *own.shape[1:])
        end[:, -1] = own
        end = end.flatten(0, 1)[wanted.start : wanted.stop]
    few, their = _some(rows, intra, wanted)
    do = do[wanted.start : wanted.stop]
    few = few.like(notes=few.notes.of(do, end))
    local = bwd_state(few, their, do, end, None, None, only_dh0=True).dh0
    assert local is not None
    mapped = _with_transition(split, S)
    M = None if M is None else M.mT
    found: dict[int, Tensor] = {}
    for i, piece in enumerate(pieces):
        through, at = piece.post > 0, range(i * S if piece.pre else i * S + 1, (i + 1) * S)
        if at:
            mine = _of(M, mapped, at if through else at[:-1])
            found[i] = compose(_rows(local, wanted, at), mine, through, backwards=True)
    return found


def _with_transition(split: Split, S: int) -> range:
    """Rows whose M is needed, from the first to the last: those behind a state that is not known beforehand
    and before an end whose gradient is not."""

    def needs(row: int) -> bool:
        piece = split.pieces[row // S]
        return (row % S > 0 or piece.pre > 0) and (row % S < S - 1 or piece.post > 0)

    return _span(row for row in range(S * len(split.pieces)) if needs(row))


def _states(
    call: Call,
    split: Split,
    S: int,
    own: Tensor | None,
    came: dict[int, Tensor],
    composed: dict[int, Tensor],
    *,
    backwards: bool = False,
) -> Tensor | None:
    """States ``[pieces, S, HV, K, V]`` before the rows, or ``backwards`` after them; None where all are 0.
    Beyond the outermost row of a piece is what came from other ranks, or the caller's."""
    if own is None and not came and S == 1:
        return None
    found = zeros(call, (len(split.pieces), S, *sizes(call)))
    outermost, inner = (S - 1, slice(0, S - 1)) if backwards else (0, slice(1, S))
    if own is not None:
        found[:, outermost] = own
    for i, state in came.items():
        found[i, outermost] = state
    if S > 1:
        for i, summaries in composed.items():
            beside = summaries[1 - S :] if backwards else summaries[: S - 1]
            apply(beside, came.get(i), found[i, inner])
    return found


def _before(gathered: Tensor, split: Split, call: Call) -> dict[int, Tensor]:
    """Of each piece whose sequence began elsewhere: the state there."""
    slots = {i: range(p.slot - p.pre, p.slot) for i, p in enumerate(split.pieces) if p.pre}
    return {i: fold(gathered, split, before, call.v.shape[3]) for i, before in slots.items()}


def _after(gathered: Tensor, split: Split, call: Call) -> dict[int, Tensor]:
    """Of each piece whose sequence goes on elsewhere: the gradient of the state there."""
    slots = {i: range(p.slot + p.post, p.slot, -1) for i, p in enumerate(split.pieces) if p.post}
    return {i: fold(gathered, split, after, call.v.shape[3]) for i, after in slots.items()}


def _own(states: Tensor | None, call: Call, others: list[int]) -> Tensor | None:
    """The caller's states ``[pieces, HV, K, V]``, 0 where another rank answers; None where none is left."""
    if states is None or len(others) == len(states):
        return None
    return without(k_first(states, call).clone(), others)


def _asked(states: Tensor, S: int, row: int, others: list[int], call: Call) -> Tensor:
    """Of every piece the state of one of its rows, in the caller's layout, 0 where another rank answers."""
    mine = states if S == 1 else states[row::S].clone()
    return as_asked(without(mine, others), call).detach()


def _reverse(call: Call, intra: Intra, do: Tensor, dht: Tensor | None, bwd_state: BwdState) -> ReverseScan:
    B, T = call.q.shape[:2]
    unread_states = unread(call, B * -(-T // call.BT))
    return bwd_state(call.like(notes=call.notes.of(do, dht)), intra, do, dht, *unread_states)


def _some(rows: Call, intra: Intra, wanted: range) -> tuple[Call, Intra]:
    """Some of the rows."""
    B, T = rows.q.shape[:2]
    if len(wanted) == B:
        return rows, intra
    at, chunks = slice(wanted.start, wanted.stop), -(-T // rows.BT)
    few = part(rows, lambda x: x[at])
    total = None if intra.total is None else intra.total[wanted.start * chunks : wanted.stop * chunks]
    return few, intra.of_tokens(lambda x: x[at], total)


def _cut(x: Tensor, n: int) -> Tensor:
    """``[1, tokens, ...]`` as rows ``[n, tokens / n, ...]``: the same memory."""
    return x if n == 1 else x.view(n, x.shape[1] // n, *x.shape[2:])


def _joined(x: Tensor) -> Tensor:
    """Rows as ``[1, tokens, ...]``."""
    return x if x.shape[0] == 1 else x.flatten(0, 1)[None]


def _span(rows: Iterable[int]) -> range:
    """From the first to the last of some rows."""
    found = list(rows)
    return range(found[0], found[-1] + 1) if found else range(0)


def _of(M: Tensor | None, have: range, rows: range) -> Tensor | None:
    """As :func:`_rows`; None of none."""
    return None if M is None or not rows else _rows(M, have, rows)


def _rows(x: Tensor, have: range, rows: range) -> Tensor:
    """Some rows of a tensor that has these rows."""
    return x[rows.start - have.start : rows.stop - have.start]

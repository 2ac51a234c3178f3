"""chunk_kda over the ranks of a process group: one sequence may lie on many of them.

What a run of tokens does to the state is affine, so a slot (see _common.context_parallel) is summarised by

    S_end = M S_start + S_loc        S_loc: from a state of zero; M: the product of the chunks' transitions

and its transpose carries the gradient: dS_start = M^T dS_end + dS_loc. Forward: every slot whose last
sequence goes on gives [S_loc | M] of it to one all-gather; a slot whose first sequence began elsewhere folds
the summaries from the slot where it began (whose S_loc starts from the caller's initial state), and the
ordinary scan runs with that. Backward: the mirror image, from the slot where the sequence ends. M is needed
only of slots that one sequence fills, and is kept for the backward.

Here are pieces with several sequences; where each of a rank's pieces holds one, :mod:`context_rows` cuts it
into rows that fill the GPU.

The backward scans in reverse once on a rank that waits for no other, before the exchange, and rebuilds the
chunk states, which need nothing from later, while the exchange is in flight.

The summaries are the stages' own: S_loc and M are the final state of fwd_state with values [v | 0] and
initial state [0 | I]; dS_loc is the gradient of the initial state from bwd_state. So every backend summarises
with its own kernels and its own Intra.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from kernel_fun._common import check
from kernel_fun._common.exchange import Exchange, Silence, Terms, agreed_size, failing, reduce_over
from kernel_fun.kda import chain, context_rows
from kernel_fun.kda.autograd import _NoDoubleBackward, intermediate_states, undisturbed
from kernel_fun.kda.call import TENSORS, Call
from kernel_fun.kda.stages import BwdState, FwdIntra, FwdState, Grads, Intra, ReverseScan
from kernel_fun.kda.summaries import (
    Carried,
    as_asked,
    final_states,
    fold,
    k_first,
    message,
    part,
    sizes,
    unread,
    without,
    zeros,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun._common.context_parallel import Piece, Split
    from kernel_fun._common.plan import Plan

FORWARD, BACKWARD = "chunk_kda forward", "chunk_kda backward"
Begun = tuple[Call, Intra] | None
"""Of a call cut into rows: these, and their Intra."""


def failing_together(arguments: dict[str, Any]) -> AbstractContextManager[Split | None]:
    """Around what a rank checks before its forward: its exception reaches every rank of the cp group. Gives
    the context as it is read."""

    def is_on(switch: Any) -> bool:
        """Whether one that may be refused yet, a tensor say, is taken for True."""
        return not isinstance(switch, torch.Tensor) and bool(switch)

    def exchange(split: Split) -> Exchange | Silence:
        kwargs = arguments["kwargs"]
        gated = is_on(arguments["use_gate_in_kernel"])
        gate = {n: kwargs.get(n) for n in ("A_log", "dt_bias")} if gated else {}
        given = {
            n: x for n, x in {**arguments, **gate}.items() if isinstance(x, torch.Tensor) and n in TENSORS
        }
        v_first = is_on(arguments["state_v_first"]) or is_on(kwargs.get("transpose_state_layout"))
        told = _sizes_told(given, v_first)
        if told is None:
            return Silence.UNKNOWN_SIZE
        is_wide = any(x.dtype == torch.float64 for x in given.values())
        dtype, device = torch.float64 if is_wide else torch.float32, next(iter(given.values())).device
        return Exchange(split, Terms(FORWARD, message(split, *told), dtype), device)

    return failing(arguments["cp_context"], exchange)


def _sizes_told(given: dict[str, Tensor], v_first: bool) -> tuple[int, int, int] | None:
    """HV, K, V as the arguments tell them that have the right number of dimensions, or None. None too where
    a size is refused: a rank of the same sizes refuses them itself, and waits for nobody."""

    def told(place: dict[str, int]) -> list[int]:
        dims = {"beta": 3, "A_log": 1}
        right = [n for n in place if n in given and given[n].dim() == dims.get(n, 4)]
        return [given[n].shape[place[n]] for n in right]

    k, v = (3, 2) if v_first else (2, 3)
    HV = agreed_size(told({"v": 2, "g": 2, "beta": 2, "A_log": 0}), told({"initial_state": 1}))
    K = agreed_size(told({"q": 3, "k": 3, "g": 3}), told({"initial_state": k}))
    V = agreed_size(told({"v": 3}), told({"initial_state": v}))
    if HV is None or K is None or V is None or HV < 1 or not 1 <= K <= 256:
        return None
    return HV, K, V


def run(call: Call, plan: Plan, begun: Begun = None) -> Any:
    """Forward with or without a graph: (o, final_state), or a 3-tuple with the chunk states. ``begun``: what
    :func:`begin` gave, if it was called."""
    exchange = Exchange(_split(call), _terms(call, FORWARD, plan), call.q.device)
    with exchange.or_tell():
        begun = begun or begin(call, plan)
        if plan.problem.needs_grad:
            return ContextParallelKDA.apply(call, plan, exchange, begun, *call.tensors())
        with undisturbed(call):
            out, _ = forward(call, plan, exchange, begun)
    if not call.return_intermediate_states:
        return out.o, out.ht
    return out.o, out.ht, intermediate_states(call, out)


class ContextParallelKDA(torch.autograd.Function):
    """chunk_kda under context parallel. Saved beside what ChunkKDA saves: the states that came from other
    ranks, and the transitions of pieces that one sequence fills."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, plan: Plan, exchange: Exchange, begun: Begun, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        with undisturbed(call):
            out, carried = forward(call, plan, exchange, begun)
        ctx.call, ctx.plan = call.without_tensors(), plan
        # a rank whose saved tensors are gone or changed can still make the exchange, and tell
        terms = _terms(call, BACKWARD, plan)
        ctx.exchange = partial(Exchange, _split(call), terms, call.q.device, exchange.number)
        cu = check.kept(call.cu_seqlens)
        ctx.save_for_backward(*tensors, *out.intra, out.h, out.v_new, *carried, cu)
        ctx.set_materialize_grads(False)
        return out.o, out.ht

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        do, dht = grad_outputs
        n, m = len(TENSORS), len(TENSORS) + len(Intra._fields)
        exchange = ctx.exchange()
        with exchange.or_tell():
            saved = ctx.saved_tensors
            h, v_new, *carried, cu = saved[m:]
            call = ctx.call.with_tensors(saved[:n], cu, notes=ctx.call.notes.of(*saved, do, dht))
            intra = Intra(*saved[n:m])
            with undisturbed(call):
                grads, dh0 = backward(
                    call, ctx.plan, exchange, intra, Carried(*carried), (do, dht), (h, v_new)
                )
        results = (*grads, dh0)
        if torch.is_grad_enabled():
            results = _NoDoubleBackward.apply(len(results), *results, *saved[:n], do, dht)
        return (None, None, None, None, *results)


def begin(call: Call, plan: Plan) -> Begun:
    """What of a forward can be under way while the host prepares an exchange and autograd a node."""
    if call.split is None or plan.backend == "fla" or not call.split.one_each:
        return None
    with undisturbed(call):
        return context_rows.begin(call, plan, call.split)


def forward(call: Call, plan: Plan, exchange: Exchange, begun: Begun) -> tuple[chain.Forward, Carried]:
    """Summaries, one all-gather, the fold, the ordinary scan."""
    split = _split(call)
    if begun is not None:
        return context_rows.forward(call, plan, split, exchange, begun)
    return _forward(call, plan, split, exchange)


def _forward(call: Call, plan: Plan, split: Split, exchange: Exchange) -> tuple[chain.Forward, Carried]:
    """Of pieces with several sequences. What the summaries need of fwd_intra comes first; the rest of it runs
    while the gather is in flight."""
    runs, done = _runs(split), dict[int, Intra]()
    transitions: list[Tensor] = []
    fwd_intra = cast(FwdIntra, plan.load("fwd_intra"))
    fwd_state = cast(FwdState, plan.load("fwd_state"))
    summaries: dict[int, Tensor] = {}
    for i, piece in enumerate(split.pieces):
        if not piece.post:
            continue
        rows = _rows(call, split, range(piece.last, piece.last + 1))
        done[piece.last] = fwd_intra(rows)
        chain._settle(call)
        summaries[i] = _summary(rows, done[piece.last], call, split, piece, fwd_state)
        if piece.passes_through:
            transitions.append(summaries[i][..., call.v.shape[3] :].clone())
    chain._settle(call)
    exchange.send_rows(summaries)
    for sequences in runs:
        if sequences.start not in done:
            done[sequences.start] = fwd_intra(_rows(call, split, sequences))
            chain._settle(call)
    intra = _join(call, split, runs, done)
    gathered = exchange.arrive()
    states = zeros(call, (len(split.pieces), *sizes(call)))
    for i, piece in enumerate(split.pieces):
        if piece.pre:
            states[i] = fold(gathered, split, range(piece.slot - piece.pre, piece.slot), call.v.shape[3])
    keep = call.return_intermediate_states or (call.disable_recompute and plan.problem.needs_grad)
    scan = fwd_state(_with_states(call, split, states), intra, keep=keep)
    exchange.confirm()
    chain._settle(call)
    assert scan.o is not None
    ht = None if scan.ht is None else without(scan.ht, split.ended_elsewhere())
    kept = torch.stack(transitions) if transitions else states.new_empty(0)
    return chain.Forward(scan.o, ht, scan.h, scan.v_new, intra), Carried(states, kept)


def backward(
    call: Call,
    plan: Plan,
    exchange: Exchange,
    intra: Intra,
    carried: Carried,
    upstream: tuple[Tensor | None, Tensor | None],
    kept: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Tensor | None]:
    """The mirror image of :func:`forward`. Returns the gradients and that of the caller's initial state."""
    split = _split(call)
    do, dht = upstream
    if do is None:
        do = call.v.new_zeros(call.v.shape, dtype=call.q.dtype)
    path = context_rows.backward if split.one_each else _backward
    grads, dh0 = path(call, plan, split, exchange, intra, carried, (do, dht), kept)
    dh0 = None if call.initial_state is None or dh0 is None else dh0.to(call.initial_state.dtype)
    if split.reduce_gradients:
        dA_log, ddt_bias = reduce_over(split, grads.dA_log, grads.ddt_bias)
        grads = grads._replace(dA_log=dA_log, ddt_bias=ddt_bias)
    return grads, dh0


def _backward(
    call: Call,
    plan: Plan,
    split: Split,
    exchange: Exchange,
    intra: Intra,
    carried: Carried,
    upstream: tuple[Tensor, Tensor | None],
    kept: tuple[Tensor | None, Tensor | None],
) -> tuple[Grads, Tensor | None]:
    """Of pieces with several sequences."""
    do, dht = upstream
    assert carried.states is not None
    assert carried.transitions is not None
    whole = _with_states(call, split, carried.states)
    scan: ReverseScan | None = None
    bwd_state = cast(BwdState, plan.load("bwd_state"))
    summaries: dict[int, Tensor] = {}
    if not split.ended_elsewhere():
        chunks = sum(_chunks(split, n, call.BT) for n in range(len(split.bounds) - 1))
        scan = bwd_state(whole, intra, do, dht, *unread(whole, chunks))
        for i, piece in enumerate(split.pieces):
            if piece.pre:
                assert scan.dh0 is not None
                summaries[i] = k_first(scan.dh0[piece.first], call)
    else:
        transitions = iter(carried.transitions)
        for i, piece in enumerate(split.pieces):
            if not piece.pre:
                continue
            summaries[i] = _gradient(call, split, piece, intra, do, dht, bwd_state)
            if piece.passes_through:
                summaries[i] = torch.cat((summaries[i], next(transitions).mT), -1)
    chain._settle(call)
    exchange.send_rows(summaries)
    h, v_new = kept
    if h is None or v_new is None:
        fwd_state = cast(FwdState, plan.load("fwd_state"))
        states = fwd_state(whole, intra, keep=True, output=False)
        h, v_new = states.h, states.v_new
        assert h is not None
        assert v_new is not None
    gathered = exchange.arrive()
    if scan is None:
        dht = _ends(call, split, gathered, dht)
        scan = bwd_state(whole, intra, do, dht, h, v_new)
    grads = chain.gradients(whole, plan, intra, scan._replace(h=h, v_new=v_new), do)
    exchange.confirm()
    return grads, None if scan.dh0 is None else without(scan.dh0, split.begun_elsewhere())


def _summary(rows: Call, intra: Intra, call: Call, split: Split, piece: Piece, fwd_state: FwdState) -> Tensor:
    """[S_loc | M] ``[HV, K, V + K]`` of a piece's last sequence; where it begins in the piece, the state it
    reaches from its initial state, ``[HV, K, V]``: nothing is folded into it."""
    HV, K, V = sizes(call)
    if not piece.passes_through:
        own = None if call.initial_state is None else call.initial_state[piece.last : piece.last + 1]
        start = None if own is None else k_first(own, call)
        return final_states(rows, intra, start, fwd_state)[0]
    B, L = rows.q.shape[:2]
    values = torch.cat((rows.v, rows.v.new_zeros(B, L, HV, K)), -1)
    identity = torch.eye(K, dtype=call.wide(), device=call.q.device)
    start = torch.cat((identity.new_zeros(K, V), identity), -1).expand(1, HV, K, V + K)
    return final_states(rows.like(notes=rows.notes, v=values), intra, start, fwd_state)[0]


def _gradient(
    call: Call,
    split: Split,
    piece: Piece,
    intra: Intra,
    do: Tensor,
    dht: Tensor | None,
    bwd_state: BwdState,
) -> Tensor:
    """dS_loc ``[HV, K, V]``: gradient of the state before a piece's first sequence, 0 coming from later."""
    n = piece.first
    lo, hi = split.rows(n)
    rows = _rows(call, split, range(n, n + 1))
    ends_here = not piece.passes_through and dht is not None
    own = k_first(dht[n : n + 1], call) if ends_here and dht is not None else None
    do = do[:, lo:hi]
    rows = rows.like(notes=rows.notes.of(do, own))
    scan = bwd_state(rows, _rows_of(intra, split, n, rows.BT), do, own, None, None, only_dh0=True)
    assert scan.dh0 is not None
    return scan.dh0[0]


def _ends(call: Call, split: Split, gathered: Tensor, dht: Tensor | None) -> Tensor:
    """Gradients of the states after the local sequences, in the caller's layout: those of the final states,
    and what came from the ranks where a sequence goes on."""
    ends = zeros(call, (len(split.bounds) - 1, *sizes(call)))
    if dht is not None:
        ends.copy_(k_first(dht, call))
    for piece in split.pieces:
        if piece.post:
            after = range(piece.slot + piece.post, piece.slot, -1)
            ends[piece.last] = fold(gathered, split, after, call.v.shape[3])
    return as_asked(ends, call)


def _runs(split: Split) -> list[range]:
    """The local sequences in order, cut so that every piece's last sequence that goes on stands alone."""
    runs: list[range] = []
    begin = 0
    for piece in split.pieces:
        if piece.post:
            runs += [range(begin, piece.last), range(piece.last, piece.last + 1)]
            begin = piece.last + 1
    runs.append(range(begin, len(split.bounds) - 1))
    return [run for run in runs if len(run)]


def _rows(call: Call, split: Split, sequences: range) -> Call:
    """The call restricted to some sequences, without states; a single one is a dense call."""
    lo, hi = split.bounds[sequences.start], split.bounds[sequences.stop]
    cu = cu_cpu = None
    if len(sequences) > 1:
        at = slice(sequences.start, sequences.stop + 1)
        assert call.cu_seqlens is not None
        assert call.cu_seqlens_cpu is not None
        cu, cu_cpu = call.cu_seqlens[at] - lo, call.cu_seqlens_cpu[at] - lo
    return part(call, lambda x: x[:, lo:hi], cu, cu_cpu)


def _join(call: Call, split: Split, runs: list[range], done: dict[int, Intra]) -> Intra:
    """The Intra of the whole call from those of its runs; rows outside all sequences are 0."""
    T = call.q.shape[1]
    found = [done[run.start] for run in runs]

    def rows(parts: list[Tensor | None]) -> Tensor | None:
        if parts[0] is None or (len(parts) == 1 and parts[0].shape[1] == T):
            return parts[0]
        given = cast("list[Tensor]", parts)
        tail = T - split.bounds[-1]
        return torch.cat((*given, given[0].new_zeros(1, tail, *given[0].shape[2:])), 1)

    A, Aqk, q_rstd, k_rstd = (rows([getattr(i, name) for i in found]) for name in Intra._fields[:4])
    assert A is not None
    assert Aqk is not None
    total: Tensor | None = None
    if found[0].total is not None:
        counts = [sum(_chunks(split, n, call.BT) for n in run) for run in runs]
        exact = [cast("Tensor", i.total)[:count] for i, count in zip(found, counts)]
        # a table of packed sequences has a row for every chunk that any packing of T tokens could have
        spare = 0 if call.cu_seqlens is None else -(-T // call.BT) + len(split.bounds) - 1 - sum(counts)
        exact += [exact[0].new_zeros(spare, *exact[0].shape[1:])] if spare else []
        total = torch.cat(exact) if len(exact) > 1 else exact[0]
    return Intra(A, Aqk, q_rstd, k_rstd, total)


def _rows_of(intra: Intra, split: Split, sequence: int, BT: int) -> Intra:
    """The Intra of one sequence from that of the whole call."""
    lo, hi = split.rows(sequence)
    before = sum(_chunks(split, n, BT) for n in range(sequence))
    total = None if intra.total is None else intra.total[before : before + _chunks(split, sequence, BT)]
    return intra.of_tokens(lambda x: x[:, lo:hi], total)


def _chunks(split: Split, sequence: int, BT: int) -> int:
    lo, hi = split.rows(sequence)
    return -(-(hi - lo) // BT)


def _with_states(call: Call, split: Split, states: Tensor) -> Call:
    """The call with the state before each of its sequences: the caller's where one begins here, what came
    from other ranks where it began there."""
    begun = split.begun_elsewhere()
    if not begun:
        return call
    every = zeros(call, (len(split.bounds) - 1, *sizes(call)))
    if call.initial_state is not None:
        every.copy_(k_first(call.initial_state, call))
    for piece, state in zip(split.pieces, states):
        if piece.pre:
            every[piece.first] = state
    every = as_asked(every, call)
    return call.like(notes=call.notes.of(every), initial_state=every)


def _split(call: Call) -> Split:
    assert call.split is not None
    return call.split


def _terms(call: Call, what: str, plan: Plan) -> Terms:
    """Of the exchange of a call, worked out once for calls with its facts."""
    found = call.notes.get(what)
    if found is None:
        p = plan.problem
        agreed = {
            "H": p.H,
            "dtypes of the inputs": p.dtypes,
            "gate": p.gate,
            "beta": p.beta_mode,
            "l2norm": p.l2norm,
            "need of a gradient": p.needs_grad,
            "scale": call.scale,
            "lower_bound": call.lower_bound,
            "A_log": call.A_log is None,
            "dt_bias": call.dt_bias is None,
        }
        found = call.notes[what] = Terms(what, message(_split(call), *sizes(call)), call.wide(), agreed)
    return found

"""causal_conv1d over the ranks of a process group: W-1 inputs cross every boundary inside a sequence.

Forward: every piece (see _common.context_parallel) gives its last W-1 inputs to one all-gather; a piece whose
first sequence began elsewhere takes the inputs before it as an initial state. Backward: the gradients of
those go back by one all-gather. A sequence may cross several pieces within W-1 inputs. With W = 1 nothing
crosses; where gradients of parameters are summed over the group, ranks still have to agree that they are, and
the all-gathers carry headers alone.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from kernel_fun._common import check
from kernel_fun._common.exchange import Exchange, Silence, Terms, agreed_size, failing, reduce_over
from kernel_fun.cconv import autograd
from kernel_fun.cconv.call import TENSORS, Call

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun._common.context_parallel import Piece, Split
    from kernel_fun._common.plan import Plan
    from kernel_fun.cconv.stages import Bwd, Gradients

FORWARD, BACKWARD = "causal_conv1d forward", "causal_conv1d backward"


def failing_together(arguments: dict[str, Any]) -> AbstractContextManager[Split | None]:
    """Around what a rank checks before its forward: its exception reaches every rank of the cp group."""

    def exchange(split: Split) -> Exchange | Silence:
        given = {n: arguments[n] for n in TENSORS if isinstance(arguments[n], torch.Tensor)}
        sizes = _sizes_told(given, getattr(arguments["cp_context"], "conv1d_kernel_size", None))
        # of an x that is no float tensor only the others tell whether it is float64
        floats = {n: t for n, t in given.items() if t.is_floating_point()}
        typed = [floats["x"]] if "x" in floats else list(floats.values())
        wide = agreed_size(t.dtype == torch.float64 for t in typed)
        if sizes is None or wide is None:
            return Silence.UNKNOWN_SIZE
        if not _exchanges(split, sizes[1]):
            return Silence.NOBODY_WAITS
        device = next(iter(given.values())).device
        shape = (len(split.pieces), sizes[1] - 1, sizes[0])
        return Exchange(split, Terms(FORWARD, shape, torch.float64 if wide else torch.float32), device)

    return failing(arguments["cp_context"], exchange)


def _sizes_told(given: dict[str, Tensor], taps: Any) -> tuple[int, int] | None:
    """D, W as the arguments tell them that have the right number of dimensions, W in the last place by the
    context, or None. None too for no taps: a rank of the same sizes refuses them itself, and waits for
    nobody."""
    D = [math.prod(given[n].shape[2:]) for n in ("x", "residual") if n in given and given[n].dim() >= 3]
    dims = {"weight": 2, "bias": 1, "initial_state": 3}
    right = {n: given[n].shape for n, count in dims.items() if n in given and given[n].dim() == count}
    D += [shape[1 if n == "initial_state" else 0] for n, shape in right.items()]
    W = ([right[n][-1]] if n in right else [] for n in ("weight", "initial_state"))
    channels, width = agreed_size(D), agreed_size(*W, [taps] if isinstance(taps, int) else [])
    return None if channels is None or width is None or width < 1 else (channels, width)


def run(call: Call, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """Forward with or without a graph: (y, final state)."""
    exchange = _exchange_of_forward(call, plan)
    with _telling(exchange):
        if plan.problem.needs_grad:
            return CausalConv1dParallel.apply(call, plan, exchange, *call.tensors())
        with torch.no_grad():
            y, ht, _ = forward(call, plan, exchange)
            return y, ht


class CausalConv1dParallel(torch.autograd.Function):
    """causal_conv1d under context parallel. Saved beside what CausalConv1d saves: the W-1 inputs before each
    piece."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, plan: Plan, exchange: Exchange | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        y, ht, before = forward(call, plan, exchange)
        x, weight, bias, residual, h0 = tensors
        ctx.save_for_backward(x, weight, bias, h0, before, check.kept(call.cu_seqlens))
        ctx.facts, ctx.plan, ctx.split = call.facts(), plan, call.split
        # a rank whose saved tensors are gone or changed can still make the exchange, and tell
        number = 0 if exchange is None else exchange.number
        ctx.exchange = partial(
            _exchange, _split(call), BACKWARD, call.weight.shape, _wide(call.x), call.x.device, of=number
        )
        ctx.residual = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, ht

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        dy, dht = grad_outputs
        exchange = ctx.exchange()
        with _telling(exchange):
            x, weight, bias, h0, before, cu = ctx.saved_tensors
            call = replace(Call.for_backward(ctx.facts, x, weight, bias, h0, cu), split=ctx.split)
        with torch.no_grad():
            g = backward(call, ctx.plan, exchange, before, dy, dht, any(ctx.needs_input_grad[4:6]))
            dr = None
            if ctx.needs_input_grad[3 + TENSORS.index("residual")] and dy is not None:
                dr = autograd.residual_gradient(call, dy).to(ctx.residual)
        results = (g.dx, g.dweight, g.dbias, dr, g.dh0)
        if torch.is_grad_enabled():
            results = autograd._NoDoubleBackward.apply(len(results), *results, dy, dht, *ctx.saved_tensors)
        return (None, None, None, *results)


def forward(call: Call, plan: Plan, exchange: Exchange | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, the final states (0 where a sequence ends elsewhere), and the inputs before each piece
    ``[pieces, W-1, D]``, 0 where its first sequence begins there."""
    split = _split(call)
    W, D = call.weight.shape[1], call.x.shape[2]
    plan.load("fwd")
    before = torch.zeros(len(split.pieces), W - 1, D, dtype=_wide(call.x), device=call.x.device)
    if exchange is not None:
        exchange.send(torch.stack([_tail(call, split, piece) for piece in split.pieces]))
        gathered = exchange.receive()
        for i, piece in enumerate(split.pieces):
            if piece.pre:
                before[i] = _history(gathered, split, piece)
    y, ht = autograd.forward(_with_inputs_before(call, split, before), plan)
    return y, None if ht is None else _without(ht, split.ended_elsewhere()), before


def backward(
    call: Call,
    plan: Plan,
    exchange: Exchange | None,
    before: Tensor,
    dy: Tensor | None,
    dht: Tensor | None,
    wants_dw: bool,
) -> Gradients:
    """Gradients of one rank; those of its last inputs include what later ranks read of them."""
    split = _split(call)
    with _telling(exchange):
        bwd = cast("Bwd", plan.load("bwd"))
        if dy is None:
            dy = torch.zeros_like(call.x, memory_format=torch.contiguous_format)
        if dht is not None:
            dht = _without(dht.clone(), split.ended_elsewhere())
        g = _local(call, split, before, dy, dht, wants_dw, bwd)
        if exchange is not None:
            given = torch.zeros_like(before)
            for i, piece in enumerate(split.pieces):
                if piece.pre:
                    assert g.dh0 is not None
                    given[i] = g.dh0[piece.first, :, 1:].mT
            exchange.send(given)
            gathered = exchange.receive()
            for piece in split.pieces:
                _take_back(g, gathered, call, split, piece)
        return _finished(call, split, g)


def _local(
    call: Call,
    split: Split,
    before: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    wants_dw: bool,
    bwd: Bwd,
) -> Gradients:
    with autograd.no_autocast(call.x):
        g = bwd(_with_inputs_before(call, split, before), dy, dht, wants_dw)
    autograd.settle(call.x)
    return g


def _finished(call: Call, split: Split, g: Gradients) -> Gradients:
    """The gradient of the caller's own initial state, and parameters' sums over the group if asked for."""
    dh0 = g.dh0
    if call.initial_state is None or dh0 is None:
        dh0 = None
    else:
        dh0 = _without(dh0, split.begun_elsewhere()).to(call.initial_state.dtype)
    dweight, dbias = g.dweight, g.dbias
    if split.reduce_gradients:
        dweight, dbias = reduce_over(split, dweight, dbias)
    return g._replace(dweight=dweight, dbias=dbias, dh0=dh0)


def _tail(call: Call, split: Split, piece: Piece) -> Tensor:
    """The last W-1 inputs of a piece's last sequence ``[W-1, D]``, reaching into its initial state, or 0."""
    W = call.weight.shape[1]
    lo, hi = split.rows(piece.last)
    n = min(W - 1, hi - lo)
    tail = torch.zeros(W - 1, call.x.shape[2], dtype=_wide(call.x), device=call.x.device)
    tail[W - 1 - n :] = call.x[0, hi - n : hi]
    if call.initial_state is not None and not piece.passes_through:
        # the newest inputs of a state come last
        tail[: W - 1 - n] = call.initial_state[piece.last, :, n + 1 :].mT
    return tail


def _history(gathered: Tensor, split: Split, piece: Piece) -> Tensor:
    """The W-1 inputs before a piece's first sequence, from as many slots as hold them."""
    need, parts = gathered.shape[2], list[torch.Tensor]()
    for slot in range(piece.slot - 1, piece.slot - piece.pre - 1, -1):
        rank, part = split.home(slot)
        # where the sequence begins, what lies before it is in the tail already
        n = need if slot == piece.slot - piece.pre else min(need, split.piece_rows)
        tail = gathered[rank, part]
        parts.append(tail[tail.shape[0] - n :])
        need -= n
        if need == 0:
            break
    return torch.cat(parts[::-1])


def _take_back(g: Gradients, gathered: Tensor, call: Call, split: Split, piece: Piece) -> None:
    """Add to a piece's last rows, or to its last sequence's initial state, what later slots read of them."""
    W = call.weight.shape[1]
    lo, hi = split.rows(piece.last)
    for later in range(1, piece.post + 1):
        skipped = (later - 1) * split.piece_rows
        if skipped >= W - 1:
            break
        rank, part = split.home(piece.slot + later)
        # row W-1-d of it belongs to the input d tokens before that slot
        given = gathered[rank, part, : W - 1 - skipped].to(_wide(call.x))
        n = min(given.shape[0], hi - lo)
        mine = given[given.shape[0] - n :]
        g.dx[0, hi - n : hi] = (g.dx[0, hi - n : hi].to(mine.dtype) + mine).to(g.dx.dtype)
        older = given[: given.shape[0] - n]
        if older.shape[0] and g.dh0 is not None and not piece.passes_through:
            g.dh0[piece.last, :, W - older.shape[0] :] += older.mT.to(g.dh0.dtype)


def _with_inputs_before(call: Call, split: Split, before: Tensor) -> Call:
    """The call with an initial state of each sequence that began elsewhere."""
    if not split.begun_elsewhere():
        return call
    states = before.new_zeros(len(split.bounds) - 1, call.x.shape[2], call.weight.shape[1])
    if call.initial_state is not None:
        states.copy_(call.initial_state)
    for piece, rows in zip(split.pieces, before):
        if piece.pre:
            states[piece.first, :, 0] = 0
            states[piece.first, :, 1:] = rows.mT
    return replace(call, initial_state=states)


def _without(states: Tensor, rows: list[int]) -> Tensor:
    """States with zeros in the rows of sequences that another rank answers for."""
    for n in rows:
        states[n] = 0
    return states


def _split(call: Call) -> Split:
    assert call.split is not None
    return call.split


def _exchanges(split: Split, W: int) -> bool:
    """Whether ranks meet at all; a sum over the group needs every rank to take part in it."""
    return W > 1 or split.reduce_gradients


def _exchange_of_forward(call: Call, plan: Plan) -> Exchange | None:
    split = _split(call)
    agreed: dict[str, Any] = {
        "dtype of x": call.x.dtype,
        "need of a gradient": plan.problem.needs_grad,
        "activation": call.activation,
        "bias": call.bias is None,
    }
    if split.reduce_gradients:  # the backwards then meet in a sum of these
        agreed["gradients of weight and bias"] = [
            None if p is None else (p.dtype, p.requires_grad) for p in (call.weight, call.bias)
        ]
    return _exchange(split, FORWARD, call.weight.shape, _wide(call.x), call.x.device, agreed)


def _exchange(
    split: Split,
    what: str,
    weight: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    agreed: dict[str, Any] | None = None,
    of: int = 0,
) -> Exchange | None:
    D, W = weight
    if not _exchanges(split, W):
        return None
    return Exchange(split, Terms(what, (len(split.pieces), W - 1, D), dtype, agreed), device, of)


def _telling(exchange: Exchange | None) -> AbstractContextManager[object]:
    return nullcontext() if exchange is None else exchange.or_tell()


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32

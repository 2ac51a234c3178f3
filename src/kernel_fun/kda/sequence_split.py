"""One long sequence on many SMs of a GPU: segments that are scanned beside each other, exactly.

A scan is serial along a sequence. What a segment of tokens does to the state is affine, so that it can be
summarised before the state it starts from is known:

    S_end    = M S_start + S_loc            S_loc: from a state of zero; M: the product of the transitions
    dS_start = M^T dS_end + dS_loc          dS_loc: with nothing coming from later

Forward: the summaries of all segments of a sequence but its last one, side by side; the fold, one segment
after another, which gives each segment its start; the ordinary scan of all segments, side by side. Backward:
the same again for M and the starts (nothing more is saved), the rescan, dS_loc of all segments but a
sequence's first, the fold from the end, the ordinary reverse scan. Nothing is truncated or approximated.

The summaries are the scans' own, as in :mod:`context_parallel`: [S_loc | M] is the final state with values
[v | 0] and initial state [0 | I]; dS_loc is the gradient of the initial state.

Segments are a packing of the same tokens. All but the last one of a sequence are whole chunks, so chunks and
tokens keep their order, and h, v_new, dh and dv2 are those of the call; a dense batch is the packing of its
rows. Segments that need a summary are scanned as entries of a packing whose boundaries go back: segment, gap,
segment, gap, from the last one to the first. A gap ends where it begins or before: it has no chunk. All but
one segment of a sequence need one, so segment s of sequence n is number s - n of those that are no last ones,
and s - n - 1 of those that are no first ones.

Where a sequence is cut is decided by its own length and by the sizes of a head alone. So its result does not
depend on its batch, and that of a prefix not on how much follows, while both are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernel_fun.kda.call import BT
from kernel_fun.kda.stages import Intra, ReverseScan, Scan

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call
    from kernel_fun.kda.stages import BwdState, FwdState


class Cut(NamedTuple):
    """How sequences are cut."""

    tokens: int
    """Of a segment, a multiple of 64."""
    least: int
    """Of a sequence that is cut; a shorter one is one segment."""


FEW = 16
"""Value heads times tiles of 64 columns of V, up to which cutting pays: backward it scans four times what is
scanned twice without, side by side, on an eighth of the SMs."""
FILLING = 1 << 16
"""Tokens of a sequence whose segments fill a GPU. With fewer tokens a segment there are more of them to fold,
one after another; with more, a shorter sequence leaves SMs free."""
SEGMENTS = 8
"""Segments of a sequence from which on it pays,"""
TOKENS = 1 << 15
"""and tokens: below, the launches that cutting adds take the host as long as it saves."""

_forced: tuple[Cut | None] | None = None


def cut_of(HV: int, K: int, V: int, sms: int) -> Cut | None:
    """How sequences of these head sizes are cut on a GPU of so many SMs, or None for not at all."""
    if _forced is not None:
        return _forced[0]
    if sms < 1 or HV * -(-V // 64) > FEW:
        return None
    beside = max(1, sms // (HV * -(-(V + K) // 128)))
    tokens = BT
    while tokens * beside < FILLING:
        tokens *= 2
    return Cut(tokens, max(SEGMENTS * tokens, TOKENS))


@contextmanager
def forced(cut: Cut | None) -> Generator[None]:
    """Within the block every sequence is cut so, or none is: for tests, measurements and warming."""
    global _forced
    from kernel_fun._common import known

    if cut is not None and (cut.tokens < BT or cut.tokens % BT or cut.least <= cut.tokens):
        raise ValueError(f"`cut` must have a positive multiple of {BT} tokens, and least above it, got {cut}")
    known.forget()  # answers hold what was decided of these shapes before
    before, _forced = _forced, (cut,)
    try:
        yield
    finally:
        _forced = before
        known.forget()


def cut_for(call: Call, sms: int) -> Cut | None:
    """How the sequences of calls of these shapes are cut; None where none can be long enough."""
    HV, V = call.v.shape[2:]
    B, T, _, K = call.q.shape
    cut = cut_of(HV, K, V, sms)
    N = B if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    return cut if cut is not None and N and cut.least <= T else None


def has_long(call: Call, cut: Cut) -> bool:
    """Whether a sequence of the call may be cut, as far as the host knows. A graph is replayed on others."""
    host = call.cu_seqlens_cpu
    if call.cu_seqlens is None or host is None or call.use_graph:
        return True
    found = call.memo.get("longest")
    if found is None:
        found = call.memo["longest"] = int(host.diff().max())
    return found >= cut.least


class Segments(NamedTuple):
    """S segments in sequence order, D = S - N of which need a summary, then unused ones without tokens; all
    tables int32, on the device."""

    bounds: Tensor
    """``[S + 1]``: boundaries of the segments, a packing."""
    chunks: Tensor
    """``[S + 1]``: first chunk of each, among those of the call."""
    first: Tensor
    """``[N + 1]``: first segment of each sequence, then the number of used ones."""
    last: Tensor
    """``[N]``: last segment of each sequence."""
    ahead: Tensor
    """``[2 D]``: boundaries of 2 D - 1 entries, of which 2 (D - 1 - d) is number d of the segments that are
    no last ones."""
    ahead_chunks: Tensor
    """``[2 D]``: first chunk of each entry."""
    back: Tensor
    """``[2 D]``: the same of the segments that are no first ones."""
    back_chunks: Tensor
    end: Tensor
    """``[N]``: entry of the last segment of each sequence in ``back``; 2 D - 1 where it is the only one."""

    @property
    def size(self) -> int:
        """S."""
        return self.bounds.shape[0] - 1

    @property
    def summarised(self) -> int:
        """D."""
        return self.ahead.shape[0] // 2

    @property
    def entries(self) -> int:
        return 2 * self.summarised - 1


def count(call: Call, cut: Cut) -> int:
    """Segments of a call: exactly if it is dense, else of any packing of so many tokens."""
    B, T = call.q.shape[:2]
    if call.cu_seqlens is None:
        return B * (-(-T // cut.tokens) if cut.least <= T else 1)
    return call.cu_seqlens.shape[0] - 1 + T // cut.tokens


def segment_tables(cu_seqlens: Tensor, S: int, cut: Cut) -> Segments:
    """The tables of at most S segments of sequences with these boundaries ``[N + 1]``, N >= 1, in torch's
    operations; nothing is asked of the device."""
    cu = cu_seqlens.long()
    N, L = cu.shape[0] - 1, cut.tokens
    lengths = cu.diff()
    ceil = lambda size: (lengths + (size - 1)).div(size, rounding_mode="floor")  # noqa: E731
    zero_first = lambda x: torch.nn.functional.pad(x.cumsum(0), (1, 0))  # noqa: E731
    first = zero_first(torch.where(lengths >= cut.least, ceil(L), 1))
    sequence_chunks = zero_first(ceil(BT))
    s = torch.arange(S + 1, device=cu.device)
    n = torch.searchsorted(first[1:].contiguous(), s, right=True)
    used = n < N
    own = n.clamp(max=N - 1)
    i = s - first[own]
    start = torch.where(used, cu[own] + i * L, cu[N])
    chunks = torch.where(used, sequence_chunks[own] + i * (L // BT), sequence_chunks[N])
    is_last = s + 1 == first[own + 1]
    end = torch.where(used, torch.where(is_last, cu[own + 1], start + L), cu[N])
    D = S - N

    def entries(begin: Tensor, end: Tensor, place: Tensor, wanted: Tensor) -> Tensor:
        """Pairs of the wanted ones in their places, the others in a row that is dropped."""
        row = torch.where(wanted, D - 1 - place, D)[:S]
        pairs = torch.stack((begin, end), 1)[:S]
        return pairs.new_zeros(D + 1, 2).index_copy_(0, row, pairs)[:D].flatten().to(torch.int32)

    ahead, back = (s - n, ~used | ~is_last), (s - n - used.long(), ~used | (i > 0))
    last = first[1:] - 1
    only = last == first[:-1]
    at = 2 * (D - last + torch.arange(N, device=cu.device))  # 2 (D - 1 - (last - n - 1))
    return Segments(
        start.to(torch.int32),
        chunks.to(torch.int32),
        first.to(torch.int32),
        last.to(torch.int32),
        entries(start, end, *ahead),
        entries(chunks, chunks, *ahead),
        entries(start, end, *back),
        entries(chunks, chunks, *back),
        torch.where(only, 2 * D - 1, at).to(torch.int32),
    )


def fold(
    summaries: Tensor, segments: Segments, given: Tensor | None, local: Tensor | None, v_first: bool
) -> Tensor:
    """States at the start of each segment from those at the start of each sequence, or, with ``local``,
    gradients of the states at the end of each segment from those at the end of each sequence.

    ``summaries`` ``[2 D - 1, HV, K, V + K]``: [S_loc | M] of each entry, K-first. ``given`` ``[N, HV, K, V]``
    or None for zeros, ``local`` ``[2 D - 1, HV, K, V]``: dS_loc of each entry, where that of a sequence's
    last one began with ``given``; both, and the ``[S, HV, K, V]`` that is returned, v-first if ``v_first``.
    One segment after another in float64, whatever their dtype; unused segments get 0. Waits for the device:
    this form is for the CPU, and for comparison.
    """
    first, K = segments.first.tolist(), summaries.shape[2]
    V = summaries.shape[3] - K
    k_first = lambda x: (x.mT if v_first else x).double()  # noqa: E731
    of = lambda x, d: x[2 * (segments.summarised - 1 - d)]  # noqa: E731
    out = summaries.new_zeros((segments.size, *summaries.shape[1:3], V), dtype=torch.float64)
    for n, (lo, hi) in enumerate(zip(first, first[1:])):
        S = out.new_zeros(out.shape[1:]) if given is None else k_first(given[n])
        if local is None:
            out[lo] = S
            for s in range(lo, hi - 1):
                here = of(summaries, s - n).double()
                S = torch.baddbmm(here[..., :V], here[..., V:], S)
                out[s + 1] = S
        else:
            out[hi - 1] = S
            for s in range(hi - 1, lo, -1):
                own = k_first(of(local, s - n - 1))
                last = s == hi - 1
                S = own if last else torch.baddbmm(own, of(summaries, s - n)[..., V:].double().mT, S)
                out[s - 1] = S
    return (out.mT if v_first else out).to(summaries.dtype).contiguous()


class Backend(NamedTuple):
    """What a backend does of it."""

    scan: FwdState
    """Of a packing, uncut."""
    reverse: BwdState
    """Of a packing, uncut, with h and v_new given, or dh0 alone."""
    tables: Callable[[Tensor, int, Cut], Segments]
    """As :func:`segment_tables`."""
    fold: Callable[[Tensor, Segments, Tensor | None, Tensor | None, bool], Tensor]
    """As :func:`fold`."""


class Flat(NamedTuple):
    """A call as the packing of its tokens, ``[1, B T, ...]``."""

    call: Call
    intra: Intra
    segments: Segments


def scan(call: Call, intra: Intra, cut: Cut, by: Backend, *, keep: bool, output: bool) -> Scan:
    """fwd_state of a call whose long sequences are cut."""
    flat = _flat(call, intra, cut, by)
    starts = by.fold(_summaries(flat, by), flat.segments, call.initial_state, None, call.state_v_first)
    found = by.scan(_main(flat, starts), flat.intra, keep=keep, output=output)
    ht = None if found.ht is None else found.ht.index_select(0, flat.segments.last)
    return Scan(_shaped(found.o, call), ht, found.h, _shaped(found.v_new, call))


def reverse(
    call: Call,
    intra: Intra,
    cut: Cut,
    by: Backend,
    do: Tensor | None,
    dht: Tensor | None,
    h: Tensor | None,
    v_new: Tensor | None,
    *,
    only_dh0: bool = False,
) -> ReverseScan:
    """bwd_state of a call whose long sequences are cut."""
    flat = _flat(call, intra, cut, by)
    segments, v_first = flat.segments, call.state_v_first
    do = None if do is None else _row(do)
    summaries = _summaries(flat, by)
    if only_dh0:
        h = v_new = None
    elif h is None or v_new is None:
        starts = by.fold(summaries, segments, call.initial_state, None, v_first)
        rescan = by.scan(_main(flat, starts), flat.intra, keep=True, output=False)
        h, v_new = rescan.h, rescan.v_new
        assert h is not None
        assert v_new is not None
        del starts, rescan
    ends = by.fold(summaries, segments, dht, _local(flat, by, do, dht), v_first)
    main = _main(
        flat, None if call.initial_state is None else ends
    )  # it says no more than that dh0 is wanted
    rows = None if v_new is None else _row(v_new)
    found = by.reverse(main, flat.intra, do, ends, h, rows, only_dh0=only_dh0)
    dh0 = None if found.dh0 is None else found.dh0.index_select(0, segments.first[:-1])
    return ReverseScan(found.dh, _shaped(found.dv2, call), dh0, h, _shaped(v_new, call))


def _flat(call: Call, intra: Intra, cut: Cut, by: Backend) -> Flat:
    names = ("q", "k", "v", "g", "beta")
    rows = {n: _row(getattr(call, n)) for n in names} if call.cu_seqlens is None else {}
    flat = call.like(notes=call.notes.of(), **rows)
    return Flat(flat, intra.of_tokens(_row, intra.total), _segments(call, cut, by))


def _segments(call: Call, cut: Cut, by: Backend) -> Segments:
    """Made once a call, the backward reads them again."""
    name = f"segments {cut} {call.cu_seqlens is None}"
    found = call.memo.get(name)
    if found is None:
        cu = call.cu_seqlens
        if cu is None:
            B, T = call.q.shape[:2]
            cu = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=call.q.device)
        found = call.memo[name] = by.tables(cu, count(call, cut), cut)
    return found


def _packed(
    flat: Flat, bounds: Tensor, chunks: Tensor, initial_state: Tensor | None, **changes: object
) -> Call:
    """The call with these boundaries; its chunks are among those of the whole call."""
    call = flat.call
    memo: dict[str, object] = {"chunk_tables": (chunks, None)}
    if flat.intra.total is not None:
        memo["chunk_rows"] = flat.intra.total.shape[0]
    return call.like(
        notes=call.notes.of(
            bounds, initial_state, *(x for x in changes.values() if isinstance(x, torch.Tensor))
        ),
        cu_seqlens=bounds,
        cu_seqlens_cpu=None,
        initial_state=initial_state,
        memo=memo,
        **changes,
    )


def _main(flat: Flat, initial_state: Tensor | None) -> Call:
    """All segments."""
    return _packed(flat, flat.segments.bounds, flat.segments.chunks, initial_state)


def _summaries(flat: Flat, by: Backend) -> Tensor:
    """[S_loc | M] ``[2 D - 1, HV, K, V + K]`` of each entry; [0 | I] of one without chunks."""
    call, segments = flat.call, flat.segments
    _, T, HV, V = call.v.shape
    K = call.q.shape[3]
    values = call.v.new_empty(1, T, HV, V + K)
    values[..., :V].copy_(call.v)
    values[..., V:].zero_()
    start = torch.zeros(K, V + K, dtype=call.wide(), device=call.q.device)
    start[:, V:].fill_diagonal_(1.0)
    start = start.expand(segments.entries, HV, K, V + K)
    rows = _packed(
        flat, segments.ahead, segments.ahead_chunks, start, v=values, output_final_state=True,
        state_v_first=False, return_intermediate_states=False,
    )  # fmt: skip
    found = by.scan(rows, flat.intra, keep=False, output=False)
    assert found.ht is not None
    return found.ht


def _local(flat: Flat, by: Backend, do: Tensor | None, dht: Tensor | None) -> Tensor:
    """dS_loc ``[2 D - 1, HV, K, V]``, in the layout of dht, of each entry; that of a sequence's last segment
    begins with dht."""
    segments = flat.segments
    ends = None
    if dht is not None:
        ends = dht.new_zeros((segments.entries + 1, *dht.shape[1:]))  # the last one is read by nobody
        ends = ends.index_copy_(0, segments.end.long(), dht)[:-1]
    rows = _packed(flat, segments.back, segments.back_chunks, None)
    found = by.reverse(rows, flat.intra, do, ends, None, None, only_dh0=True)
    assert found.dh0 is not None
    return found.dh0


def _row(x: Tensor) -> Tensor:
    """``[B, T, ...]`` as ``[1, B T, ...]``: a copy where tokens are not equally spaced."""
    return x if x.shape[0] == 1 else x.flatten(0, 1).unsqueeze(0)


def _shaped(x: Tensor | None, call: Call) -> Tensor | None:
    return None if x is None else x.view(call.v.shape)

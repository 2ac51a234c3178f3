"""The stages on Hopper: a call's tensors as the kernels take them.

The kernels launch on tensors and refuse what they do not take. Here g and beta of a dtype they do not read
become float32, parameters become float32, and a tensor that TMA cannot address is copied. Tables of packed
sequences have a row for every chunk a packing of that many tokens could have, so that no size is asked of
the device; rows past the last chunk are written nowhere and read nowhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kernel_fun._common import config
from kernel_fun._common import device as devices
from kernel_fun._cute.packing import chunk_tables
from kernel_fun._cute.varlen import chunk_bound
from kernel_fun.kda import sequence_split
from kernel_fun.kda._kernels.sm90 import bwd_grads as grads_kernel
from kernel_fun.kda._kernels.sm90 import bwd_state as reverse_kernel
from kernel_fun.kda._kernels.sm90 import fwd_intra as intra_kernel
from kernel_fun.kda._kernels.sm90 import fwd_state as state_kernel
from kernel_fun.kda._kernels.sm90 import overlap
from kernel_fun.kda._kernels.sm90.chunk_inputs import check_addresses, facts_of
from kernel_fun.kda._kernels.sm90.rows import LAUNCHES_TAKE_LEAVES, TMA_BYTES
from kernel_fun.kda._kernels.sm90.segment_states import segment_states
from kernel_fun.kda._kernels.sm90.segment_tables import segment_tables
from kernel_fun.kda.stages import AGAIN, Again, Grads, Intra, ReverseScan, Scan

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call


def fwd_intra(call: Call, *, scan_next: bool = False) -> Intra:
    """See :class:`kernel_fun.kda.stages.FwdIntra`."""
    q, k, _, g, beta, A_log, dt_bias, _ = _operands(call)
    given = q, k, g, beta, A_log, dt_bias, _chunks(call)
    kind = "fwd_intra", scan_next
    plan = call.notes.get(kind)
    if plan is None:
        beside = _scan_ctas(call) if scan_next else 0
        plan = call.notes[kind] = intra_kernel.prepare(
            facts_of(*given), q.device, beside=beside, **_forms(call)
        )
    ready = None
    if plan.config.overlapped:
        if (
            torch.are_deterministic_algorithms_enabled()
        ):  # results' memory is filled, a launch between the two
            return fwd_intra(call)
        ready = call.scratch["ready"] = q.new_empty(plan.ready, dtype=torch.int32)
    intra = call.scratch["intra"] = Intra(*intra_kernel.launch(plan, *given, ready))
    return intra


def _scan_ctas(call: Call) -> int:
    """CTAs of a scan that may run beside fwd_intra; 0 if it comes after it."""
    B, T, HV, V = call.v.shape
    alone = _is_alone(call) and _cut(call) is None
    return overlap.scan_ctas(B * HV, V, T, devices.of(call.v.device).sms) if alone else 0


def _scans_fit(call: Call) -> bool:
    """Whether bwd_state may run beside a rescan."""
    B, _, HV, V = call.v.shape
    return _is_alone(call) and overlap.scans_fit(B * HV, V, devices.of(call.v.device).sms)


def _is_alone(call: Call) -> bool:
    """Whether a scan launches nothing but itself: no zeros for rows of no sequence, no copy of a state."""
    h0 = call.initial_state
    return call.cu_seqlens is None and (h0 is None or _is_packed(h0))


def fwd_state(call: Call, intra: Intra, *, keep: bool, output: bool = True) -> Scan:
    """See :class:`kernel_fun.kda.stages.FwdState`."""
    cut = None if call.notes.get("cut") == UNCUT else _cut(call)
    if cut is None:
        return _scan(call, intra, keep=keep, output=output)
    return sequence_split.scan(_prepared(call), intra, cut, SPLIT, keep=keep, output=output)


UNCUT = ()
"""Noted of calls whose shapes leave nothing to cut."""


def _cut(call: Call) -> sequence_split.Cut | None:
    """How the call's long sequences are cut into segments, None where it has none."""
    cut = call.notes.get("cut")
    if cut is None:
        sms = devices.of(call.v.device).sms
        cut = call.notes["cut"] = sequence_split.cut_for(call, sms) or UNCUT
    return cut if cut != UNCUT and sequence_split.has_long(call, cut) else None


def _prepared(call: Call) -> Call:
    """The call with its operands as launches take them, so that what is copied is copied once a pass."""
    q, k, v, g, beta, A_log, dt_bias, _ = _operands(call)
    names = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias)
    return call.like(notes=call.notes.of(q, k, v, g, beta), **names)


def _scan(call: Call, intra: Intra, *, keep: bool, output: bool, leads: bool = False) -> Scan:
    """fwd_state. ``leads``: bwd_state is launched next, beside it."""
    wants_ht = call.output_final_state and (output or not keep)
    ready = call.scratch.pop("ready", None)
    q, k, v, g, beta, A_log, _, dt_bias = _operands(call)
    h0 = None if call.initial_state is None else _state(call.initial_state)
    _check_addresses(call, intra, h0=h0)
    given = q, k, v, g, beta, *intra, h0, A_log, dt_bias, *_sequences(call)
    wanted = "fwd_state", output, wants_ht, keep, ready is not None, leads
    plan = call.notes.get(wanted)
    if plan is None:
        plan = state_kernel.prepare(
            _facts(call, given, intra.total), q.device, state_v_first=call.state_v_first, want_ht=wants_ht, want_h=keep, want_v_new=keep,
            want_o=output, overlapped=ready is not None, leads=leads, **_forms(call),
        )  # fmt: skip
        plan = call.notes[wanted] = _with_rows(plan, call)
        again = _again(call, plan) if output and not keep and not leads else None
        if again is not None:
            call.notes[AGAIN] = again
    return Scan(*state_kernel.launch(plan, *given, ready))


def _again(call: Call, scan: Any) -> Again | None:
    """The forward of a call whose operands are read where they lie, as two launches: what a call with the same
    facts does once these are planned. None where there is more to do."""
    intra = call.notes.get(("fwd_intra", True))
    overlapped = scan.config.overlapped
    if intra is None or intra.config.overlapped != overlapped or config.DEBUG.on():
        return None
    if not (call.notes["plain"] and _is_alone(call) and LAUNCHES_TAKE_LEAVES):
        return None
    HV, K = call.g.shape[2:]

    def again(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
        h0: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Intra] | None:  # fmt: skip
        if not _lie_well(q, k, v, g, dt_bias) or (h0 is not None and h0.data_ptr() % TMA_BYTES):
            return None
        ready = None
        if overlapped:
            if torch.are_deterministic_algorithms_enabled():
                return None
            ready = q.new_empty(intra.ready, dtype=torch.int32)
        by_head = None if dt_bias is None else dt_bias.view(HV, K)
        h0 = None if h0 is None else h0.detach()
        found = Intra(*intra_kernel.launch(intra, q, k, g, beta, A_log, dt_bias, None, ready))
        o, ht, _, _ = state_kernel.launch(
            scan, q, k, v, g, beta, *found, h0, A_log, by_head, None, None, ready
        )
        assert o is not None
        return o, ht, found

    return again


def bwd_state(
    call: Call,
    intra: Intra,
    do: Tensor | None,
    dht: Tensor | None,
    h: Tensor | None,
    v_new: Tensor | None,
    *,
    only_dh0: bool = False,
) -> ReverseScan:
    """See :class:`kernel_fun.kda.stages.BwdState`."""
    cut = None if call.notes.get("cut") == UNCUT else _cut(call)
    if cut is None:
        return _reverse_scan(call, intra, do, dht, h, v_new, only_dh0=only_dh0)
    do = None if do is None else _upstream(do, call)
    return sequence_split.reverse(_prepared(call), intra, cut, SPLIT, do, dht, h, v_new, only_dh0=only_dh0)


def _reverse_scan(
    call: Call,
    intra: Intra,
    do: Tensor | None,
    dht: Tensor | None,
    h: Tensor | None,
    v_new: Tensor | None,
    *,
    only_dh0: bool = False,
) -> ReverseScan:
    """bwd_state, uncut."""
    q, k, _, g, beta, A_log, _, dt_bias = _operands(call)
    do = None if do is None else _upstream(do, call)
    dht = None if dht is None else _packed(dht)
    _check_addresses(call, intra, dht=dht)
    beside = False
    if only_dh0:
        h = v_new = None
    elif h is None or v_new is None:
        fit = call.notes.get("scans_fit")
        if fit is None:
            fit = call.notes["scans_fit"] = _scans_fit(call)
        beside = fit and not torch.are_deterministic_algorithms_enabled()
        rescan = _scan(call, intra, keep=True, output=False, leads=beside)
        h, v_new = rescan.h, rescan.v_new
        assert h is not None
        assert v_new is not None
    given = q, k, g, beta, *intra, do, dht, A_log, dt_bias, *_sequences(call)
    kind = "bwd_state", beside, only_dh0
    plan = call.notes.get(kind)
    if plan is None:
        plan = reverse_kernel.prepare(
            _facts(call, given, intra.total), q.device, state_v_first=call.state_v_first,
            want_dh0=only_dh0 or call.initial_state is not None, want_dh=not only_dh0, overlapped=beside, **_forms(call),
        )  # fmt: skip
        plan = call.notes[kind] = _with_rows(plan, call)
    return ReverseScan(*reverse_kernel.launch(plan, *given), h, v_new)


SPLIT = sequence_split.Backend(_scan, _reverse_scan, segment_tables, segment_states)


def _facts(call: Call, given: tuple[Any, ...], total: Tensor | None) -> tuple[Any, ...]:
    """Facts of what a scan reads. Segments are a packing of the chunks of another call: ``total`` has the rows of that,
    which are enough, and counts as having those that so many sequences could need."""
    facts = facts_of(*given)
    if "chunk_rows" not in call.memo:
        return facts
    rows = chunk_bound(call.q.shape[1], call.cu_seqlens.shape[0] - 1)  # pyright: ignore[reportOptionalMemberAccess]
    return tuple([((rows, *f[0][1:]), *f[1:]) if x is total else f for x, f in zip(given, facts)])


def _with_rows(plan: Any, call: Call) -> Any:
    """The plan with as many rows of chunks as the call has that segments are a packing of."""
    rows = call.memo.get("chunk_rows")
    return plan if rows is None else replace(plan, chunks=(rows, *plan.chunks[1:]))


def bwd_grads(call: Call, intra: Intra, scan: ReverseScan, do: Tensor | None) -> Grads:
    """See :class:`kernel_fun.kda.stages.BwdGrads`."""
    q, k, v, g, beta, A_log, dt_bias, _ = _operands(call)
    h, v_new, dh, dv2 = scan.h, scan.v_new, scan.dh, scan.dv2
    assert h is not None
    assert v_new is not None
    assert dh is not None
    assert dv2 is not None
    do = torch.zeros_like(dv2) if do is None else _upstream(do, call)
    given = (
        q, k, v, g, beta, intra.A, intra.q_rstd, intra.k_rstd, h, v_new, dh, dv2, do, A_log, dt_bias, _chunks(call),
    )  # fmt: skip
    plan = call.notes.get("bwd_grads")
    if plan is None:
        plan = call.notes["bwd_grads"] = grads_kernel.prepare(facts_of(*given), q.device, **_forms(call))
    dq, dk, dv, dg, dbeta, dA_log, ddt_bias = grads_kernel.launch(plan, *given)
    if dg.dtype != call.g.dtype:
        dg = dg.to(call.g.dtype)
    if dbeta.dtype != call.beta.dtype:
        dbeta = dbeta.to(call.beta.dtype)
    return Grads(dq, dk, dv, dg, dbeta, dA_log, ddt_bias)


def _state(x: Tensor) -> Tensor:
    """States as a scan reads them: in place, too, where every sequence and head has the same one."""
    x = x.detach()
    is_one = x.stride()[:2] == (0, 0) and x[0, 0].is_contiguous() and not x.data_ptr() % TMA_BYTES
    return x if is_one else _packed(x)


def _forms(call: Call) -> dict[str, Any]:
    return dict(
        scale=call.scale,
        gate=call.gate,
        lower_bound=call.lower_bound,
        beta_mode=call.beta_mode,
        l2norm=call.l2norm,
    )


def _operands(call: Call) -> tuple[Any, ...]:
    """q, k, v, g, beta as TMA and the kernels read them, then A_log ``[HV]`` and dt_bias, ``[HV K]`` and
    ``[HV, K]``, in float32 or None; as launches take them, worked out once a pass."""
    found = call.scratch.get("operands")
    if found is None:
        q, k, v, g, beta = call.q, call.k, call.v, call.g, call.beta
        A_log, dt_bias = call.A_log, call.dt_bias
        plain = call.notes.get("plain")
        if plain is None:
            plain = call.notes["plain"] = _are_plain(call)
        if not plain or not _lie_well(q, k, v, g, dt_bias):
            q, k, v, g = [_addressable(_readable(x.detach(), call)) for x in (q, k, v, g)]
            beta = _packed(_readable(beta.detach(), call))
            A_log, dt_bias = _flat(A_log), _flat(dt_bias)
        if not LAUNCHES_TAKE_LEAVES:
            q, k, v, g, beta = [x.detach() for x in (q, k, v, g, beta)]
            A_log, dt_bias = [None if x is None else x.detach() for x in (A_log, dt_bias)]
        HV, K = g.shape[2:]
        by_head = None if dt_bias is None else dt_bias.view(HV, K)
        found = call.scratch["operands"] = q, k, v, g, beta, A_log, dt_bias, by_head
    return found


def _are_plain(call: Call) -> bool:
    """Whether all operands are read where they lie, if q, k, v and g begin where TMA can."""
    parameters = [x for x in (call.A_log, call.dt_bias) if x is not None]
    return (
        all(_readable(x, call) is x for x in (call.q, call.k, call.v, call.g, call.beta))
        and all(_has_tma_strides(x) for x in (call.q, call.k, call.v, call.g))
        and _is_packed(call.beta)
        and all(x.dtype == torch.float32 and x.dim() == 1 and _is_packed(x) for x in parameters)
    )


BIAS_BYTES = 8
"""What the scans want the base of dt_bias to be a multiple of: they read two channels at once."""


def _lie_well(q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt_bias: Tensor | None) -> bool:
    """Whether plain operands begin where the kernels can read them."""
    if dt_bias is not None and dt_bias.data_ptr() % BIAS_BYTES:
        return False
    return not (q.data_ptr() | k.data_ptr() | v.data_ptr() | g.data_ptr()) % TMA_BYTES


def _flat(parameter: Tensor | None) -> Tensor | None:
    """A_log or dt_bias in one dimension, in float32, where the scans can read it."""
    if parameter is None:
        return None
    x = _packed(parameter.detach().to(torch.float32).reshape(-1))
    return x.clone() if x.data_ptr() % BIAS_BYTES else x


def _packed(x: Tensor) -> Tensor:
    """A contiguous tensor whose strides say so in dimensions of one element too: launches compare them."""
    x = x.contiguous()
    return x if _is_packed(x) else x.as_strided(x.shape, _packed_strides(x.shape))


def _is_packed(x: Tensor) -> bool:
    return x.stride() == _packed_strides(x.shape)


def _packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [1] * len(shape), 1
    for i in range(len(shape) - 1, -1, -1):
        strides[i], step = step, step * max(shape[i], 1)
    return tuple(strides)


def _upstream(do: Tensor, call: Call) -> Tensor:
    """The gradient of o as TMA reads it; worked out once a pass."""
    found = call.scratch.get("do")
    if found is None or found[0] is not do:
        plain = call.notes.get("plain do")
        if plain is None:
            plain = call.notes["plain do"] = _has_tma_strides(do)
        in_place = plain and not do.data_ptr() % TMA_BYTES
        found = call.scratch["do"] = do, do if in_place else _addressable(do)
    return found[1]


def _check_addresses(call: Call, intra: Intra, **states: Tensor | None) -> None:
    """What did not come from here in this pass begins where TMA can: the Intra of a backward, states."""
    if call.scratch.get("intra") is not intra:
        check_addresses(("A", "Aqk", "total"), (intra.A, intra.Aqk, intra.total))
        call.scratch["intra"] = intra
    for name, x in states.items():
        if x is not None:
            check_addresses((name,), (x,))


def _chunks(call: Call) -> Tensor | None:
    """The chunk table of a packed call."""
    return None if call.cu_seqlens is None else _tables(call.cu_seqlens, call)[1]


def _sequences(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Boundaries of a packed call, and the first chunk of each sequence."""
    return (None, None) if call.cu_seqlens is None else (call.cu_seqlens, _tables(call.cu_seqlens, call)[0])


def _tables(cu_seqlens: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """First chunks and chunk table; made once a call, the backward reads them again."""
    found = call.memo.get("chunk_tables")
    if found is None:
        found = call.memo["chunk_tables"] = chunk_tables(cu_seqlens, call.q.shape[1])
    return found


def _readable(x: Tensor, call: Call) -> Tensor:
    """An input in a dtype the kernels read, that of q or float32."""
    return x if x.dtype == call.q.dtype or x.dtype == torch.float32 else x.float()


def _addressable(x: Tensor) -> Tensor:
    """The tensor, or a copy where its last dimension is not contiguous or TMA cannot take its strides."""
    if _has_tma_strides(x) and not x.data_ptr() % TMA_BYTES:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _has_tma_strides(x: Tensor) -> bool:
    *steps, last = x.stride()
    elements = TMA_BYTES // x.element_size()
    return last == 1 and not any([step % elements for step in steps])

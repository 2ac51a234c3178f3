"""The stages on Hopper: a call's tensors as the kernels take them.

The kernels launch on tensors and refuse what they do not take. Here g and beta of a dtype they do not read
become float32, parameters become float32, and a tensor that TMA cannot address is copied. Tables of packed
sequences have a row for every chunk a packing of that many tokens could have, so that no size is asked of
the device; rows past the last chunk are written nowhere and read nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kernel_fun._cute.packing import chunk_tables
from kernel_fun.kda._kernels.sm90 import bwd_grads as grads_kernel
from kernel_fun.kda._kernels.sm90 import bwd_state as reverse_kernel
from kernel_fun.kda._kernels.sm90 import fwd_intra as intra_kernel
from kernel_fun.kda._kernels.sm90 import fwd_state as state_kernel
from kernel_fun.kda.stages import Grads, Intra, ReverseScan, Scan

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call


def fwd_intra(call: Call) -> Intra:
    """See :class:`kernel_fun.kda.stages.FwdIntra`."""
    q, k, _, g, beta = _inputs(call)
    A_log, dt_bias = _parameters(call)
    return Intra(*intra_kernel.fwd_intra(q, k, g, beta, A_log, dt_bias, _chunks(call), **_forms(call)))


def fwd_state(call: Call, intra: Intra, *, keep: bool) -> Scan:
    """See :class:`kernel_fun.kda.stages.FwdState`."""
    return _scan(call, intra, wants_ht=call.output_final_state, keep=keep)


def _scan(call: Call, intra: Intra, *, wants_ht: bool, keep: bool, wants_o: bool = True) -> Scan:
    assert intra.total is not None
    q, k, v, g, beta = _inputs(call)
    A_log, dt_bias = _parameters(call)
    h0 = None if call.initial_state is None else call.initial_state.detach().contiguous()
    found = state_kernel.fwd_state(
        q, k, v, g, beta, intra.A, intra.Aqk, intra.q_rstd, intra.k_rstd, intra.total, h0,
        A_log, _by_head(dt_bias, call), _sequences(call),
        state_v_first=call.state_v_first, want_ht=wants_ht, want_h=keep, want_v_new=keep, want_o=wants_o, **_forms(call),
    )  # fmt: skip
    return Scan(*found)


def bwd_state(
    call: Call,
    intra: Intra,
    do: Tensor | None,
    dht: Tensor | None,
    h: Tensor | None,
    v_new: Tensor | None,
) -> ReverseScan:
    """See :class:`kernel_fun.kda.stages.BwdState`."""
    if h is None or v_new is None:
        rescan = _scan(call, intra, wants_ht=False, keep=True, wants_o=False)
        h, v_new = rescan.h, rescan.v_new
        assert h is not None
        assert v_new is not None
    assert intra.total is not None
    q, k, _, g, beta = _inputs(call)
    A_log, dt_bias = _parameters(call)
    dh, dv2, dh0 = reverse_kernel.bwd_state(
        q, k, g, beta, intra.A, intra.Aqk, intra.q_rstd, intra.k_rstd, intra.total,
        None if do is None else _addressable(do), None if dht is None else dht.contiguous(),
        A_log, _by_head(dt_bias, call), _sequences(call),
        state_v_first=call.state_v_first, want_dh0=call.initial_state is not None, **_forms(call),
    )  # fmt: skip
    return ReverseScan(dh, dv2, dh0, h, v_new)


def bwd_grads(call: Call, intra: Intra, scan: ReverseScan, do: Tensor | None) -> Grads:
    """See :class:`kernel_fun.kda.stages.BwdGrads`."""
    q, k, v, g, beta = _inputs(call)
    A_log, dt_bias = _parameters(call)
    dO = torch.zeros_like(scan.dv2) if do is None else _addressable(do)
    dq, dk, dv, dg, dbeta, dA_log, ddt_bias = grads_kernel.bwd_grads(
        q, k, v, g, beta, intra.A, intra.q_rstd, intra.k_rstd, scan.h, scan.v_new, scan.dh, scan.dv2, dO,
        A_log, dt_bias, _chunks(call), **_forms(call),
    )  # fmt: skip
    return Grads(dq, dk, dv, dg.to(call.g.dtype), dbeta.to(call.beta.dtype), dA_log, ddt_bias)


def _forms(call: Call) -> dict[str, Any]:
    return dict(
        scale=call.scale,
        gate=call.gate,
        lower_bound=call.lower_bound,
        beta_mode=call.beta_mode,
        l2norm=call.l2norm,
    )


def _inputs(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta as TMA and the kernels read them; worked out once a pass."""
    found = call.scratch.get("inputs")
    if found is None:
        q, k, v, g = (_addressable(_readable(x, call)) for x in (call.q, call.k, call.v, call.g))
        found = call.scratch["inputs"] = q, k, v, g, _readable(call.beta, call).contiguous()
    return found


def _parameters(call: Call) -> tuple[Tensor | None, Tensor | None]:
    """A_log ``[HV]`` and dt_bias ``[HV K]`` in float32; worked out once a pass."""
    found = call.scratch.get("parameters")
    if found is None:
        found = call.scratch["parameters"] = _flat(call.A_log), _flat(call.dt_bias)
    return found


def _flat(parameter: Tensor | None) -> Tensor | None:
    if parameter is None:
        return None
    return parameter.detach().to(torch.float32).reshape(-1).contiguous()


def _by_head(dt_bias: Tensor | None, call: Call) -> Tensor | None:
    return None if dt_bias is None else dt_bias.view(call.g.shape[2:])


def _chunks(call: Call) -> Tensor | None:
    """The chunk table of a packed call."""
    return None if call.cu_seqlens is None else _tables(call.cu_seqlens, call)[1]


def _sequences(call: Call) -> tuple[Tensor, Tensor] | None:
    """Boundaries of a packed call, and the first chunk of each sequence."""
    return None if call.cu_seqlens is None else (call.cu_seqlens, _tables(call.cu_seqlens, call)[0])


def _tables(cu_seqlens: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """First chunks and chunk table; made once a call, the backward reads them again."""
    found = call.memo.get("chunk_tables")
    if found is None:
        found = call.memo["chunk_tables"] = chunk_tables(cu_seqlens, call.q.shape[1])
    return found


def _readable(x: Tensor, call: Call) -> Tensor:
    """An input in a dtype the kernels read, that of q or float32, outside any graph."""
    if x.requires_grad:
        x = x.detach()
    return x if x.dtype == call.q.dtype or x.dtype == torch.float32 else x.float()


def _addressable(x: Tensor) -> Tensor:
    """The tensor, or a copy where its last dimension is not contiguous or TMA cannot take its strides."""
    *steps, last = x.stride()
    elements = 16 // x.element_size()
    if last == 1 and not x.data_ptr() % 16 and not any([step % elements for step in steps]):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)

"""The token-by-token form, for decoding. Gate, beta and norm are those of the chunked form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernel_fun.kda._kernels.eager import gates
from kernel_fun.kda._kernels.eager.layout import compute_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_fun.kda.call import Call


def recurrent(call: Call) -> tuple[Tensor, Tensor | None]:
    """o ``[B, T, HV, V]`` in v's dtype and, on request, the final states in the caller's layout, float32.

    Sequences advance together, one token a step; those that have ended drop out. Per token:

        S = diag(exp l) S;  u = beta (v - S^T k);  S = S + k u^T;  o = scale S^T q
    """
    dtype = compute_dtype(call)
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    G = HV // H
    if call.cu_seqlens is None:
        bounds = [(b * T, T) for b in range(B)]
    else:
        cu = call.cu_seqlens.tolist()
        bounds = [(a, e - a) for a, e in zip(cu, cu[1:])]
    order = sorted(range(len(bounds)), key=lambda n: -bounds[n][1])
    device = call.q.device
    rows = torch.tensor(order, dtype=torch.long, device=device)
    starts = torch.tensor([bounds[n][0] for n in order], dtype=torch.long, device=device)
    q, k, v, g, beta = (x.flatten(0, 1) for x in (call.q, call.k, call.v, call.g, call.beta))
    o = torch.zeros(B * T, HV, V, dtype=call.v.dtype, device=device)
    if call.initial_state is None:
        S = torch.zeros(len(bounds), HV, K, V, dtype=dtype, device=device)
    else:
        S = call.initial_state[rows].to(dtype)
        S = (S.mT if call.state_v_first else S).clone(memory_format=torch.contiguous_format)
    live = len(bounds)
    for t in range(bounds[order[0]][1] if order else 0):
        while bounds[order[live - 1]][1] <= t:
            live -= 1
        at = starts[:live] + t
        q_t, k_t = (_unit(x[at].to(dtype), call.l2norm).repeat_interleave(G, 1) for x in (q, k))
        l = gates.gate_fwd(g[at].to(dtype).unsqueeze(2), call).squeeze(2)
        b = gates.beta_fwd(beta[at].to(dtype), call.beta_mode)
        state = S[:live]
        state.mul_(l.exp().unsqueeze(-1))
        u = v[at].to(dtype) - torch.matmul(k_t.unsqueeze(2), state).squeeze(2)
        u.mul_(b if b.dim() == u.dim() else b.unsqueeze(-1))
        state.addcmul_(k_t.unsqueeze(-1), u.unsqueeze(2))
        o[at] = torch.matmul(q_t.mul_(call.scale).unsqueeze(2), state).squeeze(2).to(o.dtype)
    ht = None
    if call.output_final_state:
        ht = torch.empty_like(S)
        ht[rows] = S
        ht = ht.mT.contiguous() if call.state_v_first else ht
    return o.view(B, T, HV, V), ht


def _unit(x: Tensor, on: bool) -> Tensor:
    return x * gates.rstd(x) if on else x.clone()

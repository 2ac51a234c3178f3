"""Kimi Delta Attention as plain torch in float64: the oracle every backend is measured against.

Two forms of one function, both differentiable by autograd, for every flag of ``chunk_kda``:

``recurrent``
    one token after another, straight from the definition; the truth.
``chunked``
    the WY form over chunks, which every backend computes; it shows the algebra.

For one sequence and one value head (head ``hv`` reads query/key head ``hv // G``), with state
S ``[K, V]``:

    q, k  <-  x / sqrt(sum_K x^2 + 1e-6)                     use_qk_l2norm_in_kernel
    b     <-  beta
            | sigmoid(beta)                                  use_beta_sigmoid_in_kernel
            | 2 sigmoid(beta)                                and allow_neg_eigval
    l     <-  g                                              log decay <= 0, per channel of K
            | -exp(A_log) softplus(g + dt_bias)              use_gate_in_kernel
            | lower_bound sigmoid(exp(A_log) (g + dt_bias))  and lower_bound
    S     <-  Diag(exp l_t) S                                decay first
    u_t    =  b_t (v_t - S^T k_t)                            the delta reads the decayed state
    S     <-  S + k_t u_t^T
    o_t    =  scale S^T q_t                                  the output reads after the write

Source: Kimi Linear (arXiv 2510.26692), sections 3 and 4.

Decays enter as products of a_t = exp l_t, never as differences of sums, so l = -inf or -1000 needs
no special case.
"""

# sizes: one function takes every keyword of the operation
from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[..., tuple[Tensor, Tensor]]

NORM_EPS = 1e-6

# exp is exactly 0 in float64 below -745.2. The clamps keep inf itself out of the chain rule, where
# it would meet a gradient of 0 and make NaN.
_DEAD = -800.0
_HUGE = 1e300


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Any, ...]:
    """Run the recurrence token by token.

    Args:
        q, k: ``[B, T, H, K]``, any float dtype; computed in float64, as everything else.
        v: ``[B, T, HV, V]``, HV a multiple of H.
        g: ``[B, T, HV, K]``, log decay per token (natural logarithm, <= 0), or the raw gate with
            ``use_gate_in_kernel``.
        beta: ``[B, T, HV]``, or ``[B, T, HV, V]`` for a write strength per value channel.
        **options: the keywords of ``chunk_kda``, with its meanings and defaults; those that only
            choose kernels (``safe_gate``, ``disable_recompute``, ``cu_seqlens_cpu``, ``use_graph``,
            ``max_num_seqs``) change nothing.

    Returns:
        ``(o, final_state)``: o ``[B, T, HV, V]`` with zero rows outside all sequences; final_state
        ``[N, HV, K, V]`` (``[N, HV, V, K]`` with ``state_v_first``), or None unless
        ``output_final_state``. With ``return_intermediate_states`` a third tensor, the states at
        the chunk starts: ``[B, NT, HV, K, V]``, NT over all sequences if packed. All float64.

    Raises:
        TypeError: an unknown keyword.
    """
    return _run(_tokens, q, k, v, g, beta, **options)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Any, ...]:
    """Run the same function chunk by chunk: arguments, returns and errors of :func:`recurrent`.

    A write strength per value channel has no chunk form with one inverse per head.

    Raises:
        ValueError: beta ``[B, T, HV, V]``.
    """
    if beta.ndim == v.ndim:
        raise ValueError(f"`beta` must be [B, T, HV] in the chunk form, got {list(beta.shape)}")
    return _run(_chunk, q, k, v, g, beta, **options)


def l2norm(x: Tensor) -> Tensor:
    """Divide rows by ``sqrt(sum x^2 + 1e-6)``, over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def write_strength(beta: Tensor, *, sigmoid: bool, neg_eigval: bool) -> Tensor:
    """The write strength b from ``beta``: itself, its sigmoid, or twice its sigmoid."""
    if not sigmoid:
        return beta
    return torch.sigmoid(beta) * (2.0 if neg_eigval else 1.0)


def log_gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The log decay from a raw gate ``[..., HV, K]``.

    Softplus form, or bounded form if ``lower_bound`` is given. ``A_log`` has HV elements in any
    shape (None: factor 1), ``dt_bias`` HV * K elements (None: 0).
    """
    HV, K = g.shape[-2:]
    x = g if dt_bias is None else g + dt_bias.reshape(HV, K)
    x = x.clamp(-_HUGE, _HUGE)
    rate = x.new_ones(HV, 1) if A_log is None else A_log.reshape(HV, 1).exp()
    if lower_bound is None:
        return -rate * torch.logaddexp(x, x.new_zeros(()))
    return lower_bound * torch.sigmoid(rate * x)


def _tokens(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """L tokens, one by one: the outputs ``[B, L, HV, V]`` and the state after them.

    q, k, a: ``[B, L, HV, K]``; v: ``[B, L, HV, V]``; b: ``[B, L, HV, 1 or V]``;
    S: ``[B, HV, K, V]``.
    """
    o: list[Tensor] = []
    for q_t, k_t, v_t, a_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, a, b)), strict=True):
        S = a_t[..., None] * S
        u_t = b_t * (v_t - (k_t[..., None, :] @ S)[..., 0, :])
        S = S + k_t[..., None] * u_t[..., None, :]
        o.append((q_t[..., None, :] @ S)[..., 0, :])
    return torch.stack(o, 1), S


def _chunk(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of one chunk at once; shapes of :func:`_tokens`.

    D_ij is the product of a over the tokens after j up to i, E_i that from the chunk start to i:

        (I + L) v_new = b (v - (k E) S)        L_ij   = b_i sum_K k_i k_j D_ij, i > j
        o             = (q E) S + Aqk v_new    Aqk_ij =     sum_K q_i k_j D_ij, i >= j
        S            <- E_last S + (k D_last)^T v_new
    """
    q, k, v, a, b = (x.transpose(1, 2) for x in (q, k, v, a, b))  # [B, HV, L, D]
    L = q.shape[2]
    one = torch.ones_like(a[:, :, :1])
    rows = [torch.cat((a[:, :, :1], one), 2)]  # row i: column 0 is E_i, column j + 1 is D_ij for j <= i
    for i in range(1, L):
        rows.append(torch.cat((rows[-1] * a[:, :, i : i + 1], one), 2))
    E = torch.stack([row[:, :, 0] for row in rows], 2)  # [B, HV, L, K]

    def scores(x: Tensor) -> Tensor:  # [B, HV, L, L], 0 above the diagonal
        return torch.stack(
            [
                torch.nn.functional.pad(
                    (k[:, :, : i + 1] * rows[i][:, :, 1:] @ x[:, :, i, :, None])[..., 0],
                    (0, L - i - 1),
                )
                for i in range(L)
            ],
            2,
        )

    lower = torch.eye(L, dtype=a.dtype, device=a.device) + (b * scores(k)).tril(-1)
    v_new = torch.linalg.solve_triangular(lower, b * (v - (k * E) @ S), upper=False, unitriangular=True)
    o = (q * E) @ S + scores(q) @ v_new
    S = E[:, :, -1, :, None] * S + (k * rows[-1][:, :, 1:]).transpose(2, 3) @ v_new
    return o.transpose(1, 2), S


def _run(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    chunk_size: int = 64,
) -> tuple[Any, ...]:
    """Activate the inputs of each sequence and walk its chunks with ``step``."""
    del (
        safe_gate,
        disable_recompute,
        cu_seqlens_cpu,
        use_graph,
        max_num_seqs,
    )  # they choose kernels, not values
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    factor = K**-0.5 if scale is None else scale
    bounds: list[int] = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    N = B if cu_seqlens is None else len(bounds) - 1
    A_log, dt_bias = (None if p is None else p.double() for p in (A_log, dt_bias))

    states = (
        v.new_zeros(N, HV, K, V, dtype=torch.float64) if initial_state is None else initial_state.double()
    )
    if initial_state is not None and state_v_first:
        states = states.transpose(2, 3)

    outputs: list[Tensor] = []
    finals: list[Tensor] = []
    starts: list[Tensor] = []
    for n, (first, last) in enumerate(pairwise(bounds)):
        # Rows outside the sequence are cut off first: a NaN there reaches no gradient.
        qs, ks, vs, gs, bs = (x[:, first:last].double() for x in (q, k, v, g, beta))
        if use_qk_l2norm_in_kernel:
            qs, ks = l2norm(qs), l2norm(ks)
        qs, ks = (x.repeat_interleave(HV // H, 2) for x in (factor * qs, ks))
        if use_gate_in_kernel:
            gs = log_gate(gs, A_log, dt_bias, lower_bound)
        a = gs.clamp(min=_DEAD).exp()
        bs = write_strength(bs, sigmoid=use_beta_sigmoid_in_kernel, neg_eigval=allow_neg_eigval)
        bs = bs if bs.ndim == vs.ndim else bs[..., None]

        S = states if cu_seqlens is None else states[n : n + 1]
        for i in range(0, last - first, chunk_size):
            starts.append(S)
            o, S = step(*(x[:, i : i + chunk_size] for x in (qs, ks, vs, a, bs)), S)
            outputs.append(o)
        finals.append(S)
    outputs.append(v.new_zeros(B, T - bounds[-1], HV, V, dtype=torch.float64))

    def laid_out(S: Tensor) -> Tensor:
        return S.transpose(-1, -2).contiguous() if state_v_first else S

    o = torch.cat(outputs, 1)
    final_state = laid_out(torch.cat([states[:0], *finals])) if output_final_state else None
    if not return_intermediate_states:
        return o, final_state
    h = torch.stack(starts, 1) if starts else states.new_zeros(B, 0, HV, K, V)
    return o, final_state, laid_out(h)

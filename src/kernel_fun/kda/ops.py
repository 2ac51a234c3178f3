"""The public operations of Kimi Delta Attention."""
# sizes: the signatures are fla's

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from kernel_fun._common import check, compat, exchange, support
from kernel_fun._common import device as devices
from kernel_fun._common.compiler import outside_compiler, traced_by
from kernel_fun._common.plan import BackendUnavailable, announce
from kernel_fun.kda import autograd, context_parallel, dispatch, fallback, known
from kernel_fun.kda.call import TENSORS, ContractError, ContractTypeError, bind

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from kernel_fun._common.plan import Plan
    from kernel_fun.kda.call import Call

__all__ = ["chunk_kda", "fused_recurrent_kda", "is_supported", "warmup"]


def _trace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    from kernel_fun.kda import compiled

    return compiled.trace(args, kwargs)


@traced_by(_trace, exchange.unbound)
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
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
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> Any:
    r"""Kimi Delta Attention, chunked: the drop-in for ``fla.ops.kda.chunk_kda`` of fla-core 0.6.0.

    Per value head, with state ``S [K, V]``::

        S = diag(exp l_t) S
        u = beta_t (v_t - S^T k_t)
        S = S + k_t u^T
        o_t = scale S^T q_t

    Args:
        q, k: ``[B, T, H, K]``, K <= 256. Every tensor argument may be float32, bfloat16, float16 or (off
            the GPU kernels) float64, mixed, with any strides; none is modified.
        v: ``[B, T, HV, V]``, HV a multiple of H; value head i reads query/key head i // (HV // H).
        g: ``[B, T, HV, K]``. The natural-log decay of each token and channel (<= 0, -inf included), or
            the raw gate with ``use_gate_in_kernel``. Positive log decays are outside the contract and not
            checked for: the chunk form loses accuracy with them and overflows long before the recurrence.
        beta: ``[B, T, HV]``, write strength, or its logit with ``use_beta_sigmoid_in_kernel``.
        scale: Multiplies q; default ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]`` float32 (``[N, HV, V, K]`` with ``state_v_first``); N = B, or the
            number of packed sequences. float64 where an input is.
        output_final_state: Return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: q and k are divided by ``sqrt(sum x^2 + 1e-6)`` over K.
        use_gate_in_kernel: ``l = -exp(A_log) softplus(g + dt_bias)``, or with ``lower_bound``,
            ``l = lower_bound sigmoid(exp(A_log) (g + dt_bias))``.
        use_beta_sigmoid_in_kernel: beta is sigmoid(beta).
        allow_neg_eigval: beta is 2 sigmoid(beta); needs ``use_beta_sigmoid_in_kernel``.
        safe_gate: Accepted. Kernels here take any log gate <= 0, so it selects nothing; with an
            in-kernel gate it requires ``lower_bound`` in [-5, 0), as in fla.
        lower_bound: Least log decay of the bounded gate.
        disable_recompute: Keep chunk states and new values for the backward instead of rebuilding them:
            more memory, less work, the same bits. The eager backend does so for float32 and float64. Not
            together with ``return_intermediate_states``.
        return_intermediate_states: Also return the state at each chunk's start, in k's dtype
            (``[B, ceil(T/chunk_size), HV, K, V]``, packed ``[1, chunks, HV, K, V]``). Only in
            ``torch.inference_mode()``, and with ``disable_recompute=False``.
        state_v_first: All states are ``[..., V, K]``.
        cu_seqlens: ``[N + 1]`` int32 or int64 boundaries of packed sequences, on q's device or the CPU; B
            must be 1. Sequences may be empty; rows past the last boundary give zero outputs and gradients. A
            backward after they were changed in place is refused, as after a change of q.
        cu_seqlens_cpu: The same on the CPU; spares a wait for the device.
        cp_context: The tensors are this rank's part of a packed batch that :func:`build_cp_context`, or that
            of fla, cut over a process group; its boundaries replace ``cu_seqlens``. Every rank of the group
            must make the call, in the forward and in the backward: one all-gather each (docs/scaling.md). An
            exception of a rank before it reaches every rank, unless its arguments leave HV, K or V open.
            States have a row for each local sequence (``context.sequences`` numbers them): an initial state
            is read on the rank where its sequence begins, and a final state stands on the rank where it
            ends, 0 elsewhere. Gradients of A_log and dt_bias are those of the local tokens, unless the
            context says ``reduce_gradients``.
        use_graph, max_num_seqs: Accepted; with both, ``cu_seqlens`` must have ``max_num_seqs + 1`` entries.
        **kwargs: ``A_log`` (HV elements), ``dt_bias`` (``[HV*K]`` or ``[HV, K]``), ``chunk_size`` (32 or 64:
            the spacing of intermediate states; the result does not depend on it),
            ``transpose_state_layout`` (deprecated name of ``state_v_first``).

    Returns:
        ``(o, final_state)``, o ``[B, T, HV, V]`` in q's dtype and final_state float32 or None; with
        ``return_intermediate_states`` ``(o, final_state, h)``. States are float64 where an input is.
        Gradients of q, k, v, g, beta, A_log, dt_bias and initial_state come in the dtype of each; there is
        no double backward, no forward-mode derivative, and nothing of ``torch.func``.

    Raises:
        ValueError: a shape or value outside the contract; the message names the argument, what is expected
            and what was given.
        TypeError: a type or dtype outside it, or an unknown keyword.
        NotImplementedError: no backend can take the call; the message says why.
        PeerFailure: (a RuntimeError) under ``cp_context``, another rank raised, or called something else.

    The recurrence and its chunked form are those of Kimi Linear (arXiv:2510.26692) as implemented by
    flash-linear-attention; docs/kda.md derives both.
    """
    arguments = locals()
    begun = None
    if cp_context is None:
        signature = known.signature(arguments)
        results = known.again(signature, arguments)
        if results is not None:
            return results
        call, plan = known.recall(signature, arguments) or _planned(signature, arguments)
    else:
        call, plan, begun = _bound_together(arguments)
    if plan.backend == "fla":
        return fallback.chunk_kda(call.verbatim)
    if call.split is not None:
        return context_parallel.run(call, plan, begun)
    return autograd.run(call, plan)


def _bound_together(arguments: dict[str, Any]) -> tuple[Call, Plan, context_parallel.Begun]:
    """As every rank of a group binds its call, and begins it; what one raises here reaches all."""
    with context_parallel.failing_together(arguments) as split:
        signature = known.signature(arguments, split)
        call, plan = known.recall(signature, arguments, split) or _planned(signature, arguments)
        return call, plan, context_parallel.begin(call, plan)


def _planned(signature: Hashable | None, arguments: dict[str, Any]) -> tuple[Call, Plan]:
    """Bind a call, plan it and say who serves it."""
    q = arguments["q"]
    _refuse_unknown(compat.CHUNK_KDA, q, tuple(arguments["kwargs"]))
    call = bind(arguments)
    plan = dispatch.plan(call.problem(), devices.of(q.device))
    if plan.backend != "fla" and call.unknown:
        raise _unknown_keyword("chunk_kda", call.unknown)
    if plan.reason is None:
        check.no_tangents("chunk_kda", dict(zip(TENSORS, call.tensors())))
    announce(plan, "chunk_kda")
    known.keep(signature, call, plan)
    return call, plan


def _refuse_unknown(op: compat.FlaOp, q: Any, given: tuple[str, ...]) -> None:
    """TypeError for a keyword that neither we nor, on its device, an installed fla knows."""
    unknown = tuple(name for name in given if name not in op.keywords)
    if not unknown:
        return
    on_cuda = isinstance(q, torch.Tensor) and devices.of(q.device).type == "cuda"
    known = compat.keywords(op) if on_cuda and support.missing("fla") is None else None
    if known is None or not set(unknown) <= known:
        raise _unknown_keyword(op.name, tuple(n for n in unknown if known is None or n not in known))


def _unknown_keyword(op: str, unknown: tuple[str, ...]) -> TypeError:
    return TypeError(f"{op}() got an unexpected keyword argument {unknown[0]!r}")


@outside_compiler
@torch.no_grad()
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention, token by token, for decoding: ``fla.ops.kda.fused_recurrent_kda`` of 0.6.0.

    Arguments, mathematics and errors are those of :func:`chunk_kda`, with two differences: ``beta`` may
    also be ``[B, T, HV, V]``, one write strength per value channel, and o has v's dtype. States pass
    between the two at any token. No gradient is recorded.

    Returns:
        ``(o, final_state)``: o ``[B, T, HV, V]``; final_state float32 in the layout of ``initial_state``,
        or None.
    """
    arguments = {**_defaults(), **locals()}
    _refuse_unknown(compat.FUSED_RECURRENT_KDA, q, tuple(n for n in kwargs if n != "safe_gate"))
    arguments["kwargs"] = {"A_log": A_log, "dt_bias": dt_bias, **kwargs}
    if isinstance(beta, torch.Tensor) and isinstance(v, torch.Tensor) and beta.dim() == v.dim():
        arguments["beta"] = _one_per_head(beta, v)
    call = bind(arguments)
    if arguments["beta"] is not beta:
        call = replace(call, beta=beta)
    plan = dispatch.plan_recurrent(call.problem(), devices.of(q.device))
    unknown = tuple(n for n in kwargs if n not in ("transpose_state_layout", "safe_gate"))
    if plan.backend != "fla" and unknown:
        raise _unknown_keyword("fused_recurrent_kda", unknown)
    announce(plan, "fused_recurrent_kda")
    if plan.backend == "fla":
        given = {n: arguments[n] for n in compat.FUSED_RECURRENT_KDA.parameters if n in arguments}
        return fallback.fused_recurrent_kda({**given, **arguments["kwargs"], "beta": beta})
    with torch.autocast(q.device.type, enabled=False):
        return plan.load("recurrent")(call)


def _one_per_head(beta: Tensor, v: Tensor) -> Tensor:
    if beta.shape != v.shape:
        raise ContractError(
            f"`beta` must have shape [B, T, HV] or [B, T, HV, V] = {list(v.shape)}, got {list(beta.shape)}"
        )
    return beta[..., 0] if beta.shape[-1] else beta.new_empty(beta.shape[:-1])


def is_supported(
    q: Tensor,
    v: Tensor,
    *,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    **kwargs: Any,
) -> tuple[bool, str | None]:
    """Would a GPU kernel of ours serve this call of chunk_kda, and if not, why?

    Args:
        q, v: As for chunk_kda, or any tensors of their shape, dtype and device.
        chunk_size, initial_state: As for chunk_kda.
        **kwargs: Any other argument of chunk_kda. k, g and beta default to q's shape and dtypes.

    Returns:
        ``(True, None)``, or ``(False, reason)``. The answer is the dispatcher's own plan. Arguments
        outside the contract, and unknown keywords, raise as chunk_kda does.
    """
    sizes: dict[str, int] = {}
    check.shape("q", check.is_tensor("q", q), "B T H K", sizes)
    check.shape("v", check.is_tensor("v", v), "B T HV V", sizes)
    B, T, K, HV = (sizes[letter] for letter in ("B", "T", "K", "HV"))
    stand_in = {
        "k": q,
        "g": q.new_empty(1).expand(B, T, HV, K),
        "beta": q.new_empty(1).expand(B, T, HV),
    }
    named = {"q": q, "v": v, "initial_state": initial_state, **stand_in}
    rest = {"chunk_size": chunk_size, **kwargs}
    defaults = _defaults()
    arguments = {**defaults, **named, **{n: a for n, a in rest.items() if n in defaults or n in named}}
    arguments["kwargs"] = {n: a for n, a in rest.items() if n not in arguments}
    _refuse_unknown(compat.CHUNK_KDA, q, tuple(arguments["kwargs"]))
    call = bind(arguments)
    try:
        plan = dispatch.plan(call.problem(), devices.of(q.device))
    except (BackendUnavailable, NotImplementedError) as refusal:
        return False, str(refusal)
    return plan.reason is None, plan.reason


@lru_cache(maxsize=1)
def _defaults() -> dict[str, Any]:
    """Default of every optional parameter of chunk_kda."""
    parameters = inspect.signature(chunk_kda).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def warmup(
    *,
    K: int = 128,
    V: int = 256,
    HV: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cuda",
    use_qk_l2norm: bool = True,
    use_gate_in_kernel: bool = True,
) -> float:
    """Run a small problem forward and backward, so that the first training step meets no compiler.

    Also compares an installed fla with the contract this version was tested against.

    Args:
        K, V, HV: Head sizes and value heads of the model (H = HV).
        dtype: Of q, k, v, g and beta.
        device: Where the model will run.
        use_qk_l2norm, use_gate_in_kernel: As the model calls chunk_kda; beta is passed as logits.

    Returns:
        Seconds it took.

    Raises:
        RuntimeError: the installed fla breaks the contract, the device is absent, or no backend of ours
            serves the problem on it, so that nothing was warmed.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ContractTypeError(f"`dtype` must be a floating-point torch.dtype, got {dtype}")
    begin = time.perf_counter()
    if (difference := compat.check_fla()) is not None:
        raise RuntimeError(f"kernel-fun kda warmup: {difference}")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"kernel-fun kda warmup: nothing warmed, {where} was asked for and torch sees no CUDA device "
            "(device='cpu' warms a CPU)"
        )
    make = torch.Generator(device="cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.randn(shape, generator=make).to(where, dtype).requires_grad_()

    T = 130
    q, k, v, g, beta = (
        draw(1, T, HV, K),
        draw(1, T, HV, K),
        draw(1, T, HV, V),
        draw(1, T, HV, K),
        draw(1, T, HV),
    )
    parameters: dict[str, Any] = {}
    if use_gate_in_kernel:
        parameters = {"A_log": draw(HV).float(), "dt_bias": draw(HV * K).float()}
    else:
        g = torch.nn.functional.logsigmoid(g.detach().float()).to(dtype).requires_grad_()
    flags: dict[str, Any] = {
        "use_qk_l2norm_in_kernel": use_qk_l2norm,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": True,
    }
    served, reason = is_supported(q, v, k=k, g=g, beta=beta, **flags, **parameters)
    if where.type == "cuda" and not served:
        raise RuntimeError(f"kernel-fun kda warmup: nothing warmed: {reason}")
    with torch.inference_mode(False), torch.enable_grad():
        o, _ = chunk_kda(q=q, k=k, v=v, g=g, beta=beta, **flags, **parameters)
        o.sum().backward()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    if not bool(torch.isfinite(o).all()) or q.grad is None:
        raise RuntimeError("kernel-fun kda warmup: the smoke problem gave no finite output and gradient")
    return time.perf_counter() - begin

"""The public operations of the short convolution."""

from __future__ import annotations

import inspect
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from kernel_fun._common import check, exchange
from kernel_fun._common import device as devices
from kernel_fun._common.compiler import outside_compiler, traced_by
from kernel_fun._common.plan import announce
from kernel_fun.cconv import autograd, context_parallel, dispatch, fallback, known
from kernel_fun.cconv.call import TENSORS, ContractError, bind, bind_step

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from kernel_fun._common.plan import Plan
    from kernel_fun.cconv.call import Call

__all__ = ["causal_conv1d", "causal_conv1d_update", "is_supported", "warmup"]


def _trace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    from kernel_fun.cconv import compiled

    return compiled.trace(args, kwargs)


@traced_by(_trace, exchange.unbound)
def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution: ``fla.modules.convolution.causal_conv1d`` of fla-core 0.6.0.

    Per sequence and channel, with x_t for t < 0 from the initial state, or zero::

        z_t = bias + sum_{j<W} weight[:, W-1-j] x_{t-j}
        y_t = act(z_t) + residual_t

    Args:
        x: ``[B, T, D]`` (or ``[B, T, ...]`` with D elements in the trailing dimensions). Every tensor may
            be float32, bfloat16, float16 or float64 (x of float64 only off the GPU kernels), mixed, with any
            strides; none is modified. T may be 0, or less than W. Several convolutions of one projection
            (q, k and v, say) are one call on all of its channels.
        weight: ``[D, W]``, newest input last; required. GPU kernels take W from 2 to 8.
        bias: ``[D]``.
        residual: Shape of x, added after the activation.
        initial_state: ``[N, D, W]``, the last W inputs before the first, newest last; N = B, or the number
            of packed sequences. The convolution reads W-1 of them.
        output_final_state: Also return the last W inputs of each sequence, which reach back into the
            initial state (or zeros) where the sequence is shorter than W.
        activation: None, or ``"silu"`` or ``"swish"``, two names of ``z sigmoid(z)``.
        backend: ``"triton"``, the default, is served here. ``"mix"`` and ``"cuda"`` name implementations of
            fla's, to which a CUDA call is then delegated.
        cu_seqlens: ``[N + 1]`` int32 or int64 boundaries of packed sequences, on x's device; B must be 1.
            Sequences may be empty; rows past the last boundary give zero outputs and gradients.
        cu_seqlens_cpu: The same on the CPU; its content is then checked. Nothing waits for the device.
        chunk_indices: Accepted; kernels here need no index of chunks.
        cp_context: x is this rank's part of a packed batch that ``kernel_fun.kda.build_cp_context``, or that
            of fla, cut over a process group; its boundaries replace ``cu_seqlens``. Every rank of the group
            must make the call: one all-gather of the last W-1 inputs, and one of their gradients in the
            backward. States have a row for each local sequence: an initial state is read where its sequence
            begins, and a final one stands where it ends (0 elsewhere).
        **kwargs: ``seq_idx``, for ``"mix"`` and ``"cuda"`` on a GPU; here ``cu_seqlens`` packs sequences.

    Returns:
        ``(y, final_state)``: y in x's shape and dtype, contiguous; final_state ``[N, D, W]`` in x's dtype,
        or None. Arithmetic is float32 (float64 where x is). Gradients of x, weight, bias,
        residual and initial_state come in the dtype of each and include all W slots of both states;
        there is no double backward, no forward-mode derivative of the kernels, and no gradient or vmap of
        ``torch.func``. Two runs give the same bits.

    Raises:
        ValueError: a shape or value outside the contract; the message names the argument, what is expected
            and what was given.
        TypeError: a type or dtype outside it, or an unknown keyword.
        NotImplementedError: no backend can take the call; the message says why.
        kernel_fun.kda.PeerFailure: under ``cp_context``, another rank raised, or called something else
            (docs/scaling.md says which failures reach every rank).
    """
    arguments = locals()
    if cp_context is None:
        signature = known.signature(arguments)
        call, plan = known.recall(signature, arguments) or _planned(signature, arguments)
    else:
        call, plan = _bound_together(arguments)
    if plan.backend == "fla":
        return fallback.causal_conv1d(call.verbatim)
    y, final_state = (autograd if call.split is None else context_parallel).run(call, plan)
    return y if x.dim() == 3 else y.view(x.shape), final_state


def _bound_together(arguments: dict[str, Any]) -> tuple[Call, Plan]:
    """As every rank of a group binds its call; what one raises here reaches all."""
    with context_parallel.failing_together(arguments):
        signature = known.signature(arguments)
        return known.recall(signature, arguments) or _planned(signature, arguments)


def _planned(signature: Hashable | None, arguments: dict[str, Any]) -> tuple[Call, Plan]:
    """Bind a call, plan it and say who serves it."""
    call = bind(arguments)
    plan = dispatch.plan(call.problem(), devices.of(arguments["x"].device))
    if plan.backend != "fla" and call.unknown:
        raise _unexpected(call.unknown[0], plan)
    if plan.reason is None:
        check.no_tangents("causal_conv1d", dict(zip(TENSORS, call.tensors())))
    announce(plan, "causal_conv1d")
    known.keep(signature, call, plan)
    return call, plan


def _unexpected(name: str, plan: Plan) -> TypeError:
    message = f"causal_conv1d() got an unexpected keyword argument {name!r}"
    if name == "seq_idx":
        message = (
            "`seq_idx` is read by fla's backends 'mix' and 'cuda' alone, to which only a CUDA call is "
            f"delegated, got it on {plan.device.type} with backend={plan.problem.asked!r}: packed sequences "
            "are given by `cu_seqlens`"
        )
    return TypeError(message)


@outside_compiler
def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token per sequence, for decoding: ``fla.modules.convolution.causal_conv1d_update`` of 0.6.0.

    Under ``torch.compile`` it runs outside the graph: a graph break, so an error under ``fullgraph=True``.

    Args:
        x: ``[N, D]``, ``[1, N, D]`` or ``[N, 1, D]``; in the last two, trailing dimensions may make up D.
        cache: ``[N, D, W]``, the last W inputs, newest last (an initial or final state of
            :func:`causal_conv1d`), any float dtype and strides. **Modified in place**: shifted, x appended.
        residual: Shape of x, added after the activation.
        weight: ``[D, W]``; required.
        bias: ``[D]``.
        activation: None, ``"silu"`` or ``"swish"``.

    Returns:
        ``(y, cache)``: y in x's shape and dtype; cache is the tensor given.

    Raises:
        ValueError, TypeError: as :func:`causal_conv1d`; ValueError too where a tensor requires a gradient
            that would be recorded, since none is, and where the cache is expanded.
    """
    arguments = locals()
    step = bind_step(arguments)
    names = ("x", "residual", "cache", "weight", "bias")
    for name in names:
        tensor = arguments[name]
        if torch.is_grad_enabled() and tensor is not None and tensor.requires_grad:
            raise ContractError(
                f"`{name}` must not require a gradient, got requires_grad=True: causal_conv1d_update records "
                "none; call it under torch.no_grad(), or causal_conv1d"
            )
    plan = dispatch.plan_update(step.problem(), devices.of(x.device))
    announce(plan, "causal_conv1d_update")
    if plan.backend == "fla":
        return fallback.causal_conv1d_update(arguments)
    if plan.reason is None:
        check.no_tangents("causal_conv1d_update", {name: arguments[name] for name in names})
    with torch.no_grad(), autograd.no_autocast(x):
        y = plan.load("update")(step)
    return y.view(x.shape), cache


def is_supported(x: Tensor, weight: Tensor, **kwargs: Any) -> tuple[bool, str | None]:
    """Would a GPU kernel of ours serve this call of causal_conv1d, and if not, why?

    Args:
        x, weight: As for causal_conv1d.
        **kwargs: Any other argument of causal_conv1d.

    Returns:
        ``(True, None)``, or ``(False, reason)``. The answer is the dispatcher's own plan. Arguments
        outside the contract raise as causal_conv1d does.
    """
    defaults = _defaults()
    arguments = {**defaults, "x": x, "weight": weight, **{n: a for n, a in kwargs.items() if n in defaults}}
    arguments["kwargs"] = {n: a for n, a in kwargs.items() if n not in defaults}
    plan = dispatch.plan(bind(arguments).problem(), devices.of(x.device))
    return plan.reason is None, plan.reason


@lru_cache(maxsize=1)
def _defaults() -> dict[str, Any]:
    """Default of every optional parameter of causal_conv1d."""
    parameters = inspect.signature(causal_conv1d).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def warmup(
    *,
    D: int = 2048,
    W: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype = torch.float32,
    bias: bool = False,
    activation: str | None = "silu",
    packed: bool = False,
    device: str | torch.device = "cuda",
) -> float:
    """Run problems of growing T forward and backward, so that the first training step meets no compiler.

    Each size that runs with another tile is compiled on its own; on a GPU the largest problem has about 2^26
    elements of x.

    Args:
        D, W: Channels and taps of the model's convolutions; one call per D.
        dtype, weight_dtype: Of x, and of weight and bias.
        bias, activation: As the model calls causal_conv1d.
        packed: Warm the kernels of packed sequences instead of the dense ones.
        device: Where the model will run.

    Returns:
        Seconds it took.

    Raises:
        RuntimeError: the device is absent, or no backend of ours serves the problem on it, so that nothing
            was warmed.
    """
    begin = time.perf_counter()
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"kernel-fun cconv warmup: nothing warmed, {where} was asked for and torch sees no CUDA device "
            "(device='cpu' warms a CPU)"
        )
    generator = torch.Generator(where).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        values = torch.randn(shape, generator=generator, device=where)
        return values.to(dtype).requires_grad_()

    weight = draw(D, W, dtype=weight_dtype)
    arguments: dict[str, Any] = {
        "activation": activation,
        "bias": draw(D, dtype=weight_dtype) if bias else None,
    }
    T = 128
    while True:
        x = draw(1, T, D, dtype=dtype)
        if packed:
            arguments["cu_seqlens"] = torch.tensor([0, T], device=where)
        served, reason = is_supported(x, weight, **arguments)
        if where.type == "cuda" and not served:
            raise RuntimeError(f"kernel-fun cconv warmup: nothing warmed: {reason}")
        y, _ = causal_conv1d(x, weight, **arguments)
        leaves = [t for t in (x, weight, arguments["bias"]) if t is not None]
        dx = torch.autograd.grad(y, leaves, torch.ones_like(y))[0]
        if where.type != "cuda" or T * max(1, D // 512) >= 1 << 17:
            break
        T *= 2
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    if not bool(torch.isfinite(y).all()) or not bool(torch.isfinite(dx).all()):
        raise RuntimeError("kernel-fun cconv warmup: the smoke problem gave no finite output and gradient")
    return time.perf_counter() - begin

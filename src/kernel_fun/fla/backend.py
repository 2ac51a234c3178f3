"""Our backend of fla's dispatch: for each function that we serve, who runs a call, or why it is not ours."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from kernel_fun._common import compat, config, exchange, support
from kernel_fun._common import device as devices
from kernel_fun._common.compiler import by_name
from kernel_fun._common.plan import announce
from kernel_fun.fla import cpu

PRIORITY = 2
"""Before FlashKDA (3), which serves inference alone; after Ascend's (0)."""

UNBOUND = "arguments that do not bind"
"""So that the call goes on to fla's own function, where Python refuses it."""

Arguments = dict[str, Any]
Run = Callable[[], Any]

CONV_FWD = compat.FlaOp(
    "fla.modules.causal_conv1d",
    "causal_conv1d_fwd",
    (
        "x", "weight", "bias", "residual", "initial_state", "output_final_state", "activation", "cu_seqlens",
        "cu_seqlens_cpu",
    ),
)  # fmt: skip
CONV_BWD = compat.FlaOp(
    "fla.modules.causal_conv1d",
    "causal_conv1d_bwd",
    (
        "x", "dy", "dht", "weight", "bias", "residual", "initial_state", "activation", "cu_seqlens",
        "cu_seqlens_cpu",
    ),
)  # fmt: skip
CONV_UPDATE = compat.FlaOp(
    "fla.modules.causal_conv1d",
    "causal_conv1d_update",
    ("x", "cache", "residual", "weight", "bias", "activation"),
)
RECURRENT = compat.FlaOp(
    "fla.ops.kda.fused_recurrent",
    "fused_recurrent_kda_fwd",
    (
        "q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "scale", "output_final_state",
        "inplace_final_state", "state_v_first", "cu_seqlens", "ssm_state_indices", "num_accepted_tokens",
    ),
)  # fmt: skip

NORM_FWD = compat.FlaOp(
    "fla.modules.norm.fused_norm_gate",
    "layer_norm_gated_fwd",
    (
        "x", "g", "weight", "bias", "activation", "eps", "residual", "out_dtype", "residual_dtype",
        "is_rms_norm",
    ),
)  # fmt: skip
NORM_BWD = compat.FlaOp(
    "fla.modules.norm.fused_norm_gate",
    "layer_norm_gated_bwd",
    (
        "dy", "x", "g", "weight", "bias", "activation", "eps", "mean", "rstd", "dresidual", "has_residual",
        "is_rms_norm", "x_dtype", "recompute_output",
    ),
)  # fmt: skip
SWIGLU_FWD = compat.FlaOp("fla.modules.activations", "swiglu_fwd", ("x", "y", "output_contiguous"))
SWIGLU_BWD = compat.FlaOp(
    "fla.modules.activations", "swiglu_fwdbwd", ("x", "y", "g", "use_weight", "output_contiguous")
)
RECURRENT_REGISTRY = "kda"
"""The registry in which fla dispatches :data:`RECURRENT`."""
DISPATCHED = (compat.CHUNK_KDA, CONV_FWD, CONV_BWD, CONV_UPDATE, NORM_FWD, NORM_BWD, SWIGLU_FWD, SWIGLU_BWD)
"""Functions that fla dispatches one by one."""


@lru_cache(maxsize=1)
def backend() -> Any:
    """Our backend class: fla makes an instance of it for each function it dispatches."""
    base = importlib.import_module("fla.backends").BaseBackend

    class KernelFun(base):
        """kernel-fun. Accepts a call by deciding who runs it; that decision is its implementation."""

        backend_type = "kernel_fun"
        priority = PRIORITY
        kernel_fun_active = False

        def __init__(self) -> None:
            super().__init__()
            self._accepted = threading.local()

        @classmethod
        def is_available(cls) -> bool:
            return cls.kernel_fun_active

        def is_enabled(self) -> bool:
            return config.FLA.on()

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            """(accepted, why not). Errors of the caller are raised, not turned into a refusal."""
            decide = DECISIONS.get(function_name)
            if decide is None:
                return False, "kernel-fun serves whole operations"
            op, decision = decide
            given = by_name(op.parameters, args, kwargs)
            decided = UNBOUND if given is None else decision(given)
            if decided == UNBOUND:
                exchange.unbound(kwargs)
            self._accepted.run = None if isinstance(decided, str) else decided
            return (False, decided) if isinstance(decided, str) else (True, None)

        def get_implementation(self, function_name: str) -> Callable[..., Any] | None:
            run, self._accepted.run = getattr(self._accepted, "run", None), None
            return None if run is None else lambda *args, **kwargs: run()

    return KernelFun


def _kda(given: Arguments) -> Run | str:
    """chunk_kda: what runs it, or why it is not ours."""
    from kernel_fun.kda import autograd, context_parallel, known, ops

    if not all(name in given for name in ("q", "k", "v", "g", "beta")):
        return UNBOUND
    unknown = [name for name in given if name not in _KDA_NAMES and name not in compat.CHUNK_KDA.keywords]
    on_cpu = getattr(getattr(given["q"], "device", None), "type", "cpu") == "cpu"
    if unknown and not on_cpu:  # fla ignores it; on a CPU there is nobody to go on to
        reason = f"keyword {unknown[0]!r} is not known to kernel-fun"
        message = f"kernel-fun kda: chunk_kda delegated to fla: {reason}"
        support.log_once(("unknown", unknown[0]), logging.WARNING, message)
        return reason
    arguments = {**ops._defaults(), **{n: a for n, a in given.items() if n in _KDA_NAMES}}
    arguments["kwargs"] = {n: a for n, a in given.items() if n not in _KDA_NAMES}
    if given.get("cp_context") is not None:
        call, plan, begun = ops._bound_together(arguments)
        if plan.backend != "fla" and call.split is not None:
            return lambda: context_parallel.run(call, plan, begun)
    else:
        signature = known.signature(arguments)
        call, plan = known.recall(signature, arguments) or ops._planned(signature, arguments)
    if plan.backend == "fla":
        return _reason(plan)
    return lambda: autograd.run(call, plan)


_KDA_NAMES = frozenset(compat.CHUNK_KDA.parameters)


def _reason(plan: Any) -> str:
    return plan.reason or f"{plan.family} is served by fla"


def _recurrent(given: Arguments) -> Run | str:
    """fused_recurrent_kda's kernel, on a CPU."""
    from kernel_fun.kda import ops

    q, h0, out = given["q"], given.get("initial_state"), given.get("out")
    if q.device.type != "cpu":
        return "fla's own kernel decodes on a GPU"
    for name in ("ssm_state_indices", "num_accepted_tokens"):
        if given.get(name) is not None:
            return f"`{name}` is not served by kernel-fun"
    in_place = given.get("inplace_final_state", True)
    taken = {n: a for n, a in given.items() if n in compat.FUSED_RECURRENT_KDA.parameters}

    def run() -> Any:
        taken["output_final_state"] = in_place or given.get("output_final_state", False)
        o, state = ops.fused_recurrent_kda(**taken)
        if in_place and h0 is not None and state is not None:
            state = h0.copy_(state)
        return (o if out is None else out.copy_(o)), state

    return run


def _conv_fwd(given: Arguments) -> Run | str:
    """The forward of fla's convolution: (y, final state)."""
    from kernel_fun.cconv import autograd, dispatch

    bound = _convolution(given, bool(given.get("output_final_state")))
    plan = dispatch.plan(bound.problem(), devices.of(bound.x.device))
    announce(plan, "causal_conv1d")
    if plan.backend == "fla":
        return _reason(plan)

    def run() -> Any:
        y, ht = autograd.forward(bound, plan)
        return y.view(given["x"].shape), ht

    return run


def _conv_bwd(given: Arguments) -> Run | str:
    """The backward of fla's convolution: (dx, dweight, dbias, dresidual, dh0)."""
    from kernel_fun.cconv import autograd, dispatch

    dy, dht = given["dy"], given["dht"]
    bound = _convolution(given, dht is not None)
    problem = replace(bound.problem(), needs_grad=True)
    plan = dispatch.plan(problem, devices.of(bound.x.device))
    if plan.backend == "fla":
        return _reason(plan)

    def run() -> Any:
        x = bound.x
        with autograd.no_autocast(x):
            g = plan.load("bwd")(bound, dy.reshape(x.shape), dht, True)
        dr = None if bound.residual is None else autograd.residual_gradient(bound, dy)
        return g.dx.view(given["x"].shape), g.dweight, g.dbias, dr, g.dh0

    return run


def _convolution(given: Arguments, wants_ht: bool) -> Any:
    """The validated call of a convolution whose gradients fla's Function asks for."""
    from kernel_fun.cconv import call

    names = ("x", "weight", "bias", "residual", "initial_state", "activation", "cu_seqlens", "cu_seqlens_cpu")
    arguments: Arguments = {name: given.get(name) for name in names}
    fixed = {"output_final_state": wants_ht, "backend": "triton", "chunk_indices": None, "cp_context": None}
    return call.bind({**arguments, **fixed, "kwargs": {}})


def _conv_update(given: Arguments) -> Run | str:
    """One token per sequence."""
    from kernel_fun.cconv import call, dispatch, ops

    arguments: Arguments = {name: given.get(name) for name in CONV_UPDATE.parameters}
    plan = dispatch.plan_update(call.bind_step(arguments).problem(), devices.of(given["x"].device))
    if plan.backend == "fla":
        announce(plan, "causal_conv1d_update")
        return _reason(plan)
    return lambda: ops.causal_conv1d_update(**arguments)


def _on_cpu(function: Callable[..., Any], given: Arguments) -> Run | str:
    """What a layer needs around our operations, where fla has no kernel for it."""
    if given["x"].device.type != "cpu":
        return "fla's own kernel serves GPUs"
    return lambda: function(**given)


DECISIONS: dict[str, tuple[compat.FlaOp, Callable[[Arguments], Run | str]]] = {
    "chunk_kda": (compat.CHUNK_KDA, _kda),
    "fused_recurrent_kda_fwd": (RECURRENT, _recurrent),
    "causal_conv1d_fwd": (CONV_FWD, _conv_fwd),
    "causal_conv1d_bwd": (CONV_BWD, _conv_bwd),
    "causal_conv1d_update": (CONV_UPDATE, _conv_update),
    "layer_norm_gated_fwd": (NORM_FWD, lambda given: _on_cpu(cpu.norm_fwd, given)),
    "layer_norm_gated_bwd": (NORM_BWD, lambda given: _on_cpu(cpu.norm_bwd, given)),
    "swiglu_fwd": (SWIGLU_FWD, lambda given: _on_cpu(cpu.swiglu_fwd, given)),
    "swiglu_fwdbwd": (SWIGLU_BWD, lambda given: _on_cpu(cpu.swiglu_fwdbwd, given)),
}
"""By the name of fla's function: its contract, and what decides about a call."""

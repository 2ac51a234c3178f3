"""causal_conv1d under torch.compile: two custom operators, so that a compiled model has no break around it.

What Dynamo sees is :func:`trace`. At each execution the operators bind, plan, announce and run a call as
outside the compiler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_fun._common import device as devices
from kernel_fun._common.compiler import by_name, owned
from kernel_fun._common.plan import BackendUnavailable, Plan, announce
from kernel_fun.cconv import autograd, dispatch
from kernel_fun.cconv.call import TENSORS, Call, Problem, bind


class Arguments(NamedTuple):
    """What the forward operator takes; of causal_conv1d, with its defaults."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    activation: str | None = None
    output_final_state: bool = False
    needs_grad: bool = False

    def bound(self) -> tuple[Call, Plan]:
        """The validated call and its plan. BackendUnavailable where no backend of ours serves it."""
        named = self._asdict()
        del named["needs_grad"]
        absent = {"backend": "triton", "chunk_indices": None, "cp_context": None, "kwargs": {}}
        call = bind({**named, **absent})
        problem = replace(call.problem(), needs_grad=self.needs_grad)
        plan = dispatch.plan(problem, devices.of(self.x.device))
        if plan.backend == "fla":
            raise BackendUnavailable(
                "this graph was compiled for causal_conv1d of kernel-fun, which now does not serve "
                f"{problem}: {plan.reason}"
            )
        return call, plan


_INPUTS = """
    Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? initial_state, Tensor? cu_seqlens,
    Tensor? cu_seqlens_cpu, str? activation, bool output_final_state, bool needs_grad"""
"""The fields of :class:`Arguments`, in order."""
NUM_TENSORS = Arguments._fields.index("cu_seqlens_cpu") + 1


@torch.library.custom_op("kernel_fun::causal_conv1d", mutates_args=(), schema=f"({_INPUTS}) -> Tensor[]")
def forward(*args: Any) -> list[Tensor]:
    """y, and the final state if asked for."""
    call, plan = Arguments(*args).bound()
    announce(plan, "causal_conv1d")
    with torch.no_grad():
        y, ht = autograd.forward(call, plan)
    return [owned(t) for t in (y.view(args[0].shape), ht) if t is not None]


@forward.register_fake
def _(*args: Any) -> list[Tensor]:
    a = Arguments(*args)
    found = [a.x.new_empty(a.x.shape)]
    if a.output_final_state:
        N = a.x.shape[0] if a.cu_seqlens is None else a.cu_seqlens.shape[0] - 1
        found.append(a.x.new_empty((N, *a.weight.shape)))
    return found


@torch.library.custom_op(
    "kernel_fun::causal_conv1d_backward",
    mutates_args=(),
    schema=f"(Tensor? dy, Tensor? dht, {_INPUTS}) -> Tensor[]",
)
def backward(dy: Tensor | None, dht: Tensor | None, *args: Any) -> list[Tensor]:
    """The gradients of x, weight, bias and initial_state, those that are there."""
    call, plan = Arguments(*args).bound()
    x = call.x
    given = torch.zeros_like(x, memory_format=torch.contiguous_format) if dy is None else dy.reshape(x.shape)
    with torch.no_grad(), autograd.no_autocast(x):
        g = plan.load("bwd")(call, given, dht, True)
    autograd.settle(x)
    found = (g.dx.view(args[0].shape), g.dweight, g.dbias, g.dh0)
    return [owned(t) for t in found if t is not None]


@backward.register_fake
def _(dy: Tensor | None, dht: Tensor | None, *args: Any) -> list[Tensor]:
    a = Arguments(*args)
    there = (t for t in (a.x, a.weight, a.bias, a.initial_state) if t is not None)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in there]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a = Arguments(*inputs)
    ctx.set_materialize_grads(False)
    ctx.rest = a[NUM_TENSORS:]
    ctx.save_for_backward(*a[:NUM_TENSORS])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    a = Arguments(*ctx.saved_tensors, *ctx.rest)
    dy, dht = grads[0], grads[1] if a.output_final_state else None
    found = iter(torch.ops.kernel_fun.causal_conv1d_backward(dy, dht, *a))
    dx, dweight = next(found), next(found)
    dbias = None if a.bias is None else next(found)
    dresidual = None if a.residual is None or dy is None else _residual_gradient(a, dy)
    dh0 = None if a.initial_state is None else next(found)
    return (dx, dweight, dbias, dresidual, dh0, *(None,) * (len(a) - len(TENSORS)))


def _residual_gradient(a: Arguments, dy: Tensor) -> Tensor:
    """dy, with zeros in the rows outside every sequence, where the residual was not added."""
    assert a.residual is not None
    if a.cu_seqlens is not None:
        t = torch.arange(dy.shape[1], device=dy.device)
        inside = (t < a.cu_seqlens[-1]).view(1, -1, *(1,) * (dy.dim() - 2))
        dy = torch.where(inside, dy, 0.0)
    return dy.to(a.residual.dtype)


forward.register_autograd(_backward, setup_context=_setup)

PARAMETERS = dispatch.CAUSAL_CONV1D.parameters


def trace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(True, the results of causal_conv1d), or (False, None) where it has to run outside the graph."""
    given = by_name(PARAMETERS, args, kwargs)
    if given is None or "x" not in given:
        return False, None
    given.pop("chunk_indices", None)
    if given.pop("cp_context", None) is not None or given.pop("backend", "triton") != "triton":
        return False, None
    if given.get("weight") is None or not all(name in Arguments._fields for name in given):
        return False, None
    given["output_final_state"] = bool(given.get("output_final_state", False))
    a = Arguments(**given)
    if a.x.dim() < 3 or a.weight.dim() != 2:
        return False, None
    D, W = int(a.weight.shape[0]), int(a.weight.shape[1])
    if not _ours(a.x.device, a.x.dtype, a.weight.dtype, D, W, a.cu_seqlens is not None):
        return False, None
    leaves = (a.x, a.weight, a.bias, a.residual, a.initial_state)
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves)
    out = torch.ops.kernel_fun.causal_conv1d(*a._replace(needs_grad=grad))
    return True, (out[0], out[1] if a.output_final_state else None)


@torch.compiler.assume_constant_result
def _ours(
    device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype, D: int, W: int, packed: bool
) -> bool:
    """Does a backend of ours serve calls of this kind? B, T and N decide nothing."""
    names = (str(dtype).removeprefix("torch."), str(weight_dtype).removeprefix("torch."))
    problem = Problem(1, 1, D, W, N=1 if packed else None, dtypes=names, needs_grad=True)
    try:
        return dispatch.plan(problem, devices.of(device)).backend != "fla"
    except BackendUnavailable:  # the call says so when it runs, of its own sizes and flags
        return True

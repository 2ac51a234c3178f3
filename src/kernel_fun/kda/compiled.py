"""chunk_kda under torch.compile: two custom operators, so that a compiled model has no break around it.

What Dynamo sees is :func:`trace`. At each execution the operators bind, plan, announce and run a call as
outside the compiler. Shapes of what they return follow from shapes of what they take: where a number of
chunks decides, there are as many rows as any packing could have, the rest zero. Chunk states are not kept for
the backward, whatever ``disable_recompute`` says: the bits are the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_fun._common import compat
from kernel_fun._common import device as devices
from kernel_fun._common.compiler import by_name, owned
from kernel_fun._common.plan import BackendUnavailable, Plan, announce
from kernel_fun.kda import autograd, chain, dispatch
from kernel_fun.kda.call import BT, TENSORS, Call, Problem, bind
from kernel_fun.kda.stages import DECAYS, Intra


class Arguments(NamedTuple):
    """What the forward operator takes; of chunk_kda, with its defaults."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    scale: float | None = None
    lower_bound: float | None = None
    max_num_seqs: int | None = None
    chunk_size: int = BT
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    state_v_first: bool = False
    use_graph: bool = False
    needs_grad: bool = False

    def bound(self) -> tuple[Call, Plan]:
        """The validated call and its plan. BackendUnavailable where no backend of ours serves it."""
        named = self._asdict()
        del named["needs_grad"]
        keywords = {name: named.pop(name) for name in ("A_log", "dt_bias", "chunk_size")}
        absent = {"disable_recompute": False, "return_intermediate_states": False, "cp_context": None}
        call = bind({**named, **absent, "kwargs": keywords})
        problem = replace(call.problem(), needs_grad=self.needs_grad)
        plan = dispatch.plan(problem, devices.of(self.q.device))
        if plan.backend == "fla":
            raise BackendUnavailable(
                "this graph was compiled for chunk_kda of kernel-fun, which now does not serve "
                f"{problem}: {plan.reason}"
            )
        return call, plan

    def wide(self) -> torch.dtype:
        """The dtype of states and norms."""
        double = any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in self)
        return torch.float64 if double else torch.float32

    def rows(self) -> tuple[int, int]:
        """(sequences, chunks of any packing of these tokens)."""
        B, T = self.q.shape[:2]
        if self.cu_seqlens is None:
            return B, B * ((T + BT - 1) // BT)
        N = self.cu_seqlens.shape[0] - 1
        return N, (T + BT - 1) // BT + N


_INPUTS = """
    Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias,
    Tensor? initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, float? scale, float? lower_bound,
    int? max_num_seqs,
    int chunk_size, bool output_final_state, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel,
    bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, bool safe_gate, bool state_v_first,
    bool use_graph, bool needs_grad"""
"""The fields of :class:`Arguments`, in order."""


@torch.library.custom_op("kernel_fun::chunk_kda", mutates_args=(), schema=f"({_INPUTS}) -> Tensor[]")
def forward(*args: Any) -> list[Tensor]:
    """o, the final state if asked for, then what the backward needs: A, Aqk, and q_rstd, k_rstd and total
    where there are such; total flat."""
    a = Arguments(*args)
    call, plan = a.bound()
    announce(plan, "chunk_kda")
    with autograd.undisturbed(call):
        out = chain.forward(call, plan)
    i = out.intra
    total = _padded(a, i.total).view(-1) if _has_total(a) else None
    found = (out.o, out.ht if a.output_final_state else None, i.A, i.Aqk, i.q_rstd, i.k_rstd, total)
    return [owned(t) for t in found if t is not None]


@forward.register_fake
def _(*args: Any) -> list[Tensor]:
    a = Arguments(*args)
    q, v = a.q, a.v
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    N, chunks = a.rows()
    io = torch.promote_types(torch.promote_types(q.dtype, a.k.dtype), v.dtype)
    found = [q.new_empty((B, T, HV, V))]
    if a.output_final_state:
        found.append(q.new_empty((N, HV, V, K) if a.state_v_first else (N, HV, K, V), dtype=a.wide()))
    found += [q.new_empty((B, T, HV, BT), dtype=io), q.new_empty((B, T, HV, BT), dtype=io)]
    if a.use_qk_l2norm_in_kernel:
        found += [q.new_empty((B, T, H), dtype=a.wide()), q.new_empty((B, T, H), dtype=a.wide())]
    if _has_total(a):
        # flat: of a size of 1, a single chunk, torch would make a graph of its own
        found.append(q.new_empty((chunks * HV * DECAYS * K,), dtype=torch.float32))
    return found


def _has_total(a: Arguments) -> bool:
    return a.q.device.type == "cuda"


def _padded(a: Arguments, total: Tensor | None) -> Tensor:
    """total with a row for every chunk there could be; zeros from a backend that has none."""
    rows = a.rows()[1]
    if total is not None and total.shape[0] == rows:
        return total
    whole = a.q.new_zeros((rows, a.v.shape[2], DECAYS * a.q.shape[3]), dtype=torch.float32)
    if total is not None:
        whole[: total.shape[0]] = total
    return whole


@torch.library.custom_op(
    "kernel_fun::chunk_kda_backward",
    mutates_args=(),
    schema=f"(Tensor? do, Tensor? dht, Tensor[] kept, {_INPUTS}) -> Tensor[]",
)
def backward(do: Tensor | None, dht: Tensor | None, kept: list[Tensor], *args: Any) -> list[Tensor]:
    """The gradients of those of TENSORS that are there."""
    a = Arguments(*args)
    call, plan = a.bound()
    rest = kept[2:]
    norms = rest[:2] if call.l2norm else (None, None)
    total = kept[-1].view(-1, a.v.shape[2], DECAYS * a.q.shape[3]) if _has_total(a) else None
    intra = Intra(kept[0], kept[1], norms[0], norms[1], total)
    with autograd.undisturbed(call):
        grads, dh0 = chain.backward(call, plan, intra, do, dht, None, None)
    return [
        torch.zeros_like(t, memory_format=torch.contiguous_format) if grad is None else owned(grad)
        for t, grad in zip(_differentiable(a), (*grads, dh0))
        if t is not None
    ]


@backward.register_fake
def _(do: Tensor | None, dht: Tensor | None, kept: list[Tensor], *args: Any) -> list[Tensor]:
    there = (t for t in _differentiable(Arguments(*args)) if t is not None)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in there]


def _differentiable(a: Arguments) -> tuple[Tensor | None, ...]:
    return tuple(getattr(a, name) for name in TENSORS)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    a = Arguments(*inputs)
    kept = output[2:] if a.output_final_state else output[1:]
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.rest = a[NUM_TENSORS:]
    ctx.save_for_backward(*a[:NUM_TENSORS], *kept)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    a = Arguments(*saved[:NUM_TENSORS], *ctx.rest)
    do, dht = grads[0], grads[1] if a.output_final_state else None
    found = iter(torch.ops.kernel_fun.chunk_kda_backward(do, dht, list(saved[NUM_TENSORS:]), *a))
    gradients = (None if t is None else next(found) for t in _differentiable(a))
    return (*gradients, *(None,) * (len(a) - len(TENSORS)))


NUM_TENSORS = Arguments._fields.index("cu_seqlens_cpu") + 1
forward.register_autograd(_backward, setup_context=_setup)

MANY = 1 << 20
"""B, T and N that decide nothing: they vary from call to call, and each is planned again when it runs."""


def trace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(True, the results of a call of chunk_kda), or (False, None) where it has to run outside the graph."""
    given = by_name(compat.CHUNK_KDA.parameters, args, kwargs)
    if given is None or not all(name in given for name in ("q", "k", "v", "g", "beta")):
        return False, None
    given.pop("disable_recompute", None)
    if given.pop("cp_context", None) is not None or given.pop("return_intermediate_states", False):
        return False, None
    if not all(name in Arguments._fields for name in given):
        return False, None
    if not given.get("use_gate_in_kernel", False):
        given.pop("A_log", None)
        given.pop("dt_bias", None)
    a = Arguments(**given)
    if a.q.dim() != 4 or a.v.dim() != 4:
        return False, None
    sizes = (int(a.q.shape[2]), int(a.v.shape[2]), int(a.q.shape[3]), int(a.v.shape[3]))
    dtypes = (a.q.dtype, a.k.dtype, a.v.dtype, a.g.dtype, a.beta.dtype)
    if not _ours(a.q.device, dtypes, sizes, a.cu_seqlens is not None):
        return False, None
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in _differentiable(a))
    out = torch.ops.kernel_fun.chunk_kda(*a._replace(needs_grad=grad))
    return True, (out[0], out[1] if a.output_final_state else None)


@torch.compiler.assume_constant_result
def _ours(
    device: torch.device, dtypes: tuple[torch.dtype, ...], sizes: tuple[int, int, int, int], packed: bool
) -> bool:
    """Does a backend of ours serve calls of this kind?"""
    B, T, N = (1, MANY, MANY) if packed else (MANY, 1, None)
    names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
    problem = Problem(B, T, *sizes, N=N, dtypes=names, needs_grad=True)  # pyright: ignore[reportArgumentType]
    try:
        return dispatch.plan(problem, devices.of(device)).backend != "fla"
    except BackendUnavailable:  # the call says so when it runs, of its own sizes and flags
        return True

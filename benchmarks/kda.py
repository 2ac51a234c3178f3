"""Kimi Delta Attention as it is benchmarked: inputs, candidates, oracle and floors.

All in-kernel flags are on, as the KDA layer calls the op: q/k normalisation, gate and beta sigmoid
belong to the work. A candidate that lacks one does it in torch, inside the timed call.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_fun import testing
from kernel_fun._common import config, support
from kernel_fun._common.plan import BACKENDS
from kernel_fun.bench import machine
from kernel_fun.bench.suite import Candidate, Case, Outputs, Work
from kernel_fun.kda import chunk_kda, reference

from .shapes import DEFAULT, SHAPES, Shape

NAME = "kda"
PASSES = ("fwd", "fwdbwd")
GATES = ("softplus_random", "init_slow", "bounded")
__all__ = ["DEFAULT", "GATES", "NAME", "PASSES", "SHAPES"]

BT = 64

PEERS = ("fla", "transformers")
TENSORS = ("o", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias")

#: Relative error above which a peer is not timed. bf16 and fp16: what fla holds itself to. fp32: far
#: above rounding and far below a mistake, since a peer may sum in another order than we do.
_PEER = {"o": 5e-3, "dq": 8e-3, "dk": 8e-3, "dv": 8e-3}
_PEER_SUMS = 2e-2
_PEER_A_LOG = 1e-1
"""dA_log is one number a head, and only two heads are compared: where its terms cancel, so do the digits."""
_PEER_FP32 = 1e-3


def case(shape: Shape, gate: str, dtype: torch.dtype, device: torch.device) -> Case:
    """Seeded inputs, drawn on the device; packed shapes carry cu_seqlens on both sides."""
    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    def log_uniform(low: float, high: float, *size: int) -> Tensor:
        unit = torch.rand(*size, generator=generator, device=device)
        return (math.log(low) + unit * math.log(high / low)).exp()

    arguments: dict[str, Any] = {
        "q": normal(B, T, H, K).to(dtype),
        "k": normal(B, T, H, K).to(dtype),
        "v": normal(B, T, HV, V).to(dtype),
        "g": normal(B, T, HV, K).to(dtype),
        "beta": normal(B, T, HV).to(dtype),
        # A itself is uniform in [1, 16], as fla's layer draws it
        "A_log": (1 + 15 * torch.rand(HV, generator=generator, device=device)).log(),
        "dt_bias": torch.zeros(HV * K, device=device),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    if gate == "init_slow":
        dt = log_uniform(1e-3, 1e-1, HV * K)
        arguments["dt_bias"] = dt + (-torch.expm1(-dt)).log()  # inverse of softplus
    elif gate == "bounded":
        arguments.update(safe_gate=True, lower_bound=-5.0)
    elif gate != "softplus_random":
        raise ValueError(f"`gate` must be one of {', '.join(GATES)}, got {gate!r}")
    if shape.lengths is not None:
        bounds = torch.tensor([0, *shape.lengths]).cumsum(0)
        arguments.update(cu_seqlens=bounds.to(device), cu_seqlens_cpu=bounds)
    return Case(
        shape,
        gate,
        arguments,
        {"do": normal(B, T, HV, V).to(dtype)},
        limits={n: testing.TOLERANCE[NAME, n, dtype].relative for n in TENSORS},
        peer_limits=dict.fromkeys(PEERS, _peer_limits(dtype)),
    )


def _peer_limits(dtype: torch.dtype) -> dict[str, float]:
    if dtype == torch.float32:
        return dict.fromkeys(TENSORS, _PEER_FP32)
    return {n: _PEER.get(n, _PEER_SUMS) for n in TENSORS} | {"dA_log": _PEER_A_LOG}


def candidates(device: torch.device) -> list[Candidate]:
    """Our backends, then fla, then the chunk function of transformers."""
    found = [d for d in machine.devices() if d["device"].startswith(device.type)]
    ours = [Candidate(name, machine.unavailable(name, found)) for name in BACKENDS]
    return [*ours, Candidate("transformers", _transformers_missing())]


def caller(candidate: str, case: Case, what: str) -> Callable[[], Outputs]:
    """One pass of one candidate on the tensors of the case."""
    call_of, context = function(candidate)
    inputs = dict(case.arguments)
    do = case.upstream["do"] if what == "fwdbwd" else None

    def call() -> Outputs:
        with context(), torch.set_grad_enabled(do is not None):
            return testing.run(call_of, inputs, do=do)

    return call


@contextlib.contextmanager
def step(candidate: str, case: Case, what: str) -> Generator[Callable[[], object]]:
    """One pass of one candidate and nothing else: a backward is asked for the gradients of all inputs."""
    of, context = function(candidate)
    grad = what == "fwdbwd"
    leaves = {
        name: x.detach().requires_grad_(grad)
        for name, x in case.arguments.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    arguments, wanted = {**case.arguments, **leaves}, tuple(leaves.values())

    def forward() -> object:
        return of(**arguments)

    def both() -> object:
        return torch.autograd.grad(of(**arguments)[0], wanted, case.upstream["do"], allow_unused=True)

    with context(), torch.set_grad_enabled(grad):
        yield both if grad else forward


def function(
    candidate: str,
) -> tuple[Callable[..., Any], Callable[[], contextlib.AbstractContextManager[None]]]:
    """The function a candidate calls and the context it is called in."""
    if candidate == "transformers":
        return transformers_kda, contextlib.nullcontext
    if candidate == "fla":
        import fla.ops.kda as ops  # pyright: ignore

        return ops.chunk_kda, contextlib.nullcontext  # pyright: ignore
    return chunk_kda, lambda: config.KDA_BACKEND.set(candidate)


def transformers_kda(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None = None, cu_seqlens: Tensor | None = None, **flags: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The chunk function of transformers with gate and beta activated in torch before it.

    It takes no packed sequences, so they are called one after another.
    """
    function = _transformers()
    HV, K = g.shape[2:]
    x = g.float() + dt_bias.view(HV, K)
    rate = A_log.exp()[:, None]
    gate = -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    q, k = (t.repeat_interleave(HV // q.shape[2], 2) for t in (q, k))
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    parts = [
        function(
            *(t[:, first:last] for t in (q, k, v, gate, beta.sigmoid())),
            use_qk_l2norm_in_kernel=flags["use_qk_l2norm_in_kernel"],
        )[0]
        for first, last in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0], None


_KIMI = "transformers.models.kimi_linear.modeling_kimi_linear"


def _transformers_missing() -> str | None:
    """Why transformers' chunk function is not there, or None; its module is found, not loaded."""
    try:
        found = support.module_found("transformers") and importlib.util.find_spec(_KIMI) is not None
    except ImportError:
        found = False
    return None if found else "transformers with models.kimi_linear is not installed"


def _transformers() -> Callable[..., Any]:
    """transformers' own chunk function in torch.

    Its module replaces the function by fla's where fla is installed; the original is unwrapped.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about packages it looks for
        module: Any = importlib.import_module(_KIMI)
    function = getattr(module, "chunk_kimi_delta_attention", None)
    if function is None:
        raise NotImplementedError("this transformers has no chunk_kimi_delta_attention")
    return inspect.unwrap(function)


def errors(case: Case, what: str, found: Mapping[str, Outputs]) -> dict[str, dict[str, float]]:
    """Relative error of every tensor of every candidate against the operation in float64.

    The truth is the recurrence, and on a GPU, where its tokens would take minutes, the eager backend in
    float64, which the tests hold to the recurrence within 1e-12. Heads are independent, so the first and the
    last query/key head (with their value heads) stand for all where all would take long; the whole sequence
    and the whole batch are always compared.
    """
    shape: Any = case.shape
    few = shape.token_heads > 8192
    heads = sorted({0, shape.H - 1}) if few else list(range(shape.H))
    value_heads = [h * (shape.HV // shape.H) + i for h in heads for i in range(shape.HV // shape.H)]

    def slice_of(name: str, x: Tensor) -> Tensor:
        name = name.removeprefix("d") if name not in ("do", "dt_bias") else name
        if name in ("q", "k"):
            return x[:, :, heads]
        if name == "A_log":
            return x[value_heads]
        if name == "dt_bias":
            return x.view(shape.HV, shape.K)[value_heads].flatten()
        return x[:, :, value_heads]

    tensors = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    inputs = {n: slice_of(n, x) if n in tensors else x for n, x in case.arguments.items()}
    do = slice_of("do", case.upstream["do"]) if what == "fwdbwd" else None
    oracle = _eager if case.arguments["q"].is_cuda else _recurrent_by_segments
    truth = testing.run(oracle, inputs, do=do, double=True)
    return {
        name: {n: testing.relative_error(truth[n], slice_of(n, x)) for n, x in outputs.items()}
        for name, outputs in found.items()
    }


def _eager(**arguments: Any) -> tuple[Tensor, None]:
    with config.KDA_BACKEND.set("eager"):
        return chunk_kda(**arguments)


def _recurrent_by_segments(*, cu_seqlens: Tensor | None = None, **arguments: Any) -> tuple[Tensor, None]:
    """The float64 recurrence, recomputed in the backward segment by segment to bound its memory."""
    from torch.utils.checkpoint import checkpoint

    names = ("q", "k", "v", "g", "beta")
    T = arguments["q"].shape[1]
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    flags = {n: x for n, x in arguments.items() if n not in names and n != "cu_seqlens_cpu"}
    outputs: list[Tensor] = []
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        S = None
        for i in range(first, last, 128):
            part = [arguments[n][:, i : min(i + 128, last)] for n in names]
            o, S = checkpoint(_segment, flags, S, *part, use_reentrant=False)  # pyright: ignore
            outputs.append(o)
    return torch.cat(outputs, 1), None


def _segment(flags: dict[str, Any], S: Tensor | None, *part: Tensor) -> Any:
    return reference.recurrent(*part, initial_state=S, output_final_state=True, **flags)


def work(shape: Shape, what: str, dtype: torch.dtype) -> Work:
    """Floors of one pass.

    FLOPs: the matrix products of the chunk form in dense 64-row tiles, with what the forward saves
    (A, Aqk) and what it could save (chunk states, new values) not computed again. Bytes: every
    input read once, every output written once, and in the backward every input read once more.
    """
    K, V, n = shape.K, shape.V, shape.token_heads
    flops = 2 * (BT * (3 * K + 2 * V) + BT**2 + 3 * K * V)
    e = dtype.itemsize
    q_and_k = 2 * K * shape.H / shape.HV
    inputs = e * (q_and_k + V + K + 1)
    size = inputs + e * V
    if what == "fwdbwd":
        flops += 2 * (BT * (7 * K + 4 * V) + 2 * BT**2 + 6 * K * V)
        size += inputs + e * V + inputs
    return Work(flops * n, size * n)

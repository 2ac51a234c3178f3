"""Making kernels ready before they are needed: on this device, or ahead of time for another.

:func:`warmup` runs what a model will call and says of each kernel how long it took; :func:`build` compiles
the same kernels for a GPU that is not here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from kernel_fun.cconv.call import Problem as Convolution
    from kernel_fun.kda.call import Problem

__all__ = ["Warmed", "build", "problems_of", "warmup"]


@dataclass(frozen=True)
class Warmed:
    """One thing that is ready now."""

    what: str
    """A kernel and its config, or an operation and its problem."""
    how: str
    """Of a kernel ``compiled``, ``from the cache`` or ``prebuilt``; of an operation the backend that ran."""
    seconds: float
    kernel: bool = True

    def __str__(self) -> str:
        return f"{self.seconds:8.2f} s  {self.how:14}  {self.what}"


def warmup(
    target: nn.Module | Problem | Convolution | Iterable[Problem | Convolution],
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> list[Warmed]:
    """Run every problem once, forward and backward, so that the first training step meets no compiler.

    Args:
        target: A model with KDA layers of fla or transformers (see :func:`problems_of`), or problems, the
            facts of a call without its tensors: ``kernel_fun.kda.call.Problem`` and
            ``kernel_fun.cconv.call.Problem``. Kernels depend on head sizes, dtypes and flags; B, T and N may
            be anything.
        device: Where the model will run; default where it is, and of problems ``cuda``.
        dtype: Of activations, for a model; default that of its projections.

    Returns:
        One entry for each kernel that was made ready, and one for each problem, with its time, in order.

    Raises:
        RuntimeError: the device is absent; a problem is not served by a GPU backend of ours on a GPU; a
            problem gives a value that is not finite; or a kernel stayed cold: running the problems again
            made another kernel ready.
        ValueError: there is nothing to warm, or a problem has a word that no call has.
        TypeError: ``dtype`` is no floating-point dtype, a problem's ``lower_bound`` no number, or the target
            neither a model nor problems.

    Training with dense and with packed sequences, bfloat16, the gate, beta and norms in the kernel::

        from kernel_fun.kda.call import Problem

        dense = Problem(
            B=1, T=1, H=16, HV=16, K=128, V=128,
            gate="softplus", beta_mode="sigmoid", l2norm=True, needs_grad=True,
        )
        kernel_fun.warmup([dense, replace(dense, N=2)])
    """
    import torch

    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"`dtype` must be a floating-point torch.dtype, got {dtype!r}")
    model = target if isinstance(target, torch.nn.Module) else None
    problems = _distinct(problems_of(model, dtype=dtype) if model is not None else target)
    if device is None:
        device = "cuda" if model is None else next(p.device for p in model.parameters())
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"kernel-fun warmup: nothing warmed, {where} was asked for and torch sees no CUDA device "
            "(device='cpu' warms a CPU)"
        )
    report: list[Warmed] = []
    with torch.inference_mode(False), torch.enable_grad():  # whatever mode a server is set up in
        for problem in problems:
            report += _warm(problem, where)
        for problem in problems:
            cold = [entry for entry in _warm(problem, where) if entry.kernel]
            if cold:
                raise RuntimeError(
                    f"kernel-fun warmup: {cold[0].what} stayed cold: {problem} compiles it at each run"
                )
    return report


def build(
    problems: Problem | Iterable[Problem],
    arch: str,
    out: Path,
    *,
    exactly: bool = False,
    on_kernel: Callable[[Warmed], None] | None = None,
) -> list[Warmed]:
    """Compile the CuTe kernels of problems for an architecture into a directory, without a GPU.

    A kernel is in the directory once it is built: a run that was stopped is taken up by the next.

    Args:
        problems: Of chunk_kda; B, T and N may be anything.
        arch: ``sm_90a``.
        out: Directory that ``KERNEL_FUN_KERNELS`` will name.
        exactly: Only what problems of this B, or N, need; else of any.
        on_kernel: Told of each kernel when it is built.

    Returns:
        One entry a kernel, with the time it took.

    Raises:
        ValueError: the architecture has no CuTe kernels here, or there is no problem.
        BackendUnavailable: its kernels do not serve a problem, or the compiler is missing; the message says
            why.
        ObjectsRefused: (a RuntimeError) the directory is not fit, or there is no linker; likewise.
    """
    from kernel_fun._common import support
    from kernel_fun._common.plan import BackendUnavailable

    if arch not in ARCHS:
        hint = "".join(f": the compiler's name of it is {a}" for a, ours in ARCHS.items() if ours == arch)
        raise ValueError(f"`arch` must be one of {', '.join(ARCHS)}, got {arch!r}{hint}")
    if (absent := support.missing("cute")) is not None:
        raise BackendUnavailable(absent)
    from kernel_fun._cute import objects

    wanted = kernels(_distinct(problems), ARCHS[arch], exactly=exactly)
    objects.prepare(out)
    report: list[Warmed] = []
    for jit, kernel_config in wanted:
        begin = time.perf_counter()
        how = "from the cache" if _is_cached(jit.digest(kernel_config)) else "compiled"
        objects.write(out, [(jit, kernel_config)], arch)
        what = f"{jit.module.rpartition('.')[2]} {kernel_config}"
        report.append(Warmed(what, how, time.perf_counter() - begin))
        if on_kernel is not None:
            on_kernel(report[-1])
    return report


def _is_cached(digest: str) -> bool:
    from kernel_fun._common import cache

    try:
        return cache.load(digest) is not None
    except cache.CacheRefused:
        return False


def kernels(
    problems: Iterable[Problem], backend: str, *, exactly: bool, of_length: bool = False
) -> list[tuple[Any, Any]]:
    """What problems launch on a backend, found by following them without a GPU: kernels and their configs.

    Args:
        exactly: Only what problems of this B, or N, need; else of any.
        of_length: And of this T; else of any.

    Raises:
        BackendUnavailable: the backend does not serve a problem; the message says why.
    """
    import torch

    from kernel_fun._common import config, device
    from kernel_fun._common.plan import BackendUnavailable
    from kernel_fun._cute import objects
    from kernel_fun.kda import exercise

    seen: dict[tuple[str, str], tuple[Any, Any]] = {}
    for problem in problems:
        with config.KDA_BACKEND.set(backend), device.pretend(backend), objects.rehearsal(seen):
            here = torch.device("cpu")
            try:
                if of_length and exercise.run_cut(problem, here) is not None:
                    continue
                own = problem.B if problem.N is None else problem.N
                sequences = [own] if exactly else exercise.batches(problem)
                tokens = exercise.tokens_like(problem, own) if of_length else None
                exercise.run(problem, here, sequences, long=not of_length, tokens=tokens)
            except BackendUnavailable as refusal:  # of a problem of other sizes, by the switch held here
                why = refusal.reason or refusal
                raise BackendUnavailable(f"no {backend} kernels for {problem}: {why}") from refusal
    return list(seen.values())


ARCHS = {"sm_90a": "sm90"}
"""Targets of the compiler, and the backends whose kernels are for them."""


def problems_of(model: nn.Module, *, dtype: torch.dtype | None = None) -> list[Problem | Convolution]:
    """What the KDA layers of a model will call, in training and, with a cache, in prefill.

    Reads fla's ``KimiDeltaAttention``, transformers' KimiLinear and GLM-5.3-Flash layers (patched or not) and
    the demo's. ValueError where the model has none of them.
    """
    found: list[Problem | Convolution] = []
    for module in model.modules():
        describe = LAYERS.get(type(module).__name__)
        if describe is not None:
            found += describe(module, dtype)
    if not found:
        raise ValueError(
            f"`model` must have KDA layers ({', '.join(LAYERS)}), got {type(model).__name__} without any"
        )
    return found


def _warm(problem: Any, device: torch.device) -> list[Warmed]:
    """Run a problem; what was made ready, then the problem itself."""
    import torch

    from kernel_fun._cute import objects
    from kernel_fun.cconv import call as conv
    from kernel_fun.kda import exercise

    before = len(objects.ready())
    begin = time.perf_counter()
    if isinstance(problem, conv.Problem):
        backend, name = _warm_convolution(problem, device), "causal_conv1d"
    else:
        from kernel_fun._common import device as devices
        from kernel_fun.kda import dispatch

        plan = dispatch.plan(problem, devices.of(device))
        _require_gpu("chunk_kda", plan, device)
        ours = plan.backend == "sm90"
        o = exercise.run(problem, device, exercise.batches(problem) if ours else [1], long=ours)
        if not bool(torch.isfinite(o).all()):
            raise RuntimeError(f"kernel-fun warmup: chunk_kda gave a value that is not finite for {problem}")
        backend, name = plan.backend, "chunk_kda"
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    kernels = [Warmed(f"{k.name} {k.config}", k.how, k.seconds) for k in objects.ready()[before:]]
    return [*kernels, Warmed(f"{name} {problem}", backend, seconds, kernel=False)]


def _warm_convolution(problem: Convolution, device: torch.device) -> str:
    import torch

    from kernel_fun._common import device as devices
    from kernel_fun.cconv import dispatch, ops

    plan = dispatch.plan(problem, devices.of(device))
    _require_gpu("causal_conv1d", plan, device)
    ops.warmup(
        D=problem.D,
        W=problem.W,
        dtype=getattr(torch, problem.dtypes[0]),
        weight_dtype=getattr(torch, problem.dtypes[1]),
        bias=problem.has_bias,
        activation=problem.activation,
        packed=problem.N is not None,
        device=device,
    )
    return plan.backend


def _require_gpu(name: str, plan: Any, device: torch.device) -> None:
    if device.type == "cuda" and plan.reason is not None:
        raise RuntimeError(f"kernel-fun warmup: {name} stays cold, {plan.problem} is not ours: {plan.reason}")


def _distinct(target: Any) -> list[Any]:
    """One problem of each kind, in order."""
    from kernel_fun.cconv.call import Problem as Convolution
    from kernel_fun.kda.call import Problem

    problems = [target] if isinstance(target, (Problem, Convolution)) else target
    if isinstance(problems, str) or not isinstance(problems, Iterable):
        raise TypeError(f"`target` must be a model or problems, got {type(target).__name__}")
    kinds: dict[Any, Any] = {}
    for problem in problems:
        if not isinstance(problem, (Problem, Convolution)):
            raise TypeError(f"`target` must hold problems, got {type(problem).__name__}")
        _check_words(problem)
        kinds.setdefault(problem.kind, problem)
    if not kinds:
        raise ValueError("`target` must hold at least one problem, got none")
    return list(kinds.values())


FLOATS = ("bfloat16", "float16", "float32", "float64")


def _check_words(problem: Any) -> None:
    """ValueError for a word that no call has: what a user spelt wrong would be warmed as something else."""
    from kernel_fun.cconv.call import ACTIVATIONS
    from kernel_fun.kda.call import BETA_MODES, GATES, check_bound

    words_of = {"gate": GATES, "beta_mode": BETA_MODES, "activation": ACTIVATIONS}
    said = [
        (name, getattr(problem, name), words) for name, words in words_of.items() if hasattr(problem, name)
    ]
    for name, given, words in (*said, *(("dtypes", d, FLOATS) for d in problem.dtypes)):
        if given not in words:
            allowed = ", ".join(map(str, words))
            raise ValueError(f"`target` must hold problems whose `{name}` is one of {allowed}, got {given!r}")
    if hasattr(problem, "lower_bound"):
        check_bound("lower_bound", problem.lower_bound, problem.gate)


def calls(
    *,
    H: int,
    HV: int,
    K: int,
    V: int,
    D: Sequence[int],
    W: int,
    io: torch.dtype,
    conv_dtype: torch.dtype,
    forms: dict[str, Any],
    conv_bias: bool = False,
    padded: bool = True,
) -> list[Problem | Convolution]:
    """The calls of one layer: training and prefill into a cache, dense and (``padded``) packed.

    ``forms``: fields of Problem in which the layer differs from a softplus gate and a sigmoid beta.
    """
    from kernel_fun.cconv.call import Problem as Convolution
    from kernel_fun.kda.call import Problem

    name = str(io).removeprefix("torch.")
    common: dict[str, Any] = {
        "dtypes": (name,) * 5,
        "gate": "softplus",
        "beta_mode": "sigmoid",
        "l2norm": True,
        **forms,
    }
    packings = (None, 2) if padded else (None,)
    found: list[Problem | Convolution] = []
    for N in packings:
        found.append(Problem(1, 1, H, HV, K, V, N=N, needs_grad=True, **common))
        found.append(Problem(1, 1, H, HV, K, V, N=N, wants_ht=True, **common))
        weight = str(conv_dtype).removeprefix("torch.")
        found += [
            Convolution(
                1, 1, d, W, N=N, dtypes=(name, weight), activation="silu", has_bias=conv_bias, needs_grad=True
            )
            for d in dict.fromkeys(D)
        ]
    found.append(Problem(1, 1, H, HV, K, V, has_h0=True, wants_ht=True, **common))
    return found


def _fla(m: Any, dtype: torch.dtype | None) -> list[Problem | Convolution]:
    if hasattr(m, "qkv_proj"):
        return _demo(m, dtype)
    short = m.use_short_conv
    return calls(
        H=m.num_heads, HV=m.num_v_heads, K=m.head_k_dim, V=m.head_v_dim,
        D=(m.key_dim, m.value_dim) if short else (), W=m.conv_size,
        io=dtype or m.q_proj.weight.dtype,
        conv_dtype=m.q_conv1d.weight.dtype if short else m.q_proj.weight.dtype,
        forms={
            "gate": "softplus" if m.lower_bound is None else "bounded",
            "lower_bound": m.lower_bound,
            "beta_mode": "sigmoid2" if m.allow_neg_eigval else "sigmoid",
            "state_v_first": True,
        },
        conv_bias=m.conv_bias,
    )  # fmt: skip


def _transformers(m: Any, dtype: torch.dtype | None) -> list[Problem | Convolution]:
    bound = getattr(m.forget_gate, "safe_gate_lower_bound", None)
    return calls(
        H=m.num_heads, HV=m.num_heads, K=m.head_dim, V=m.head_dim, D=(m.conv_dim,), W=m.conv_kernel_size,
        io=dtype or m.q_proj.weight.dtype, conv_dtype=m.conv1d.weight.dtype,
        forms={"gate": "softplus" if bound is None else "bounded", "lower_bound": bound},
        conv_bias=m.conv1d.bias is not None,
    )  # fmt: skip


def _demo(m: Any, dtype: torch.dtype | None) -> list[Problem | Convolution]:
    c = m.config
    return calls(
        H=c.H, HV=c.HV, K=c.K, V=c.V, D=(m.conv_weight.shape[0],), W=c.conv_taps,
        io=dtype or m.qkv_proj.weight.dtype, conv_dtype=m.conv_weight.dtype,
        forms={}, padded=False,
    )  # fmt: skip


LAYERS = {
    "KimiDeltaAttention": _fla,
    "KimiLinearDeltaAttention": _transformers,
    "Glm5NextTextLinearAttention": _transformers,
}
"""How to read the calls of a layer, by the name of its class."""

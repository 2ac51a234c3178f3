"""Tools to hold a backend to its oracle: inputs, gradients, errors, tolerances, poisoned memory.

    from kernel_fun import testing
    from kernel_fun.kda import chunk_kda, reference

    x = testing.make_inputs("bounded", T=100, dtype=torch.bfloat16, initial_state=True)
    up = testing.make_upstream(x)
    ref = testing.run(reference.recurrent, x, **up, double=True)
    out = testing.run(chunk_kda, x, **up)
    for name in ref:
        testing.assert_close(name, ref[name], out[name], dtype=torch.bfloat16)

Importing this module imports torch; ``import kernel_fun`` does not import it.
"""

# sizes: one method draws every input of a case, in the order of its random numbers
from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

__all__ = [
    "REGIMES",
    "TOLERANCE",
    "Case",
    "Tolerance",
    "assert_close",
    "make_inputs",
    "make_upstream",
    "max_error",
    "poisoned_empty",
    "relative_error",
    "run",
]


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def relative_error(ref: Tensor, out: Tensor) -> float:
    """Frobenius norm of ``out - ref`` over that of ``ref``, in float64; 0 if they are equal."""
    ref, out = ref.detach().double(), out.detach().double().to(ref.device)
    error, size = _norm(out - ref), _norm(ref)
    return 0.0 if error == 0.0 else error / size if size > 0.0 else math.inf


def max_error(ref: Tensor, out: Tensor) -> float:
    """Largest absolute difference, in float64; 0 if empty."""
    if ref.numel() == 0:
        return 0.0
    return (out.detach().double().to(ref.device) - ref.detach().double()).abs().max().item()


class Tolerance(NamedTuple):
    """Close means: relative error at most ``relative``, or max error at most ``absolute``."""

    relative: float
    absolute: float
    why: str


def _kda_tolerances() -> Iterator[tuple[tuple[str, str, torch.dtype], Tolerance]]:
    state = ("o", "ht", "h")
    direct = ("dq", "dk", "dv", "dh0")
    summed = ("dg", "dbeta", "dA_log", "ddt_bias")
    for name in (*state, *direct, *summed):
        yield (
            ("kda", name, torch.float64),
            Tolerance(1e-12, 1e-14, "float64 rounding of a few thousand terms, the oracle's own included"),
        )
        yield (
            ("kda", name, torch.float32),
            Tolerance(
                1e-5,
                1e-7,
                "float32 arithmetic throughout; roundoff 6e-8 times the condition of a chunk",
            ),
        )
    for dtype, part in ((torch.bfloat16, 1.0), (torch.float16, 0.5)):
        half = (
            ""
            if part == 1.0
            else "half of bfloat16's: the roundoff is an eighth, the accumulation is the same"
        )
        for name in state:
            why = half or "what fla holds o and the final state to; one rounding of o alone costs 1.7e-3"
            yield ("kda", name, dtype), Tolerance(part * 5e-3, 1e-6, why)
        for name in direct:
            why = half or "what fla holds dq, dk, dv and dh0 to; operands and results are rounded"
            yield ("kda", name, dtype), Tolerance(part * 8e-3, 1e-6, why)
        for name in summed:
            why = half or "sums of terms of either sign; half of what fla allows dg and dbeta"
            yield ("kda", name, dtype), Tolerance(part * 1e-2, 1e-6, why)


TOLERANCE: Mapping[tuple[str, str, torch.dtype], Tolerance] = MappingProxyType(dict(_kda_tolerances()))
"""(family, output, dtype of the call) -> Tolerance. Outputs are named as by :func:`run`."""


def assert_close(
    name: str,
    ref: Tensor,
    out: Tensor,
    *,
    family: str = "kda",
    dtype: torch.dtype | None = None,
    tolerance: Tolerance | None = None,
) -> None:
    """Assert that ``out`` has the shape of ``ref``, holds no NaN, and is within tolerance of it.

    Args:
        name: what is compared, a row of the table: ``"o"``, ``"dq"``, ...
        ref: the oracle's value, any float dtype.
        out: the value under test, same shape.
        dtype: the input dtype of the call under test (its q), default ``out.dtype``.
        tolerance: instead of the table's.

    Raises:
        AssertionError: with name, errors, limits and the worst index.
        ValueError: ``ref`` itself is not finite, so it proves nothing.
        KeyError: the table has no such row.
    """
    limit = tolerance or TOLERANCE[family, name, dtype or out.dtype]
    if not ref.isfinite().all():
        raise ValueError(f"{name}: the reference is not finite")
    if ref.shape != out.shape:
        raise AssertionError(f"{name}: shape must be {list(ref.shape)}, got {list(out.shape)}")
    if not out.isfinite().all():
        bad = (~out.isfinite()).nonzero()
        raise AssertionError(
            f"{name}: {len(bad)} of {out.numel()} values are not finite, first at {bad[0].tolist()}"
        )
    relative, absolute = relative_error(ref, out), max_error(ref, out)
    if relative > limit.relative and absolute > limit.absolute:
        flat = (out.detach().double().to(ref.device) - ref.detach().double()).abs().argmax()
        worst = [int(i) for i in torch.unravel_index(flat, ref.shape)]
        raise AssertionError(
            f"{name}: relative error {relative:.3e} > {limit.relative:.1e} and max error "
            f"{absolute:.3e} > {limit.absolute:.1e} (worst at {worst}: "
            f"expected {ref[tuple(worst)].item():.6e}, got {out[tuple(worst)].item():.6e}). "
            f"Limit: {limit.why}"
        )


REGIMES = ("softplus_random", "init_slow", "bounded", "precomputed", "spikes")


@dataclass(frozen=True)
class Case:
    """One KDA problem; the fields are the arguments of :func:`make_inputs`.

    Attributes:
        regime: where the decays come from.
            ``softplus_random`` raw gates and dt_bias ~ N(0, 1), A in [1, 16]: strong decay.
            ``init_slow`` a layer at initialisation: small raw gates, softplus(dt_bias) log-uniform
            in [1e-3, 0.1].
            ``bounded`` lower_bound -5, raw gates ~ 3 N(0, 1): both ends of the sigmoid saturate.
            ``precomputed`` log sigmoid of N(0, 1), given.
            ``spikes`` the same with log gates of -1000 and -inf: whole tokens, single channels.
        seqlens: lengths of packed sequences (B is then 1, T their sum plus ``tail``). None: dense.
        tail: rows after the last packed sequence.
        dtype: of q, k and v.
        g_dtype, beta_dtype: default ``dtype``.
        param_dtype: of A_log and dt_bias; default float32, or float64 if ``dtype`` is.
        l2norm: normalise q and k in the op; otherwise they are given normalised.
        beta: ``"raw"`` (given, in (0, 1)), or logits activated in the op: ``"sigmoid"``,
            ``"sigmoid2"``.
        A_log, dt_bias: pass them to an in-kernel gate. Without A_log the gate must be bounded.
        initial_state: pass one, float32 unless ``dtype`` is float64.
    """

    regime: str = "precomputed"
    B: int = 1
    T: int = 64
    H: int = 2
    HV: int | None = None
    K: int = 16
    V: int | None = None
    dtype: torch.dtype = torch.float32
    g_dtype: torch.dtype | None = None
    beta_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None
    seqlens: Sequence[int] | None = None
    tail: int = 0
    l2norm: bool = True
    beta: str = "sigmoid"
    A_log: bool = True
    dt_bias: bool = True
    scale: float | None = None
    initial_state: bool = False
    output_final_state: bool = False
    state_v_first: bool = False
    seed: int = 0
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        if self.regime not in REGIMES:
            raise ValueError(f"`regime` must be one of {REGIMES}, got {self.regime!r}")
        if self.beta not in ("raw", "sigmoid", "sigmoid2"):
            raise ValueError(f"`beta` must be 'raw', 'sigmoid' or 'sigmoid2', got {self.beta!r}")
        if self.regime in ("softplus_random", "init_slow") and not self.A_log:
            raise ValueError("`A_log` must be True with a softplus gate, got False")
        if self.seqlens is not None and self.B != 1:
            raise ValueError(f"`B` must be 1 with `seqlens`, got {self.B}")

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of one call, drawn on the CPU in float64, then cast and moved."""
        generator = torch.Generator().manual_seed(self.seed)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        B, H, K = self.B, self.H, self.K
        HV, V = self.HV or H, self.V or K
        N = B if self.seqlens is None else len(self.seqlens)
        T = self.T if self.seqlens is None else sum(self.seqlens) + self.tail

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

        def put(x: Tensor, dtype: torch.dtype) -> Tensor:
            return x.to(self.device, dtype)

        q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
        if not self.l2norm:
            q, k = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (q, k))
        beta = normal(B, T, HV)
        if self.beta == "raw":
            beta = beta.sigmoid()
        raw = normal(B, T, HV, K)
        A_log, dt_bias = uniform(1.0, 16.0, HV).log(), normal(HV * K)
        lower_bound = None
        if self.regime == "softplus_random":
            g = raw
        elif self.regime == "init_slow":
            g = 0.1 * raw
            dt = uniform(math.log(1e-3), math.log(0.1), HV * K).exp()
            dt_bias = dt + torch.log(-torch.expm1(-dt))  # inverse of softplus
        elif self.regime == "bounded":
            g, A_log, lower_bound = 3.0 * raw, 0.3 * normal(HV), -5.0
        else:
            g = torch.nn.functional.logsigmoid(raw)
            if self.regime == "spikes":
                for channels in (1, K):  # whole tokens, then single channels
                    die = uniform(0.0, 1.0, B, T, HV, channels)
                    g = torch.where(die < 0.08, torch.where(die < 0.04, -1000.0, -math.inf), g)

        x: dict[str, Any] = {
            "q": put(q, self.dtype),
            "k": put(k, self.dtype),
            "v": put(v, self.dtype),
            "g": put(g, self.g_dtype or self.dtype),
            "beta": put(beta, self.beta_dtype or self.dtype),
            "scale": self.scale,
            "output_final_state": self.output_final_state,
            "use_qk_l2norm_in_kernel": self.l2norm,
            "use_beta_sigmoid_in_kernel": self.beta != "raw",
            "allow_neg_eigval": self.beta == "sigmoid2",
            "state_v_first": self.state_v_first,
        }
        if self.regime in ("softplus_random", "init_slow", "bounded"):
            x.update(use_gate_in_kernel=True, lower_bound=lower_bound)
            if self.A_log:
                x["A_log"] = put(A_log, self.param_dtype or wide)
            if self.dt_bias:
                x["dt_bias"] = put(dt_bias, self.param_dtype or wide)
        if self.seqlens is not None:
            x["cu_seqlens"] = torch.tensor([0, *self.seqlens]).cumsum(0).to(self.device)
        if self.initial_state:
            h0 = normal(N, HV, K, V)
            x["initial_state"] = put(h0.mT.contiguous() if self.state_v_first else h0, wide)
        return x


def make_inputs(regime: str = "precomputed", **fields: Any) -> dict[str, Any]:
    """Keyword arguments of one ``chunk_kda`` or ``reference.recurrent`` call: those of a Case."""
    return Case(regime, **fields).inputs()


def make_upstream(inputs: Mapping[str, Any], *, seed: int = 1) -> dict[str, Tensor]:
    """Random gradients of the outputs: ``do`` like o, and ``dht`` if a final state is asked for."""
    generator = torch.Generator().manual_seed(seed)
    q, v, cu_seqlens = inputs["q"], inputs["v"], inputs.get("cu_seqlens")
    upstream = {"do": torch.randn(v.shape, generator=generator, dtype=torch.float64).to(q.device, q.dtype)}
    if inputs.get("output_final_state"):
        N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        tail = (q.shape[3], v.shape[3])
        shape = (N, v.shape[2], *(tail[::-1] if inputs.get("state_v_first") else tail))
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        upstream["dht"] = torch.randn(shape, generator=generator, dtype=torch.float64).to(q.device, wide)
    return upstream


_GRADIENT = {"A_log": "dA_log", "dt_bias": "ddt_bias", "initial_state": "dh0"}


def run(
    op: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    do: Tensor | None = None,
    dht: Tensor | None = None,
    double: bool = False,
) -> dict[str, Tensor]:
    """Call ``op(**inputs)`` and backpropagate ``do`` and ``dht``, whichever is given.

    Args:
        inputs: keyword arguments; every float tensor becomes a leaf with its memory and strides.
        double: upcast the float tensors to float64 first, so that an oracle's gradients are exact.

    Returns:
        ``o``, ``ht`` (if not None) and, after a backward, ``dq, dk, dv, dg, dbeta, dA_log,
        ddt_bias, dh0`` of the inputs that are there; zeros for an input that takes no part.
    """

    def wide(x: Tensor) -> Tensor:
        return x.double() if double else x

    leaves: dict[str, Tensor] = {
        name: wide(x).detach().requires_grad_(do is not None or dht is not None)
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    o, ht = cast("tuple[Tensor, Tensor | None]", op(**{**inputs, **leaves})[:2])
    results: dict[str, Tensor] = {"o": o.detach()}
    pairs = [] if do is None else [(o, wide(do))]
    if ht is not None:
        results["ht"] = ht.detach()
        pairs += [] if dht is None else [(ht, wide(dht))]
    pairs = [(y, dy) for y, dy in pairs if y.requires_grad]
    if do is None and dht is None:
        return results
    ys, dys = [y for y, _ in pairs], [dy for _, dy in pairs]
    grads = (
        cast(
            "tuple[Tensor | None, ...]",
            torch.autograd.grad(ys, tuple(leaves.values()), dys, allow_unused=True),
        )
        if pairs
        else (None,) * len(leaves)
    )
    for (name, x), dx in zip(leaves.items(), grads, strict=True):
        results[_GRADIENT.get(name, f"d{name}")] = torch.zeros_like(x) if dx is None else dx
    return results


@contextlib.contextmanager
def poisoned_empty() -> Generator[None]:
    """Within the context, float memory from ``torch.empty`` and its relatives starts as NaN.

    A value read before it was written then shows in the result. Patched, for every thread of the
    process: ``torch.empty``, ``empty_like``, ``empty_strided``, ``Tensor.new_empty`` and
    ``Tensor.new_empty_strided``.
    """
    places = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ]
    originals = [getattr(owner, name) for owner, name in places]

    def poisoned(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            x = original(*args, **kwargs)
            if x.is_floating_point() or x.is_complex():
                with torch.no_grad():
                    x.fill_(math.nan)
            return x

        return allocate

    try:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, poisoned(cast("Callable[..., Tensor]", original)))
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)

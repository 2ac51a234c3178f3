"""Problems of the short convolution, how to run one, and how close is close."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_fun.testing import relative_error

# Arithmetic is float32 (float64 for a float64 x) and every result is rounded once, so the limit is that of the
# dtype of the result, or of the arithmetic where that is coarser: one rounding (bfloat16 1.7e-3, float16 2.1e-4 in
# norm), or the roundoff of sums of up to a few thousand terms.
LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 3e-4, torch.bfloat16: 2.5e-3}

DIFFERENTIABLE = ("x", "weight", "bias", "residual", "initial_state")


@dataclass(frozen=True)
class Case:
    """One problem. ``lengths``: packed sequences (then B is 1 and T their sum plus ``tail``)."""

    B: int = 2
    T: int = 20
    D: int = 6
    W: int = 4
    lengths: tuple[int, ...] | None = None
    tail: int = 0
    activation: str | None = "silu"
    bias: bool = False
    residual: bool = False
    h0: bool = False
    ht: bool = False
    dtype: torch.dtype = torch.float64
    weight_dtype: torch.dtype | None = None
    seed: int = 0

    def sizes(self) -> tuple[int, int, int]:
        """B, T, N."""
        if self.lengths is None:
            return self.B, self.T, self.B
        return 1, sum(self.lengths) + self.tail, len(self.lengths)

    def arguments(self, device: str = "cpu") -> dict[str, Any]:
        """Keyword arguments of one call, drawn on the CPU, so that every device sees the same values."""
        generator = torch.Generator().manual_seed(self.seed)
        B, T, N = self.sizes()

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

        x, weight = normal(B, T, self.D), normal(self.D, self.W, dtype=self.weight_dtype or self.dtype)
        cu = None if self.lengths is None else torch.tensor([0, *self.lengths]).cumsum(0).to(device)
        return {
            "x": x,
            "weight": weight,
            "bias": normal(self.D, dtype=weight.dtype) if self.bias else None,
            "residual": normal(B, T, self.D) if self.residual else None,
            "initial_state": normal(N, self.D, self.W) if self.h0 else None,
            "output_final_state": self.ht,
            "activation": self.activation,
            "cu_seqlens": cu,
        }

    def upstream(self, device: str = "cpu") -> dict[str, Tensor]:
        """Gradients of y and, if there is one, of the final state."""
        generator = torch.Generator().manual_seed(self.seed + 1000)
        B, T, N = self.sizes()
        shapes = {"dy": (B, T, self.D), **({"dht": (N, self.D, self.W)} if self.ht else {})}
        return {
            name: torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, self.dtype)
            for name, shape in shapes.items()
        }


def run(
    op: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    dy: Tensor | None = None,
    dht: Tensor | None = None,
    double: bool = False,
) -> dict[str, Tensor]:
    """y, ht and the gradient of every differentiable argument (zero where it takes no part)."""

    def wide(t: Tensor) -> Tensor:
        return t.double() if double else t

    leaves = {n: wide(a).detach().requires_grad_() for n, a in arguments.items()
              if n in DIFFERENTIABLE and a is not None}  # fmt: skip
    y, ht = op(**{**arguments, **leaves})
    outputs = {"y": y, **({} if ht is None else {"ht": ht})}
    pairs = [
        (o, wide(u)) for o, u in ((y, dy), (ht, dht)) if u is not None and o is not None and o.requires_grad
    ]
    found = {n: o.detach() for n, o in outputs.items()}
    if pairs:
        grads = torch.autograd.grad(
            [o for o, _ in pairs], list(leaves.values()), [u for _, u in pairs], allow_unused=True
        )
        for (n, leaf), g in zip(leaves.items(), grads):
            found[f"d{n}"] = torch.zeros_like(leaf) if g is None else g
    return found


def check(truth: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Every tensor of the truth is found, finite and within its limit."""
    arithmetic = torch.float64 if found["y"].dtype == torch.float64 else torch.float32
    for name, ref in truth.items():
        assert name in found, f"{name} is missing"
        out = found[name]
        assert out.shape == ref.shape, f"{name}: expected shape {list(ref.shape)}, got {list(out.shape)}"
        assert out.isfinite().all(), f"{name} is not finite"
        error = relative_error(ref, out)
        limit = max(LIMITS[out.dtype], LIMITS[arithmetic])
        if error > limit:
            worst = (out.double().to(ref.device) - ref).abs().max().item()
            raise AssertionError(f"{name}: relative error {error:.2e} > {limit:.0e}, worst {worst:.2e}")


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Equal to the bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs"


#: Lengths that break things: shorter than the window, empty, one token, more than a tile.
PACKINGS: tuple[tuple[int, ...], ...] = ((5, 0, 1, 9, 0), (1, 1, 1), (0, 0), (), (0, 17, 3), (2, 3, 40))
DENSE: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (2, 5), (1, 37), (3, 0), (0, 4))

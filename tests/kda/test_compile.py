"""Under torch.compile the operation runs as it is, at a graph break: same bits, forward and backward."""

from __future__ import annotations

import torch

from kernel_fun._common.compiler import outside_compiler
from kernel_fun.kda import chunk_kda
from kernel_fun.testing import make_inputs


def model(x: dict) -> torch.Tensor:
    o, _ = chunk_kda(**{**x, "v": x["v"] * 2})
    return o.sin()


def test_compiled_equals_eager_to_the_bit():
    x = make_inputs("softplus_random", T=70, H=1, K=8, V=8, dtype=torch.float32)
    results = []
    for function in (model, torch.compile(model, backend="aot_eager")):
        leaves = {n: a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for n, a in x.items()}
        o = function(leaves)
        o.sum().backward()
        results.append([o.detach(), *(a.grad for a in leaves.values() if isinstance(a, torch.Tensor))])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_the_decorator_keeps_name_and_signature():
    @outside_compiler
    def op(x: int, *, y: int = 2) -> int:
        """Adds."""
        return x + y

    assert op.__name__ == "op"
    assert op.__doc__ == "Adds."
    assert op(1) == 3

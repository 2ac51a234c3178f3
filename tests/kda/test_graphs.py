"""CUDA graphs of warm shapes on a GPU: replay gives the bits of eager mode, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_fun.cconv import causal_conv1d
from kernel_fun.kda import chunk_kda, is_supported

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FLAGS: dict[str, Any] = dict.fromkeys(
    ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True
)


def inputs(seed: int, B: int = 1, T: int = 256, H: int = 2, K: int = 128, V: int = 128) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    return {
        "q": draw(B, T, H, K), "k": draw(B, T, H, K), "v": draw(B, T, H, V), "g": draw(B, T, H, K),
        "beta": draw(B, T, H), "A_log": draw(H, dtype=torch.float32), "dt_bias": draw(H * K, dtype=torch.float32),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only our own kernels are asked to be captured: without them on this GPU there is nothing to test."""
    monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", "sm90")
    x = inputs(0)
    served, reason = is_supported(**x, **FLAGS)
    if not served:
        pytest.skip(f"no kernel of ours: {reason}")


def step(static: dict[str, Tensor], **more: Any) -> dict[str, Tensor]:
    """Forward and backward; outputs and gradients."""
    leaves = {n: t.detach().requires_grad_() for n, t in static.items()}
    o, ht = chunk_kda(**leaves, **FLAGS, output_final_state=True, **more)
    grads = torch.autograd.grad(o.float().square().sum() + ht.square().sum(), list(leaves.values()))
    return {"o": o.detach(), "ht": ht.detach(), **{f"d{n}": g for n, g in zip(leaves, grads)}}


def capture(function: Callable[[], dict[str, Tensor]]) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def test_replay_is_eager_mode_forward_and_backward() -> None:
    static = inputs(0)
    graph, out = capture(lambda: step(static))
    for seed in (1, 2):
        fresh = inputs(seed)
        for name, tensor in fresh.items():
            static[name].copy_(tensor)
        graph.replay()
        same(step(fresh), out)


def test_packed_of_fixed_capacity_replays_other_boundaries() -> None:
    """One cu_seqlens tensor, padded with empty sequences; its contents change between replays."""
    static = inputs(0)
    cu = torch.tensor([0, 100, 256, 256, 256], device="cuda")
    more = {"cu_seqlens": cu, "use_graph": True, "max_num_seqs": 4}
    graph, out = capture(lambda: step(static, **more))
    for lengths in ([0, 1, 65, 200, 256], [0, 0, 256, 256, 256], [0, 64, 128, 192, 250]):
        cu.copy_(torch.tensor(lengths))
        graph.replay()
        torch.cuda.synchronize()
        replayed = {n: t.clone() for n, t in out.items()}
        same(step(static, **more), replayed)


def test_make_graphed_callables() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Parameter(torch.randn(6 * 128, 4, device="cuda"))
            self.A_log = torch.nn.Parameter(torch.zeros(2, device="cuda"))

        def forward(self, x: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            y, _ = causal_conv1d(x, self.conv, activation="silu")
            q, k, v = (t.unflatten(-1, (2, 128)) for t in y.chunk(3, -1))
            return chunk_kda(q, k, v, g, beta, A_log=self.A_log, **FLAGS)[0]

    def arguments(seed: int) -> tuple[Tensor, ...]:
        p = inputs(seed)
        x = torch.cat([p[n].flatten(2) for n in ("q", "k", "v")], -1)
        return tuple(t.requires_grad_() for t in (x, p["g"], p["beta"]))

    torch.manual_seed(0)
    layer = Layer()
    eager = deepcopy(layer)  # its own parameters: those of a graphed module must not have met another stream
    given = arguments(1)
    o = eager(*given)
    expected = (o.detach(), *torch.autograd.grad(o.float().square().sum(), (*given, *eager.parameters())))
    graphed = torch.cuda.make_graphed_callables(layer, arguments(0))
    given = arguments(1)
    o = graphed(*given)
    found = (o.detach(), *torch.autograd.grad(o.float().square().sum(), (*given, *layer.parameters())))
    for a, b in zip(expected, found):
        assert torch.equal(a, b)


def test_a_cold_kernel_under_capture_is_refused() -> None:
    """A head size no other test of this file uses."""
    cold = inputs(0, K=64, V=64)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="is cold and a CUDA graph is being captured"),
        torch.cuda.graph(graph),
    ):
        step(cold)
    torch.cuda.synchronize()


def test_many_packings_leave_no_memory_behind() -> None:
    """200 calls with 200 different packings: what is allocated afterwards is what was before."""
    static = inputs(0)
    generator = torch.Generator().manual_seed(0)

    def call() -> None:
        cuts = torch.randint(257, (3,), generator=generator).sort().values.tolist()
        step(static, cu_seqlens=torch.tensor([0, *cuts, 256], device="cuda"))

    for _ in range(5):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        call()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before

"""A 2-layer model learns associative recall, and learns it as the float64 oracle does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernel_fun.kda import chunk_kda
from kernel_fun.kda.reference import chunked

PAIRS, KEYS, VALUES = 22, 24, 8
DIM, H, K = 32, 1, 32
LR, STEPS = 0.03, 150


class Layer(nn.Module):
    """Norm, short causal mixing, chunk_kda with every activation in the kernel, gated output."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op
        self.norm = nn.RMSNorm(DIM)
        self.project = nn.Linear(DIM, 4 * H * K + H, bias=False)
        self.previous = nn.Parameter(torch.zeros(4 * H * K + H))
        self.previous.data[H * K : 2 * H * K] = 1.0  # a value is written under the key before it
        self.A_log = nn.Parameter(torch.zeros(H))
        self.dt_bias = nn.Parameter(torch.full((H * K,), -4.0))
        self.gate = nn.Linear(DIM, H * K)
        self.output_norm = nn.RMSNorm(K)
        self.output = nn.Linear(H * K, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        p = self.project(y)
        p = p + self.previous * nn.functional.pad(p, (0, 0, 1, 0))[:, :-1]
        *qkvg, beta = p.split([H * K] * 4 + [H], -1)
        q, k, v, g = (a.unflatten(-1, (H, K)) for a in qkvg)
        o, _ = self.op(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
        )
        gated = self.output_norm(o.to(x.dtype)).flatten(-2) * self.gate(y).sigmoid()
        return x + self.output(gated)


def model(op: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(KEYS + VALUES, DIM), Layer(op), Layer(op), nn.RMSNorm(DIM), nn.Linear(DIM, VALUES)
    )


def batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """key value key value ... then the keys in another order; the targets are their values."""

    def draw(count: int, of: int) -> Tensor:
        return torch.rand(size, of, generator=generator).argsort(-1)[:, :count]

    keys = draw(PAIRS, KEYS)
    values = torch.randint(VALUES, (size, PAIRS), generator=generator)
    order = draw(PAIRS, PAIRS)
    pairs = torch.stack((keys, values + KEYS), -1).flatten(1)
    return torch.cat((pairs, keys.gather(1, order)), 1), values.gather(1, order)


def train(op: Any, steps: int, size: int) -> list[float]:
    """Losses over the questions, in nats; ln 8 = 2.08 is a guess."""
    net, generator = model(op), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    losses: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 10) * (1 - step / (STEPS + 10))
        tokens, targets = batch(generator, size)
        logits = net(tokens)[:, 2 * PAIRS :]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_training_follows_the_oracle(backend: str) -> None:
    """Step by step the same losses: an error in any gradient would part the two curves."""
    ours, oracle = train(chunk_kda, 12, size=2), train(chunked, 12, size=2)
    for step, (a, b) in enumerate(zip(ours, oracle, strict=True)):
        assert abs(a - b) < 1e-4, f"step {step}: {a} against {b}"


@pytest.mark.slow
def test_two_layers_learn_to_recall(backend: str) -> None:
    losses = train(chunk_kda, STEPS, size=8)
    assert losses[0] > 2.0
    assert sum(losses[-10:]) / 10 < 0.3, losses[::15]

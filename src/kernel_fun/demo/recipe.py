"""What the demo trains by default: a small model on the CPU, a larger one in bf16 on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernel_fun.demo.model import ModelConfig


@dataclass(frozen=True)
class Recipe:
    """One training run: `steps` batches of `B` windows of `T` bytes."""

    model: ModelConfig
    B: int
    T: int
    steps: int
    learning_rate: float
    dtype: torch.dtype
    sample_bytes: int = 600
    warmup_steps: int = 20
    final_rate: float = 0.05
    weight_decay: float = 0.1
    gradient_norm: float = 1.0
    held_out_windows: int = 16
    evaluations: int = 10

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then a cosine down to `final_rate` of it."""
        ramp = min(1.0, (step + 1) / self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * step / max(1, self.steps)))
        return self.learning_rate * ramp * (self.final_rate + (1 - self.final_rate) * cosine)

    def evaluates_after(self, step: int) -> bool:
        """Whether the held-out loss is measured after this step (the last one always is)."""
        every = max(1, self.steps // self.evaluations)
        return step + 1 == self.steps or (step + 1) % every == 0


CPU = Recipe(
    model=ModelConfig(layers=3, width=128, H=2, HV=2, K=64, V=64, mlp_width=352),
    B=4,
    T=256,
    steps=400,
    learning_rate=3e-3,
    dtype=torch.float32,
)

GPU = Recipe(
    # heads as Kimi-Linear has them: where fla has tuned for such a model, it need not tune again
    model=ModelConfig(layers=6, width=1024, H=32, HV=32, K=128, V=128, mlp_width=2816),
    B=16,
    T=1024,
    steps=200,
    learning_rate=1e-3,
    dtype=torch.bfloat16,
)


def for_device(device: torch.device) -> Recipe:
    """The default recipe of a device."""
    return GPU if device.type == "cuda" else CPU

"""The training loop: AdamW, cosine schedule, held-out loss, and an interrupt that loses nothing."""

from __future__ import annotations

import contextlib
import signal
import statistics
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernel_fun.demo.recipe import Recipe
from kernel_fun.demo.text import Text


@dataclass
class History:
    """Losses in nats per byte, by the number of steps that had been taken."""

    train: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    held_out: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    tokens: int = 0
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list[float])
    """Of each step: batch, forward, backward, optimizer, and the wait for its loss."""
    interrupted: bool = False

    def train_loss(self, window: int = 20) -> float:
        """Mean training loss of the last `window` steps; NaN before the first."""
        last = [loss for _, loss in self.train[-window:]]
        return sum(last) / len(last) if last else float("nan")

    def step_ms(self) -> float:
        """Median time of a step in ms, without the first five, which meet compilers; NaN before the sixth."""
        return 1e3 * statistics.median(self.step_seconds[5:] or [float("nan")])


@contextlib.contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """Yields a question, "has Ctrl-C been pressed?"; a second Ctrl-C raises as usual.

    A step is never cut in half, so the parameters, the plot and the sample stay consistent. Outside
    the main thread, where Python allows no signal handler, the answer is always no.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    previous = signal.getsignal(signal.SIGINT)

    def once(number: int, frame: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, once)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean cross entropy in nats per byte, computed in fp32."""
    with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
        logits, _ = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Text, recipe: Recipe, device: torch.device) -> float:
    """Mean loss over windows that are never trained on."""
    inputs, targets = text.held_out_windows(recipe.T, recipe.held_out_windows)
    batches = zip(inputs.split(recipe.B), targets.split(recipe.B), strict=True)
    total = sum(loss_of(model, x.to(device), y.to(device), recipe.dtype).item() * len(x) for x, y in batches)
    return total / len(inputs)


def train(
    model: nn.Module,
    text: Text,
    recipe: Recipe,
    *,
    seed: int,
    on_step: Callable[[History], None],
    stop: Callable[[], bool],
) -> History:
    """Trains `model` in place for `recipe.steps` steps, or until `stop()` is true between two.

    Args:
        on_step: called after every step with what is known so far.
    """
    device = next(model.parameters()).device
    optimizer = _optimizer(model, recipe)
    generator = torch.Generator().manual_seed(seed)
    history = History()
    history.held_out.append((0, held_out_loss(model, text, recipe, device)))
    start = time.perf_counter()
    for step in range(recipe.steps):
        if stop():
            history.interrupted = True
            break
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        inputs, targets = text.batch(recipe.B, recipe.T, generator)
        loss = loss_of(model, inputs.to(device), targets.to(device), recipe.dtype)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_norm)
        optimizer.step()
        history.train.append((step + 1, loss.item()))
        history.tokens += inputs.numel()
        now = time.perf_counter()
        history.step_seconds.append(now - begin)
        history.seconds = now - start
        if recipe.evaluates_after(step):
            history.held_out.append((step + 1, held_out_loss(model, text, recipe, device)))
        on_step(history)
    steps = len(history.train)
    if history.held_out[-1][0] != steps:
        history.held_out.append((steps, held_out_loss(model, text, recipe, device)))
    return history


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only, not on norms, biases and decay rates."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )

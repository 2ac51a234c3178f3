"""What a demo leaves on disk."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernel_fun.demo.model import ByteModel
from kernel_fun.demo.train import History

if TYPE_CHECKING:
    from kernel_fun.demo.session import Result

#: Nats per byte of a model that knows nothing.
UNIFORM = 5.545177444479562


def write_losses(history: History, path: Path) -> None:
    """One line per step: `step,train,held_out`, the last empty where it was not measured."""
    held_out = dict(history.held_out)
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(("step", "train", "held_out"))
        for step, loss in [(0, None), *history.train]:
            out.writerow((step, *("" if x is None else f"{x:.5f}" for x in (loss, held_out.get(step)))))


def write_plot(history: History, title: str, path: Path) -> bool:
    """The loss curve as a PNG; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(*zip(*history.train, strict=True) if history.train else ((), ()),
              color="tab:blue", alpha=0.35, linewidth=1, label="training batch")  # fmt: skip
    axes.plot(*zip(*history.held_out, strict=True), color="tab:orange", marker="o", label="held out")
    axes.axhline(UNIFORM, color="gray", linestyle=":", linewidth=1, label="uniform over 256 bytes")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def write_checkpoint(model: ByteModel, history: History, path: Path) -> None:
    """`{"config", "steps", "model"}` for `torch.load(path)`; it holds no pickled classes."""
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    steps = len(history.train)
    torch.save({"config": asdict(model.config), "steps": steps, "model": state}, path)


def summary(result: Result) -> list[str]:
    """What happened, in a few lines."""
    steps = f"{result.steps_done} of {result.steps} steps"
    step = "" if result.step_ms is None else f", {result.step_ms:.1f} ms/step (median)"
    return [
        f"text       {result.text}",
        f"model      {result.parameters:,} parameters in {result.dtype} on {result.device}",
        f"trained    {steps}{' (interrupted)' if result.interrupted else ''}, {result.tokens:,} bytes "
        f"in {result.seconds:.0f} s: {result.tokens_per_s:,.0f} bytes/s{step}, convolution by "
        f"{result.convolution}",
        f"loss       held out {result.initial_loss:.2f} -> {result.held_out_loss:.2f} nats/byte, "
        f"training {result.train_loss:.2f} (mean of the last 20 steps)",
        f"seed       {result.seed}",
    ]

"""The demo from start to end: text, model, training, agreement of the forms, sample, files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernel_fun._common import device as devices
from kernel_fun._common.plan import Plan
from kernel_fun.demo import recipe as recipes
from kernel_fun.demo import report, sample, train
from kernel_fun.demo.model import ByteModel, Convolution
from kernel_fun.demo.recipe import Recipe
from kernel_fun.demo.text import Text, load
from kernel_fun.kda import dispatch
from kernel_fun.kda.call import Problem

PROMPT = b"\nThe "


@dataclass(frozen=True)
class Options:
    """What the user may choose; None means the default of the device."""

    out: Path
    text: Path | None = None
    steps: int | None = None
    seed: int = 0
    device: str | None = None
    recipe: Recipe | None = None
    convolution: Convolution = "kernel-fun"


@dataclass(frozen=True)
class Result:
    """What a demo did. Losses in nats per byte; `tokens` are bytes of training text."""

    text: str
    device: str
    dtype: str
    backend: str
    convolution: str
    parameters: int
    steps: int
    steps_done: int
    interrupted: bool
    seed: int
    tokens: int
    seconds: float
    tokens_per_s: float
    step_ms: float | None
    initial_loss: float
    train_loss: float
    held_out_loss: float
    agreement: sample.Agreement
    sample: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """A demo that is ready to train."""

    text: Text
    recipe: Recipe
    model: ByteModel
    device: torch.device
    plan: Plan

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def prepare(options: Options) -> Setting:
    """Loads the text and builds the model; the seed decides every parameter.

    Raises ValueError for a text or a number of steps that is too small.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    recipe = options.recipe or recipes.for_device(device)
    if options.steps is not None:
        if options.steps < 1:
            raise ValueError(f"`--steps` must be at least 1, got {options.steps}")
        recipe = replace(recipe, steps=options.steps)
    recipe = replace(recipe, model=replace(recipe.model, convolution=options.convolution))
    text = load(options.text, window=recipe.T)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = ByteModel(recipe.model).to(device)
    plan = dispatch.plan(training_problem(recipe), devices.of(device))
    return Setting(text, recipe, model, device, plan)


def training_problem(recipe: Recipe) -> Problem:
    """The chunk_kda problem of one training step, as the model calls it."""
    c = recipe.model
    dtype = str(recipe.dtype).removeprefix("torch.")
    return Problem(
        recipe.B, recipe.T, c.H, c.HV, c.K, c.V,
        dtypes=(dtype, dtype, dtype, dtype, dtype),
        gate="softplus", beta_mode="sigmoid", l2norm=True, needs_grad=True,
    )  # fmt: skip


def run(
    setting: Setting,
    options: Options,
    *,
    on_step: Callable[[train.History], None] = lambda history: None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Trains until done or until `stop()`; either way compares the forms, samples and writes.

    What was trained is on disk before anything else is tried with it.
    """
    model, recipe, out = setting.model, setting.recipe, options.out
    history = train.train(model, setting.text, recipe, seed=options.seed, on_step=on_step, stop=stop)
    out.mkdir(parents=True, exist_ok=True)
    report.write_checkpoint(model, history, out / "checkpoint.pt")
    report.write_losses(history, out / "losses.csv")
    title = f"kernel-fun demo: {setting.parameters:,} parameters, chunk_kda on {setting.plan.backend}"
    plotted = report.write_plot(history, title, out / "loss.png")

    model.eval()
    tokens, _ = setting.text.held_out_windows(recipe.T, 1)
    agreement = sample.agreement(model, tokens[:, :256].to(setting.device), recipe.dtype)
    generated = sample.generate(model, PROMPT, recipe.sample_bytes, seed=options.seed, dtype=recipe.dtype)
    files = ["checkpoint.pt", "losses.csv", *(["loss.png"] * plotted), "sample.txt", "summary.txt"]
    result = Result(
        text=f"{setting.text.name}, {len(setting.text.train) + len(setting.text.held_out):,} bytes",
        device=setting.plan.device.name,
        dtype=str(recipe.dtype).removeprefix("torch."),
        backend=setting.plan.backend,
        convolution=recipe.model.convolution,
        parameters=setting.parameters,
        steps=recipe.steps,
        steps_done=len(history.train),
        interrupted=history.interrupted,
        seed=options.seed,
        tokens=history.tokens,
        seconds=history.seconds,
        tokens_per_s=history.tokens / history.seconds if history.seconds else 0.0,
        step_ms=history.step_ms() if len(history.step_seconds) > 5 else None,
        initial_loss=history.held_out[0][1],
        train_loss=history.train_loss(),
        held_out_loss=history.held_out[-1][1],
        agreement=agreement,
        sample=(PROMPT + generated).decode("utf-8", errors="replace"),
        files=tuple(str(out / name) for name in files),
    )
    (out / "sample.txt").write_text(result.sample + "\n", encoding="utf-8")
    lines = [*report.summary(result), str(agreement), "", str(setting.plan)]
    (out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return result

"""The same training run by two backends, from the same seeds, side by side.

Two seeds say how far apart two runs of one backend end; two backends that compute the same end no farther
apart than that from the same seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import kernel_fun
from kernel_fun._common import config
from kernel_fun.bench import record, suite
from kernel_fun.demo import session, train

SEEDS = 2


@dataclass(frozen=True)
class Run:
    """One training run. Losses in nats per byte."""

    backend: str
    seed: int
    train: list[tuple[int, float]]
    held_out: list[tuple[int, float]]
    tokens_per_s: float
    """Over the steps after the first five, which meet compilers."""
    step_ms: float
    peak_bytes: int | None
    """Most memory of torch's allocator, parameters included; None on the CPU."""

    @property
    def final_loss(self) -> float:
        return self.held_out[-1][1]


@dataclass(frozen=True)
class Comparison:
    """Runs of two backends over the same seeds."""

    gpu: str
    commit: str | None
    dirty: bool | None
    utc: str
    versions: dict[str, str | None]
    model: str
    runs: list[Run]

    def final(self, backend: str) -> list[float]:
        """Final held-out losses of a backend, by seed."""
        return [run.final_loss for run in self.runs if run.backend == backend]

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(run.backend for run in self.runs))

    @property
    def between_seeds(self) -> float:
        """How far apart the seeds of one backend end: of the backend where they end nearer."""
        return min(max(self.final(b)) - min(self.final(b)) for b in self.backends)

    @property
    def between_backends(self) -> float:
        """Farthest apart that the two backends end from one seed."""
        first, second = (self.final(b) for b in self.backends)
        return max(abs(a - b) for a, b in zip(first, second, strict=True))

    @property
    def agrees(self) -> bool:
        return self.between_backends <= self.between_seeds

    def __str__(self) -> str:
        word = "within" if self.agrees else "BEYOND"
        return (
            f"{' and '.join(self.backends)} end {self.between_backends:.4f} nats/byte apart from one seed, "
            f"{word} the {self.between_seeds:.4f} between seeds of one backend"
        )


def compare(
    options: session.Options,
    backends: tuple[str, str],
    *,
    commit: str | None = None,
    on_step: Callable[[str, train.History], None] = lambda label, history: None,
) -> Comparison:
    """Trains with each backend from `SEEDS` seeds; ValueError if the two are the same.

    `commit`: of a clean copy that has no git; a checkout knows its own.
    """
    if backends[0] == backends[1]:
        raise ValueError(
            f"`--compare` must name another backend than the one compared, got {backends[0]!r} twice"
        )
    runs: list[Run] = []
    for seed in range(options.seed, options.seed + SEEDS):
        for backend in backends:
            with config.KDA_BACKEND.set(backend):
                runs.append(_run(replace(options, seed=seed), backend, on_step))
    setting = session.prepare(options)
    recipe = setting.recipe
    known, dirty = suite.commit()
    if known == "unknown" and commit is not None:
        known, dirty = commit, False
    return Comparison(
        gpu=setting.plan.device.name,
        commit=known,
        dirty=dirty,
        utc=record.now(),
        versions=kernel_fun.versions(),
        model=f"{setting.parameters:,} parameters, B{recipe.B} T{recipe.T}, {recipe.model}",
        runs=runs,
    )


def _run(options: session.Options, backend: str, on_step: Callable[[str, train.History], None]) -> Run:
    setting = session.prepare(options)
    label = f"{backend}, seed {options.seed}"
    on_gpu = setting.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(setting.device)
    history = train.train(
        setting.model,
        setting.text,
        setting.recipe,
        seed=options.seed,
        on_step=lambda history: on_step(label, history),
        stop=lambda: False,
    )
    step_ms = history.step_ms()
    return Run(
        backend=backend,
        seed=options.seed,
        train=history.train,
        held_out=history.held_out,
        tokens_per_s=setting.recipe.B * setting.recipe.T / step_ms * 1e3,
        step_ms=step_ms,
        peak_bytes=torch.cuda.max_memory_allocated(setting.device) if on_gpu else None,
    )


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """`compare.json` and, with matplotlib, `compare.png`; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = asdict(comparison)
    data |= {name: getattr(comparison, name) for name in ("between_seeds", "between_backends", "agrees")}
    written = [folder / "compare.json"]
    written[0].write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if _plot(comparison, folder / "compare.png"):
        written.append(folder / "compare.png")
    return written


def _plot(comparison: Comparison, path: Path) -> bool:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for run in comparison.runs:
        color = f"C{comparison.backends.index(run.backend)}"
        style = "-" if run.seed == comparison.runs[0].seed else "--"
        axes.plot(*zip(*run.train, strict=True), color=color, linestyle=style, alpha=0.25, linewidth=1)
        label = f"{run.backend}, seed {run.seed}: {run.final_loss:.3f}, {run.step_ms:.1f} ms/step"
        line = dict(color=color, linestyle=style, marker="o", markersize=3, label=label)
        axes.plot(*zip(*run.held_out, strict=True), **line)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=str(comparison))
    axes.title.set_fontsize(9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=120)
    return True

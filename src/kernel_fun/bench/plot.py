"""A record as a picture: time of each candidate, and each against the ceilings of the device."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kernel_fun.bench.record import Record


def check(path: Path) -> None:
    """ValueError without matplotlib, or for a file that is no PNG by its name."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("`--plot` needs matplotlib (pip install 'kernel-fun[cli]')")
    if path.suffix.lower() != ".png":
        raise ValueError(f"`--plot` must name a .png file, got {path}")


def draw(record: Record, path: Path) -> None:
    """Bars of the median times (whiskers: 20th to 80th percentile) and a roofline, as one PNG.

    Raises ValueError for a record without rows, and as :func:`check` does.
    """
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not record.rows:
        raise ValueError("`--plot` needs a record with rows, got none")
    figure: Any = Figure(figsize=(13, 0.45 * len(record.rows) + 3), layout="constrained")
    FigureCanvasAgg(figure)
    bars, roofline = figure.subplots(1, 2)
    names = list(dict.fromkeys(r.candidate for r in record.rows))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    _bars(bars, record, colours)
    _roofline(roofline, record, colours)
    when = f"{record.gpu}, kernel-fun {record.versions['kernel-fun']}, {record.utc}"
    figure.suptitle(when)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, record: Record, colours: dict[str, str]) -> None:
    for y, row in enumerate(record.rows):
        ms = row.ms
        whiskers = [[ms.p50 - ms.p20], [ms.p80 - ms.p50]]
        axes.barh(y, ms.p50, xerr=whiskers, color=colours[row.candidate], capsize=3)
        axes.annotate(
            f" {ms.p50:.0f}" if ms.p50 >= 100 else f" {ms.p50:.3g}", (ms.p80, y), va="center", fontsize=8
        )
    labels = [f"{r.bench} {r.shape} {r.gate}\n{r.candidate}" for r in record.rows]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", title="median time")
    axes.margins(x=0.12)


def _roofline(axes: Any, record: Record, colours: dict[str, str]) -> None:
    bandwidth, peak = record.ceilings["copy_TBps"], record.ceilings["gemm_TFLOPs"]
    intensities = [r.flops / r.bytes for r in record.rows]
    low, high = min(*intensities, peak / bandwidth) / 4, max(*intensities, peak / bandwidth) * 4
    axes.plot([low, peak / bandwidth, high], [low * bandwidth, peak, peak], color="gray")
    for row, intensity in zip(record.rows, intensities, strict=True):
        reached = row.flops / row.ms.p50 / 1e9
        marker = "o" if row.bench.endswith("fwd") else "s"
        axes.plot(intensity, reached, marker, color=colours[row.candidate])
    for name, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte (least of each)",
             ylabel="TFLOP/s reached", title="roofline (circle: forward, square: with backward)")  # fmt: skip
    axes.legend()

"""`kernel-fun demo`: train a small language model with chunk_kda, then let it write."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_fun._cli import explain
from kernel_fun._cli.screen import Screen
from kernel_fun._common import config
from kernel_fun._common.plan import BACKENDS

if TYPE_CHECKING:
    from kernel_fun.demo.session import Result
    from kernel_fun.demo.train import History

HELP = "train a small KDA language model on real text, then generate from it"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="text to learn (default: the Python documentation "
        "topics that CPython ships)")  # fmt: skip
    add("--steps", type=int, metavar="N", help="training steps (default: by device)")
    add("--seed", type=int, default=0, metavar="N", help="default: 0")
    add("--out", type=Path, default=Path("kernel-fun-demo"), metavar="DIR",
        help="where losses, plot, sample and checkpoint go (default: kernel-fun-demo)")  # fmt: skip
    add("--backend", choices=BACKENDS, help="the backend that must serve chunk_kda")
    add("--device", help="torch device (default: cuda if there is one, else cpu)")


def run(args: argparse.Namespace, screen: Screen) -> tuple[int, dict[str, Any]]:
    from kernel_fun.demo import session, train

    options = session.Options(
        out=args.out, text=args.text, steps=args.steps, seed=args.seed, device=args.device
    )
    demanded = config.KDA_BACKEND.set(args.backend) if args.backend else contextlib.nullcontext()
    with demanded:
        setting = session.prepare(options)
        screen.line(
            f"{setting.parameters:,} parameters, {setting.recipe.steps} steps of "
            f"{setting.recipe.B} x {setting.recipe.T} bytes of {setting.text.name}"
        )
        explain.show(setting.plan, screen)
        with (
            train.interruptible() as pressed,
            screen.progress("training", setting.recipe.steps) as advance,
        ):
            result = session.run(
                setting,
                options,
                on_step=lambda history: advance(len(history.train), _status(history)),
                stop=pressed,
            )
    _show(result, screen)
    if not result.agreement.agrees:
        return 1, asdict(result)
    return 130 if result.interrupted else 0, asdict(result)


def _printable(text: str) -> str:
    """The text without what a terminal would obey: an untrained model writes any byte."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _status(history: History) -> str:
    rate = history.tokens / history.seconds if history.seconds else 0.0
    return (
        f"loss {history.train_loss():.3f}  held out {history.held_out[-1][1]:.3f} nats/byte  "
        f"{rate:,.0f} bytes/s"
    )


def _show(result: Result, screen: Screen) -> None:
    from kernel_fun.demo import report

    if result.interrupted:
        screen.line("interrupted: what was trained so far is kept", "yellow")
    screen.line()
    screen.line(_printable(result.sample), "cyan")
    screen.line()
    for line in report.summary(result):
        screen.line(line)
    screen.line(str(result.agreement), "green" if result.agreement.agrees else "bold red")
    if not any(name.endswith(".png") for name in result.files):
        screen.line("no loss.png: matplotlib is not installed (pip install 'kernel-fun[cli]')")
    screen.line("wrote      " + " ".join(result.files))

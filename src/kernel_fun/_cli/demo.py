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
    from kernel_fun.demo.session import Options, Result
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
    add("--convolution", choices=("kernel-fun", "torch"), default="kernel-fun",
        help="what computes the short convolution; torch: shifted products, to compare step times with "
        "(default: kernel-fun)")  # fmt: skip
    add("--compare", choices=BACKENDS, metavar="BACKEND",
        help="train with this backend as well, two seeds each: losses, step times and memory "
        "side by side")  # fmt: skip
    add("--commit", metavar="ID", help="commit of a clean copy that has no git, for what --compare writes")
    add("--device", help="torch device (default: cuda if there is one, else cpu)")


def run(args: argparse.Namespace, screen: Screen) -> tuple[int, dict[str, Any]]:
    from kernel_fun.bench import machine
    from kernel_fun.demo import session, train

    if args.device is not None:
        machine.usable("--device", args.device)
    if args.text is not None and not args.text.is_file():
        raise ValueError(f"`--text` must be a file, got {args.text}")
    try:  # what cannot be kept is not worth training
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`--out` must be a directory that can be made, got {args.out}: {error}") from None
    options = session.Options(
        out=args.out, text=args.text, steps=args.steps, seed=args.seed, device=args.device,
        convolution=args.convolution,
    )  # fmt: skip
    if args.compare:
        return _compare(options, args.backend, args.compare, args.commit, screen)
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


def _compare(
    options: Options, backend: str | None, other: str, commit: str | None, screen: Screen
) -> tuple[int, dict[str, Any]]:
    from kernel_fun.demo import compare, session

    ours = backend or session.prepare(options).plan.backend
    steps = 2 * compare.SEEDS * session.prepare(options).recipe.steps
    done = 0

    def on_step(label: str, history: History) -> None:
        nonlocal done
        done += 1
        advance(done, f"{label}: {_status(history)}")

    with screen.progress("training", steps) as advance:
        found = compare.compare(options, (ours, other), commit=commit, on_step=on_step)
    rows = [
        (
            run.backend,
            str(run.seed),
            f"{run.final_loss:.4f}",
            f"{run.step_ms:.1f}",
            f"{run.tokens_per_s:,.0f}",
            "-" if run.peak_bytes is None else f"{run.peak_bytes / 2**30:.2f} GiB",
        )
        for run in found.runs
    ]
    columns = ("backend", "seed", "held out", "ms/step", "bytes/s", "peak memory")
    screen.table(found.model, columns, rows, numbers=5)
    screen.line(str(found), "green" if found.agrees else "bold red")
    written = [str(path) for path in compare.write(found, options.out)]
    screen.line("wrote " + " ".join(written))
    return 0 if found.agrees else 1, {**asdict(found), "agrees": found.agrees, "files": written}


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

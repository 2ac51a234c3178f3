"""The examples that switch a model over, run as they are, and a record of what served them.

    python -m benchmarks.examples [--out benchmarks/runs] [train_fla] [train_kimi_linear]

A run counts if chunk_kda was engaged on the backend asked for and the loss fell. The record holds the losses,
what the logger `kernel_fun` said, and the kernels of ours that were loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import runpy
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from kernel_fun._common import config

from . import runs

FOLDER = Path(__file__).resolve().parent.parent / "examples"
EXAMPLES = ("train_fla", "train_kimi_linear")


def run(name: str) -> dict[str, Any]:
    """Run an example; its losses, what was logged, and the kernels it loaded."""
    from kernel_fun._cute import objects

    before, start = len(objects.ready()), time.perf_counter()
    with logged() as said, contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return {
        "example": name,
        "seconds": time.perf_counter() - start,
        "losses": [float(x) for x in re.findall(r"loss ([0-9.naif-]+)", printed.getvalue())],
        "log": said,
        "kernels": [f"{k.name} {k.config} ({k.how})" for k in objects.ready()[before:]],
    }


@contextlib.contextmanager
def logged() -> Generator[list[str]]:
    """Collects what the logger of the package says, from INFO on."""
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("kernel_fun")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def failure(found: dict[str, Any], backend: str) -> str | None:
    """Why a run does not count, or None."""
    if not any(f"engaged (chunk_kda on {backend}," in line for line in found["log"]):
        return f"chunk_kda was not engaged on {backend}"
    first, *_, last = found["losses"]
    return None if last < first else f"the loss went from {first} to {last}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("example", nargs="*", help=f"of {', '.join(EXAMPLES)} (default: both)")
    parser.add_argument("--backend", help="what must serve chunk_kda (default: sm90 on a GPU, else eager)")
    parser.add_argument("--commit", help="commit of a clean copy that has no git")
    parser.add_argument("--out", type=Path, help="folder of runs, or a .json file (default: none)")
    args = parser.parse_args(argv)
    for name in args.example:
        if name not in EXAMPLES:
            parser.error(f"example must be one of {', '.join(EXAMPLES)}, got {name}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = args.backend or ("sm90" if device.type == "cuda" else "eager")
    places = config.KERNELS, config.CACHE_DIR
    told = [s for s in config.SWITCHES if s.name in os.environ and s not in places]
    done: list[dict[str, Any]] = []
    for name in args.example or EXAMPLES:
        found = run(name)
        why = failure(found, backend)
        done.append({**found, "failure": why})
        print(f"{name}: loss {found['losses'][0]:.3f} to {found['losses'][-1]:.3f}", why or "", flush=True)
        print(*found["log"], *found["kernels"], sep="\n  ", flush=True)
    if args.out is not None:
        about = {
            **runs.made(device, args.commit),
            "switches": {s.name: os.environ[s.name] for s in told},
            "runs": done,
        }
        print(f"wrote {runs.write(args.out, about, 'examples')}")
    return int(any(r["failure"] for r in done))


if __name__ == "__main__":
    raise SystemExit(main())

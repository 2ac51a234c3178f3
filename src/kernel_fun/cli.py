"""The `kernel-fun` command: info, explain, check, bench, demo, warmup, compile, verify,
drift.

Every command takes `--json`: then standard output holds one JSON object and nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import kernel_fun
from kernel_fun._cli.screen import Screen

COMMANDS = ("info", "explain", "check", "bench", "demo", "warmup", "compile", "verify", "drift")

#: Exit statuses: what was asked for was measured and is wrong; the request itself is wrong.
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def parser() -> argparse.ArgumentParser:
    """The command line, one subcommand per module of `kernel_fun._cli`."""
    top = argparse.ArgumentParser(
        prog="kernel-fun", description="Fast linear-attention kernels: look, check, measure, try."
    )
    top.add_argument("--version", action="version", version=f"kernel-fun {kernel_fun.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"kernel_fun._cli.{name}")
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP)
        sub.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
        module.arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    from kernel_fun._common.plan import BackendUnavailable
    from kernel_fun._common.support import warn_of_unknown_switches
    from kernel_fun._cute.objects import ObjectsRefused

    args = parser().parse_args(argv)
    warn_of_unknown_switches()
    screen = Screen(None if args.json else sys.stdout)
    try:
        status, data = args.run(args, screen)
    except (ValueError, OSError, NotImplementedError, BackendUnavailable, ObjectsRefused) as error:
        status, data = MISUSED, {"error": str(error)}
        sys.stderr.write(f"kernel-fun {args.command}: {error}\n")
    except KeyboardInterrupt:
        status, data = INTERRUPTED, {"error": "interrupted"}
        sys.stderr.write(f"kernel-fun {args.command}: interrupted\n")
    if args.json:
        sys.stdout.write(json.dumps(data, indent=2, default=_plain) + "\n")
    return status


def _plain(value: Any) -> str:
    """What JSON has no form for (dtypes, devices, paths) is written as its text."""
    return str(value)

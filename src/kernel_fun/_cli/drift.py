"""`kernel-fun drift`: GPU kernels whose sources are not those that last passed the GPU tests."""

from __future__ import annotations

import argparse
from typing import Any

from kernel_fun._cli.screen import Screen
from kernel_fun._common import ledger

HELP = "list GPU kernels that changed since they passed the GPU tests, or never did; nothing if none has"


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # no options of its own


def run(args: argparse.Namespace, screen: Screen) -> tuple[int, dict[str, Any]]:
    from kernel_fun.kda import _provenance
    from kernel_fun.kda._kernels.sm90.launched import KERNELS

    found = ledger.drift(_provenance.VERIFIED, KERNELS)
    for stage, modules in found.items():
        state = "changed" if stage in _provenance.VERIFIED else "never verified"
        screen.line(f"kda sm90 {stage}: {state}: {', '.join(modules)}")
    return 0, {"kda": found}

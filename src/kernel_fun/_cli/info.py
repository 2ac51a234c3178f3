"""`kernel-fun info`: versions, devices, switches, and what each backend needs to run here."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import kernel_fun
from kernel_fun._cli.screen import Screen
from kernel_fun._common import config
from kernel_fun._common.plan import BACKENDS
from kernel_fun._cute import objects
from kernel_fun.bench.machine import devices, unavailable

HELP = "show versions, devices, and which backends can run here and why"


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # no options of its own


def run(args: argparse.Namespace, screen: Screen) -> tuple[int, dict[str, Any]]:
    found, held = devices(), objects.holding()
    data: dict[str, Any] = {
        "versions": kernel_fun.versions(),
        "devices": found,
        "backends": [
            {"backend": name, "available": why is None, "reason": why}
            for name, why in ((name, unavailable(name, found)) for name in BACKENDS)
        ],
        "prebuilt": None if held is None else asdict(held),
        "switches": [
            {"name": s.name, "value": s.read(), "default": s.default, "meaning": s.meaning}
            for s in config.SWITCHES
        ],
    }
    _show(data, screen)
    return 0, data


def _show(data: dict[str, Any], screen: Screen) -> None:
    screen.table(
        "versions", ("package", "version"),
        [(name, version or "not installed") for name, version in data["versions"].items()],
    )  # fmt: skip
    screen.table(
        "devices", ("device", "arch", "name", ""),
        [(d["device"], d["arch"], d["name"], d["detail"]) for d in data["devices"]],
    )  # fmt: skip
    screen.table(
        "backends of chunk_kda", ("backend", "available", "reason if not"),
        [(b["backend"], "yes" if b["available"] else "no", b["reason"] or "")
         for b in data["backends"]],
    )  # fmt: skip
    screen.line(prebuilt(data["prebuilt"]))
    screen.table(
        "switches", ("variable", "value", "meaning"),
        [(s["name"], s["value"] or "-", s["meaning"]) for s in data["switches"]],
    )  # fmt: skip


def prebuilt(held: dict[str, Any] | None) -> str:
    """One sentence: where kernels come from at their first call."""
    if held is None:
        return f"{config.KERNELS.name} is not set: kernels are compiled at first calls, or cached"
    if held["reason"] is None:
        return f"{config.KERNELS.name}={held['folder']}: {held['kernels']} kernels, nothing is compiled"
    return f"{held['usable']} of {held['kernels']} kernels can be loaded; {held['reason']}"

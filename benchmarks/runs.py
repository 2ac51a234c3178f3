"""Where and when something was measured, and the file that says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

import kernel_fun
from kernel_fun.bench import machine, record, suite


def made(device: torch.device, commit: str | None) -> dict[str, Any]:
    """Device, commit, time and versions. ``commit``: of a clean copy that has no git."""
    wanted = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
    found, dirty = suite.commit()
    if found == "unknown" and commit:
        found, dirty = commit, False
    return {
        "gpu": next(d["name"] for d in machine.devices() if d["device"] == wanted),
        "commit": found,
        "dirty": dirty,
        "utc": record.now(),
        "versions": kernel_fun.versions(),
    }


def line(about: dict[str, Any]) -> str:
    """The same in a line, for a table."""
    versions = ", ".join(f"{n} {v}" for n, v in about["versions"].items() if v)
    return f"{about['gpu']}, commit {about['commit']}, {about['utc']}; {versions}"


def folder(out: Path, about: dict[str, Any]) -> Path:
    """The folder of a device."""
    return out / re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")


def write(out: Path, about: dict[str, Any], what: str) -> Path:
    """Write a run to ``out``, a .json file or the folder of all runs. FileExistsError where there is one."""
    day = re.sub(r"[^0-9]", "", about["utc"])[:8]
    path = out if out.suffix == ".json" else folder(out, about) / f"{day}-{about['commit'][:7]}-{what}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(about, indent=1) + "\n")
    return path

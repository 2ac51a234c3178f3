"""What compute-sanitizer's racecheck reports of a Python program, by kernel: which thread came before which."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

needed = pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")


@dataclass(frozen=True)
class Hazard:
    """Two accesses of a byte that racecheck sees no order between. Threads by index in their CTA."""

    kind: str
    """RAW, WAR or WAW: what came second, then first."""
    kernel: str
    first: int
    second: int


HEAD = re.compile(r"(RAW|WAR|WAW) hazard detected at __shared__")
ACCESS = re.compile(r"(Write|Read) Thread \((\d+),\d+,\d+\) at (.*)\+0x[0-9a-f]+")


def hazards(text: str) -> list[Hazard]:
    """Those of a report of hazards."""
    found: list[Hazard] = []
    kind, threads = "", {}
    for line in text.splitlines():
        head, access = HEAD.search(line), ACCESS.search(line)
        if head:
            kind, threads = head[1], {}
        elif access and kind:
            name = access[1] if access[1] not in threads else "again"
            threads[name] = int(access[2])
            if len(threads) == 2:
                read, write = threads.get("Read", -1), threads["Write"]
                first, second = {"RAW": (write, read), "WAR": (read, write)}.get(
                    kind, (write, threads.get("again", -1))
                )
                found.append(Hazard(kind, access[3], first, second))
                kind = ""
    return found


def run(*command: str) -> tuple[str, list[Hazard]]:
    """(report, hazards) of ``python *command``; the program must end well."""
    tool = (
        "compute-sanitizer",
        "--tool",
        "racecheck",
        "--racecheck-report",
        "hazard",
        "--print-limit",
        "1000000",
    )
    done = subprocess.run(
        [*tool, "--show-backtrace", "no", sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report[-2000:]
    assert "RACECHECK SUMMARY" in report, report[-2000:]
    return report, hazards(report)

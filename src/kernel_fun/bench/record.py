"""The record of a run: one JSON file that is written once and never changed."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kernel_fun.bench.timing import Quantiles


@dataclass(frozen=True)
class Row:
    """One candidate on one bench at one shape.

    `bench` is family and pass, `kda.fwdbwd`. `host_us` is None where the host computes, `cold_s`
    where it was not asked for. `error` is relative, per tensor, against the float64 oracle; `flops`
    and `bytes` are the least work of the call.
    """

    bench: str
    shape: str
    gate: str
    dtype: str
    candidate: str
    ms: Quantiles
    rounds: int
    peak_bytes: int
    host_us: float | None
    cold_s: float | None
    error: dict[str, float]
    flops: float
    bytes: float


@dataclass(frozen=True)
class Skipped:
    """A candidate that has no time, and why."""

    bench: str
    shape: str
    gate: str
    candidate: str
    reason: str


@dataclass
class Record:
    """Everything one run measured. `gpu` names the device, also where `device` is "cpu"."""

    gpu: str
    device: str
    commit: str
    dirty: bool
    utc: str
    versions: dict[str, str | None]
    ceilings: dict[str, float]
    memory: str
    threads: int
    rows: list[Row] = field(default_factory=list[Row])
    skipped: list[Skipped] = field(default_factory=list[Skipped])

    def made_at(self, commit: str | None) -> None:
        """Name the commit of a copy that has no git; a checkout knows its own."""
        if commit is not None and self.commit == "unknown":
            self.commit, self.dirty = commit, False

    def as_json(self) -> dict[str, Any]:
        """The record as it is written."""
        return asdict(self)

    def default_path(self, results: Path) -> Path:
        """`<results>/<gpu>/<utc>-<commit>.json`."""
        folder = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        stamp = re.sub(r"[^0-9TZ]", "", self.utc)
        return results / folder / f"{stamp}-{self.commit[:12]}.json"

    def write(self, path: Path) -> None:
        """Writes the record; FileExistsError rather than replace one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(self.as_json(), indent=1) + "\n")


def read(path: Path) -> Record:
    """A record as it was written. ValueError names the file if it is not one."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    try:
        rows = [Row(ms=Quantiles(**row.pop("ms")), **row) for row in data.pop("rows")]
        skipped = [Skipped(**s) for s in data.pop("skipped")]
        return Record(**data, rows=rows, skipped=skipped)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a benchmark record: {error}") from None


def now() -> str:
    """The present second, UTC, ISO 8601."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit_of(directory: Path) -> tuple[str, bool]:
    """Commit of a checkout and whether it has changes; ("unknown", True) outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True

"""`kernel-fun verify`: run the GPU tests and, if all pass, write the ledger."""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from kernel_fun._cli.screen import Screen

HELP = "run the GPU tests of a checkout and write down which kernel sources passed"

TESTS = (
    "tests/_cute/test_packing.py",
    "tests/kda/_kernels/sm90",
    "tests/kda/test_hopper.py",
    "tests/kda/test_sequence_split.py",
    "tests/kda/test_context_parallel.py",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--checkout", type=Path, default=Path("."), metavar="DIR", help="where tests/ is (default: .)")
    add("--out", type=Path, default=None, metavar="FILE", help="default: the ledger of the checkout")
    add("pytest", nargs="*", metavar="PYTEST_ARGUMENT", help="after --, passed on to pytest")


def run(args: argparse.Namespace, screen: Screen) -> tuple[int, dict[str, Any]]:
    import torch

    from kernel_fun._common import cache, device, ledger
    from kernel_fun.kda._kernels.sm90.launched import KERNELS

    tests = [str(args.checkout / t) for t in TESTS]
    absent = [t for t in tests if not Path(t).exists()]
    if absent:
        raise ValueError(f"`--checkout` must hold the tests, {absent[0]} is not there")
    if not torch.cuda.is_available() or device.of(torch.device("cuda")).arch != "sm90":
        raise ValueError("the kernels are for sm90 (H100, H200): no such device here, nothing was verified")
    sources = {stage: ledger.sources(modules) for stage, modules in KERNELS.items()}
    counts = _pytest(tests, args.pytest)
    screen.line(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    found: dict[str, Any] = {"tests": counts, "verified": []}
    if counts["failed"] or counts["skipped"] or not counts["passed"]:
        screen.line("the ledger is unchanged: every test must pass and none may be skipped", "red")
        return 1, found
    utc = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    versions = {**cache.versions(), "torch": torch.__version__}
    gpu = torch.cuda.get_device_name()
    entries = {stage: ledger.Verified(sources[stage], gpu, utc, versions) for stage in KERNELS}
    out = args.out or args.checkout / "src/kernel_fun/kda/_provenance.py"
    out.write_text(ledger.text("KDA", entries), encoding="utf-8")
    screen.line(f"{', '.join(entries)} on {gpu}: written to {out}")
    return 0, {**found, "verified": list(entries), "out": str(out)}


def _pytest(tests: list[str], more: list[str]) -> dict[str, int]:
    """Runs the tests in their own process; counts of passed, failed (errors too) and skipped."""
    with tempfile.TemporaryDirectory(prefix="kernel-fun-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "sm90", f"--junitxml={report}", *more, *tests]
        status = subprocess.run(command, check=False, stdout=sys.stderr).returncode
        if not report.exists():
            raise ValueError(f"pytest ended with status {status} and no report: {' '.join(command)}")
        suite = next(ET.parse(report).getroot().iter("testsuite"))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    failed += status not in (0, 1) and not failed
    skipped = int(suite.get("skipped", 0))
    return {"passed": int(suite.get("tests", 0)) - failed - skipped, "failed": failed, "skipped": skipped}

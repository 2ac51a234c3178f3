"""Size budgets of the sources: prints what is near or over them, fails on what is over.

    file                500 lines
    function            60 lines, 120 in kernel files (a role reads top to bottom)
    parameters          12; in kernel files a device function takes each tensor by itself
    two files           no run of 20 identical code lines

A file that reads better longer says why in one comment, `# sizes: the reason`; its excess is then
printed with that reason and does not fail.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("src", "benchmarks", "tools")

FILE_LINES = 500
FUNCTION_LINES = 60
KERNEL_FUNCTION_LINES = 120
PARAMETERS = 12
SHARED_RUN = 20

_KERNEL = re.compile(r"_kernels/(sm\d+|triton)/|/_cute/|/_triton/")
_REASON = re.compile(r"^\s*# sizes: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Excess:
    """One budget that is exceeded, and the reason its file gives, if any."""

    where: str
    what: str
    size: int
    budget: int
    reason: str | None

    def __str__(self) -> str:
        excuse = f"  ({self.reason})" if self.reason else "  OVER BUDGET"
        return f"{self.where}: {self.what} {self.size} > {self.budget}{excuse}"


def excesses(root: Path) -> list[Excess]:
    """Everything over budget below `root`."""
    files = sorted(p for place in PLACES for p in (root / place).rglob("*.py"))
    found = [e for path in files for e in _of_file(path, root)]
    return found + list(_shared_runs(files, root))


def _of_file(path: Path, root: Path) -> Iterator[Excess]:
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(root).as_posix()
    reason = reason_of(text)
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield Excess(name, "lines", lines, FILE_LINES, reason)
    is_kernel = _KERNEL.search(name) is not None
    budget = KERNEL_FUNCTION_LINES if is_kernel else FUNCTION_LINES
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{name}:{node.lineno} {node.name}"
        size = code_lines(node)
        if size > budget:
            yield Excess(where, "lines", size, budget, reason)
        arguments = node.args
        count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
        if count > PARAMETERS and not is_kernel:
            yield Excess(where, "parameters", count, PARAMETERS, reason)


def reason_of(text: str) -> str | None:
    """The reason a file gives for its size, or None."""
    match = _REASON.search(text)
    return match.group(1).strip() if match else None


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.end_lineno:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def _shared_runs(files: Sequence[Path], root: Path) -> Iterator[Excess]:
    """Pairs of files that share a run of identical code lines; the longest run of each pair."""
    code = {path: _code(path) for path in files}
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = {}
    for path, lines in code.items():
        for i in range(len(lines) - SHARED_RUN):
            places.setdefault(tuple(lines[i : i + SHARED_RUN + 1]), []).append((path, i))
    pairs = sorted((a, b, i) for where in places.values() for a, i in where for b, _ in where if a < b)
    for (a, b), windows in groupby(pairs, key=lambda pair: pair[:2]):
        run = _longest_streak([i for _, _, i in windows]) + SHARED_RUN
        names = [p.relative_to(root).as_posix() for p in (a, b)]
        reason = next((r for p in (a, b) if (r := reason_of(p.read_text(encoding="utf-8")))), None)
        yield Excess(" and ".join(names), "identical code lines", run, SHARED_RUN, reason)


def _code(path: Path) -> list[str]:
    """Lines that are code: no blanks, comments or imports."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [s for s in lines if s and not s.startswith(("#", "import ", "from "))]


def _longest_streak(numbers: list[int]) -> int:
    best = length = 1
    for before, after in zip(numbers, numbers[1:], strict=False):
        length = length + 1 if after == before + 1 else 1
        best = max(best, length)
    return best


def largest(root: Path, count: int = 10) -> list[tuple[int, str]]:
    """The longest files, longest first."""
    files = [p for place in PLACES for p in (root / place).rglob("*.py")]
    sizes = [(p.read_text(encoding="utf-8").count("\n"), p.relative_to(root).as_posix()) for p in files]
    return sorted(sizes, reverse=True)[:count]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; 1 if anything is over budget without a reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT)
    root: Path = parser.parse_args(argv).root
    for lines, name in largest(root):
        print(f"{lines:5}  {name}")
    found = excesses(root)
    for excess in found:
        print(excess)
    return 1 if any(excess.reason is None for excess in found) else 0


if __name__ == "__main__":
    sys.exit(main())

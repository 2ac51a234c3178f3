"""Renders the tables of README.md and docs/scaling.md from the dispatch table and the newest records.

`python tools/render.py` rewrites the text between each `<!-- render:NAME -->` and `<!-- /render -->`;
`--check` changes nothing and fails if anything would change.

    support      who serves which call on which device, from kernel_fun.kda.dispatch
    speed-cpu    newest rows of benchmarks/results/ measured on CPUs
    speed-gpu   the same for GPUs
    ranks        newest rows that one and several ranks of a context-parallel group share
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from kernel_fun._common import compat, config, device, support  # noqa: E402
from kernel_fun._common.plan import BackendUnavailable  # noqa: E402
from kernel_fun.bench import record  # noqa: E402
from kernel_fun.bench.record import Record, Row  # noqa: E402
from kernel_fun.kda import dispatch  # noqa: E402
from kernel_fun.kda.call import Problem  # noqa: E402

_BLOCK = re.compile(r"(<!-- render:([\w-]+) -->\n)(.*?)(<!-- /render -->)", re.DOTALL)


# ----------------------------------------------------------------------------------------- support

_LAYER = Problem(
    1, 8192, 16, 16, 128, 128, gate="softplus", beta_mode="sigmoid", l2norm=True, needs_grad=True
)


def _typed(dtype: str) -> Problem:
    return replace(_LAYER, dtypes=(dtype,) * 5)


CALLS: dict[str, Problem] = {
    "bf16, K = V = 128, training": _LAYER,
    "bf16, K = 128, V = 256, training": replace(_LAYER, V=256),
    "fp16, K = V = 64, training": replace(_typed("float16"), K=64, V=64),
    "bf16, inference": replace(_LAYER, needs_grad=False),
    "packed sequences, initial and final state": replace(_LAYER, N=20, has_h0=True, wants_ht=True),
    "grouped value heads (HV = 2 H)": replace(_LAYER, HV=32),
    "bounded gate, `safe_gate`": replace(_LAYER, gate="bounded"),
    "given log decay, raw beta": replace(_LAYER, gate="log", beta_mode="raw", l2norm=False),
    "`return_intermediate_states`": replace(_LAYER, needs_grad=False, wants_h=True),
    "other head sizes, such as K = 100, V = 60": replace(_LAYER, K=100, V=60),
    "fp32": _typed("float32"),
    "fp64": _typed("float64"),
    "`cp_context`": replace(_LAYER, context_parallel=True),
}

DEVICES = {
    "Hopper": device.named("sm90"),
    "Blackwell": device.named("sm100"),
    "other CUDA": device.named("sm80"),
    "CPU": device.named("cpu"),
}


def support_table() -> list[str]:
    """Who serves each call, from the dispatcher itself, with every optional package installed."""
    lines = [
        "| `chunk_kda` | " + " | ".join(DEVICES) + " |",
        "|---" * (len(DEVICES) + 1) + "|",
    ]
    for what, problem in CALLS.items():
        cells = (_served_by(problem, where) for where in DEVICES.values())
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return lines


def _served_by(problem: Problem, where: device.Device) -> str:
    """The backend with fla installed and, where it differs, without."""
    answers = list(dict.fromkeys(_backend(problem, where, fla) for fla in (True, False)))
    return answers[0] if len(answers) == 1 else f"{answers[0]}, without it {answers[1]}"


def _backend(problem: Problem, where: device.Device, fla: bool) -> str:
    with _everything_installed(except_for=() if fla else ("fla",)):
        try:
            return dispatch.plan(problem, where).backend
        except (BackendUnavailable, NotImplementedError):
            return "refused"


@contextlib.contextmanager
def _everything_installed(except_for: tuple[str, ...]) -> Generator[None]:
    """Plans as on a machine with every extra, whatever this one has; switches at their defaults."""

    def missing(need: str) -> str | None:
        return f"{need} not installed" if need in except_for else None

    def keywords(op: compat.FlaOp) -> frozenset[str] | None:
        return frozenset((*op.parameters, *op.keywords)) if "fla" not in except_for else None

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(support, "missing", missing))
        stack.enter_context(patch.object(compat, "keywords", keywords))
        for switch in config.SWITCHES:
            stack.enter_context(switch.set(switch.default))
        yield


# ------------------------------------------------------------------------------------------- speed


@dataclass(frozen=True)
class Measured:
    """A row and the record it stands in."""

    row: Row
    record: Record

    @property
    def case(self) -> tuple[str, str, str, str, str]:
        r = self.row
        return (self.record.gpu, r.shape, r.gate, r.dtype, r.bench)


def newest(kind: str, root: Path, *, of_each: bool = False) -> dict[tuple[str, ...], dict[str, Measured]]:
    """Per device, shape, gate, dtype and bench: the rows of the newest record that has the case, or
    ``of_each`` candidate its newest."""
    paths = (root / "benchmarks" / "results").rglob("*.json")
    records = sorted((record.read(path) for path in paths), key=lambda r: r.utc)
    cases: dict[tuple[str, ...], dict[str, Measured]] = {}
    for taken in records:
        if taken.device != kind:
            continue
        fresh: dict[tuple[str, ...], dict[str, Measured]] = {}
        for row in taken.rows:
            measured = Measured(row, taken)
            fresh.setdefault(measured.case, {})[row.candidate] = measured
        for case, rows in fresh.items():
            cases[case] = {**cases.get(case, {}), **rows} if of_each else rows
    return cases


PEERS = ("fla", "transformers")
_ON_RANKS = re.compile(r"(?P<what>.*), (?P<ranks>\d+) ranks?(?P<part>.*)")
"""The bench of a row of `kernel-fun bench --cp`."""


def speed_table(kind: str, root: Path) -> list[str]:
    """Ours beside the strongest peer of the same record; a note names device, versions and date."""
    cases = {case: rows for case, rows in newest(kind, root).items() if not _ON_RANKS.fullmatch(case[-1])}
    if not cases:
        return ["*(no record yet)*"]
    lines = [
        "| shape | gate | bench | ours | ms | peer | ms | times faster | memory | peer's memory |",
        "|---|---|---|---|--:|---|--:|--:|--:|--:|",
    ]
    for case in sorted(cases):
        lines.extend(_speed_line(cases[case]))
    notes = dict.fromkeys(_note(m.record) for rows in cases.values() for m in rows.values())
    return [*lines, "", *notes]


def _speed_line(rows: dict[str, Measured]) -> list[str]:
    ours = min((m.row for n, m in rows.items() if n not in PEERS), key=lambda r: r.ms.p50, default=None)
    peer = next((rows[n].row for n in PEERS if n in rows), None)
    if ours is None:
        return []
    sizes = _suite_shapes().get(ours.shape, ours.shape)
    cells = [sizes, ours.gate, ours.bench, ours.candidate, _ms(ours)]
    if peer is None:
        return [_cells([*cells, "-", "-", "-", _memory(ours), "-"])]
    faster = f"{peer.ms.p50 / ours.ms.p50:.1f}"
    return [_cells([*cells, peer.candidate, _ms(peer), faster, _memory(ours), _memory(peer)])]


def ranks_table(root: Path) -> list[str]:
    """Milliseconds of one rank and of several, and the share of their time that one would have needed."""
    found = newest("cuda", root, of_each=True)  # the two times that are divided are of one record either way
    cases = {case: rows for case, rows in found.items() if _ON_RANKS.fullmatch(case[-1])}
    if not cases:
        return ["*(no record yet)*"]
    ms = {
        (*case[1:3], name, *match.group("what", "ranks", "part")): measured.row.ms.p50
        for case, rows in cases.items()
        for name, measured in rows.items()
        if (match := _ON_RANKS.fullmatch(case[-1]))
    }
    lines = ["| shape | gate | bench | who | ranks | ms of one | ms | efficiency | of it in all-gathers |"]
    lines.append("|---|---|---|---|--:|--:|--:|--:|--:|")
    for key in sorted(ms):
        shape, gate, name, what, ranks, part = key
        alone = ms.get((shape, gate, name, what, "1", part))
        if part or ranks == "1" or alone is None:
            continue
        gathers = ms.get((shape, gate, name, "all-gathers", ranks, f", of {what}"))
        share = f"{100 * alone / (int(ranks) * ms[key]):.0f} %"
        waits = "-" if gathers is None else f"{gathers:.3g}"
        base, comma, layout = shape.partition(", ")
        sizes = f"{_suite_shapes().get(base, base)}{comma}{layout}"
        lines.append(_cells([sizes, gate, what, name, ranks, f"{alone:.3g}", f"{ms[key]:.3g}", share, waits]))
    notes = dict.fromkeys(_note(m.record) for rows in cases.values() for m in rows.values())
    return [*lines, "", *notes]


def _suite_shapes() -> dict[str, str]:
    from benchmarks.shapes import SHAPES

    return {name: str(shape) for name, shape in SHAPES.items()}


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ms(row: Row) -> str:
    return f"{row.ms.p50:.0f}" if row.ms.p50 >= 100 else f"{row.ms.p50:.3g}"


def _memory(row: Row) -> str:
    size = row.peak_bytes
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _note(taken: Record) -> str:
    versions = ", ".join(
        f"{name} {taken.versions[name]}"
        for name in ("torch", "fla-core", "transformers")
        if taken.versions.get(name)
    )
    dirty = " with changes" if taken.dirty else ""
    return (
        f"{taken.gpu}, {taken.threads} CPU threads, {versions}; medians of interleaved calls; memory: "
        f"{taken.memory}. Commit {taken.commit[:12]}{dirty}, {taken.utc[:10]}."
    )


# ------------------------------------------------------------------------------------------- pages

PAGES = ("README.md", "docs/scaling.md")


def rendered(text: str, root: Path) -> str:
    """A page with every block filled. ValueError names an unknown block."""
    blocks: dict[str, Callable[[], list[str]]] = {
        "support": support_table,
        "speed-cpu": lambda: speed_table("cpu", root),
        "speed-gpu": lambda: speed_table("cuda", root),
        "ranks": lambda: ranks_table(root),
    }

    def fill(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in blocks:
            raise ValueError(f"no block is called {name!r}, only {', '.join(blocks)}")
        return match.group(1) + "\n".join(blocks[name]()) + "\n" + match.group(4)

    return _BLOCK.sub(fill, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites the pages, or with `--check` says which are stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if stale")
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args(argv)
    stale = 0
    for name in PAGES:
        page: Path = args.root / name
        if not page.exists():
            continue
        before = page.read_text(encoding="utf-8")
        after = rendered(before, args.root)
        if before == after:
            continue
        if args.check:
            print(f"{page}: tables are stale, run `python tools/render.py`", file=sys.stderr)
            stale = 1
        else:
            page.write_text(after, encoding="utf-8")
            print(f"rendered {page}")
    return stale


if __name__ == "__main__":
    sys.exit(main())

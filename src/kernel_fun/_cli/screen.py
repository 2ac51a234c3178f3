"""Tables, lines and progress: drawn by rich on a terminal, plain text elsewhere and without rich."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

#: `advance(steps done, what to say about them)`.
Advance = Callable[[int, str], None]


class Screen:
    """Where a command draws.

    Args:
        file: the stream, or None for silence (`--json`).
        use_rich: whether to draw with rich; default: if it is installed and `file` is a terminal.
    """

    def __init__(self, file: TextIO | None, use_rich: bool | None = None) -> None:
        self.file = file
        wanted = file is not None and file.isatty() if use_rich is None else use_rich
        self.console: Console | None = _console(file) if file is not None and wanted else None

    def line(self, text: str = "", style: str | None = None) -> None:
        """One paragraph; `style` is a rich style such as "bold" or "red"."""
        if self.console is not None:
            self.console.print(text, style=style, markup=False, highlight=False)
        elif self.file is not None:
            self.file.write(text + "\n")
            self.file.flush()

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0
    ) -> None:
        """A titled table. The last `numbers` columns are set flush right."""
        if self.console is not None:
            _rich_table(self.console, title, columns, rows, numbers)
        elif self.file is not None:
            self.file.write(plain_table(title, columns, rows, numbers) + "\n")
            self.file.flush()

    @contextlib.contextmanager
    def progress(self, label: str, total: int) -> Generator[Advance]:
        """A bar on a terminal; elsewhere a line at each tenth."""
        if self.console is not None:
            with _rich_progress(self.console, label, total) as advance:
                yield advance
        else:
            yield self._plain_progress(label, total)

    def _plain_progress(self, label: str, total: int) -> Advance:
        tenth = max(1, total // 10)
        start = time.perf_counter()

        def advance(done: int, text: str) -> None:
            if done % tenth == 0 or done == total or done == 1:
                seconds = time.perf_counter() - start
                self.line(f"{label} {done}/{total}  {seconds:.0f} s  {text}")

        return advance


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """The table as aligned text."""
    widths = [max(len(r[i]) for r in (columns, *rows)) for i in range(len(columns))]
    left = len(columns) - numbers

    def row(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([title, row(columns), rule, *map(row, rows), ""])


def _console(file: TextIO | None) -> Console | None:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=file)


def _rich_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: int
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        justify: Any = "right" if i >= len(columns) - numbers else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_CELL_STYLES.get(cell, "")) for cell in row))
    console.print(table)


_CELL_STYLES = {
    "yes": "green",
    "pass": "green",
    "no": "yellow",
    "FAIL": "bold red",
    "DISAGREE": "bold red",
}


@contextlib.contextmanager
def _rich_progress(console: Console, label: str, total: int) -> Generator[Advance]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
    ) as bar:
        task = bar.add_task(label, total=total, text="")
        yield lambda done, text: bar.update(task, completed=done, text=text)

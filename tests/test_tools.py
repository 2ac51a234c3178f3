"""The two tools that hold the repository to its word."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kernel_fun.bench.record import Record, Row
from kernel_fun.bench.timing import Quantiles

ROOT = Path(__file__).parents[1]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


render: Any = load("render")
sizes: Any = load("sizes")


class TestSizes:
    def write(self, root: Path, name: str, text: str) -> None:
        path = root / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def found(self, root: Path) -> list[str]:
        return [str(e) for e in sizes.excesses(root)]

    def test_within_budget_is_silent(self, tmp_path: Path) -> None:
        self.write(tmp_path, "a.py", "x = 1\n" * 500)
        assert self.found(tmp_path) == []
        assert sizes.main(["--root", str(tmp_path)]) == 0

    def test_a_long_file_fails_unless_it_says_why(self, tmp_path: Path) -> None:
        self.write(tmp_path, "a.py", "x = 1\n" * 501)
        assert self.found(tmp_path) == ["src/a.py: lines 501 > 500  OVER BUDGET"]
        assert sizes.main(["--root", str(tmp_path)]) == 1
        self.write(tmp_path, "a.py", "# sizes: one table\n" + "x = 1\n" * 501)
        assert self.found(tmp_path) == ["src/a.py: lines 502 > 500  (one table)"]
        assert sizes.main(["--root", str(tmp_path)]) == 0

    def test_functions_count_without_docstrings_and_kernels_have_room(self, tmp_path: Path) -> None:
        def function(docs: int, lines: int) -> str:
            return 'def f():\n    """' + "d\n" * docs + '    """\n' + "    x = 1\n" * lines

        self.write(tmp_path, "a.py", function(100, 59))
        assert self.found(tmp_path) == []
        self.write(tmp_path, "a.py", function(0, 60))
        self.write(tmp_path, "k/_kernels/sm90/a.py", function(0, 119).replace("x", "y"))
        assert self.found(tmp_path) == ["src/a.py:1 f: lines 61 > 60  OVER BUDGET"]
        self.write(tmp_path, "k/_kernels/sm90/a.py", function(0, 120).replace("x", "y"))
        assert "src/k/_kernels/sm90/a.py:1 f: lines 121 > 120  OVER BUDGET" in self.found(tmp_path)

    def test_parameters(self, tmp_path: Path) -> None:
        names = [f"a{i}" for i in range(13)]
        self.write(tmp_path, "a.py", f"def f({', '.join(names[:12])}): ...\n")
        assert self.found(tmp_path) == []
        self.write(tmp_path, "a.py", f"def f({', '.join(names[:6])}, *, {', '.join(names[6:])}): ...\n")
        assert self.found(tmp_path) == ["src/a.py:1 f: parameters 13 > 12  OVER BUDGET"]

    def test_a_shared_run_is_found_whatever_stands_between(self, tmp_path: Path) -> None:
        run = [f"x{i} = {i}" for i in range(21)]
        self.write(tmp_path, "a.py", "import os\n" + "\n".join(run) + "\n")
        self.write(tmp_path, "b.py", "y = 0\n" + "\n# said otherwise\n".join(run[:20]) + "\n")
        assert self.found(tmp_path) == []
        self.write(tmp_path, "b.py", "y = 0\n" + "\n# said otherwise\n".join(run) + "\n")
        assert self.found(tmp_path) == ["src/a.py and src/b.py: identical code lines 21 > 20  OVER BUDGET"]


def a_record(utc: str, shape: str = "cpu_1k_h4", **ms: float) -> Record:
    rows = [
        Row("kda.fwdbwd", shape, "init_slow", "float32", name, Quantiles(t, t, t), 5, 1 << 30, None,
            None, {"o": 1e-7}, 1.0, 1.0)
        for name, t in ms.items()
    ]  # fmt: skip
    return Record(
        "A CPU", "cpu", "abcdef0123456789", False, utc, {"torch": "2.13.0", "transformers": "5.24.0"},
        {"copy_TBps": 1.0, "gemm_TFLOPs": 1.0}, "peak", 2, rows,
    )  # fmt: skip


class TestRender:
    def results(self, root: Path, *records: Record) -> None:
        for taken in records:
            taken.write(taken.default_path(root / "benchmarks" / "results"))

    def test_support_is_the_dispatcher_s_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = render.support_table()
        assert len(table) == 2 + len(render.CALLS)
        assert table[0] == "| `chunk_kda` | Hopper | Blackwell | other CUDA | CPU |"
        by_call = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in table[2:]}
        assert all(cells[-1].strip() == "eager" for cells in by_call.values())
        assert [c.strip() for c in by_call["`cp_context`"]][2:] == ["fla, without it eager", "eager"]
        assert by_call["fp64"][2].strip() == "eager"

    def test_support_does_not_depend_on_this_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = render.support_table()
        monkeypatch.setattr(render.support, "missing", lambda need: "nothing is installed")
        monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", "fla")
        monkeypatch.setenv("KERNEL_FUN_FALLBACK", "error")
        assert render.support_table() == before

    def test_the_newest_record_of_a_case_wins(self, tmp_path: Path) -> None:
        self.results(
            tmp_path,
            a_record("2026-01-02T00:00:00Z", eager=100.0, transformers=1000.0),
            a_record("2026-01-03T00:00:00Z", eager=50.0, transformers=1000.0),
            a_record("2026-01-01T00:00:00Z", shape="smoke", eager=7.0),
        )
        table = render.speed_table("cpu", tmp_path)
        (line,) = [row for row in table if "cpu_1k_h4" in row]
        assert "| eager | 50 | transformers | 1000 | 20.0 |" in line
        (line,) = [row for row in table if "smoke" in row]
        assert "| eager | 7 | - | - | - |" in line
        assert "100" not in "".join(table).replace("1000", "")
        assert sum("A CPU, 2 CPU threads" in row for row in table) == 2
        assert render.speed_table("cuda", tmp_path) == ["*(no record yet)*"]

    def test_rows_of_ranks_have_a_table_of_their_own(self, tmp_path: Path) -> None:
        def row(bench: str, ms: float) -> Row:
            return replace(a_record("", sm90=ms).rows[0], bench=bench, shape="kimi_64k")

        taken = replace(a_record("2026-01-01T00:00:00Z"), device="cuda")
        times = {"kda.fwd, 1 rank": 8.0, "kda.fwd, 2 ranks": 5.0, "all-gathers, 2 ranks, of kda.fwd": 0.5}
        taken.rows += [row(bench, ms) for bench, ms in times.items()]
        self.results(tmp_path, taken)
        assert render.speed_table("cuda", tmp_path) == ["*(no record yet)*"]
        (line,) = [text for text in render.ranks_table(tmp_path) if "kimi_64k" in text]
        assert "| kda.fwd | sm90 | 2 | 8 | 5 | 80 % | 0.5 |" in line

    def test_ranks_of_a_peer_stay_beside_newer_ones_of_ours(self, tmp_path: Path) -> None:
        for day, candidates in (("1", ("sm90", "fla")), ("2", ("sm90",))):
            taken = replace(a_record(f"2026-01-0{day}T00:00:00Z"), device="cuda")
            for name in candidates:
                for bench, ms in (("kda.fwd, 1 rank", 8.0), ("kda.fwd, 2 ranks", 4.0 + int(day))):
                    row = replace(
                        a_record("", sm90=ms).rows[0], bench=bench, shape="kimi_64k", candidate=name
                    )
                    taken.rows.append(row)
            self.results(tmp_path, taken)
        theirs, ours = (text for text in render.ranks_table(tmp_path) if "kimi_64k" in text)
        assert "| fla | 2 | 8 | 5 | 80 % |" in theirs
        assert "| sm90 | 2 | 8 | 6 | 67 % |" in ours

    def test_layouts_have_rows_of_their_own(self, tmp_path: Path) -> None:
        for day, layout, ms in (("1", "", 5.0), ("2", ", zigzag", 6.0)):
            taken = replace(a_record(f"2026-01-0{day}T00:00:00Z"), device="cuda")
            for bench, time in (("kda.fwd, 1 rank", 8.0), ("kda.fwd, 2 ranks", ms)):
                row = replace(a_record("", sm90=time).rows[0], bench=bench, shape=f"kimi_64k{layout}")
                taken.rows.append(row)
            self.results(tmp_path, taken)
        plain, zigzag = (text for text in render.ranks_table(tmp_path) if "kimi_64k" in text)
        assert "| kimi_64k (B1 T65536 H32 K128 V128) |" in plain
        assert "| 8 | 5 | 80 % |" in plain
        assert "| kimi_64k (B1 T65536 H32 K128 V128), zigzag |" in zigzag
        assert "| 8 | 6 | 67 % |" in zigzag

    def test_check_finds_a_stale_readme_and_changes_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        readme = tmp_path / "README.md"
        stale = "a\n<!-- render:speed-cpu -->\nold\n<!-- /render -->\nb\n"
        readme.write_text(stale, encoding="utf-8")
        assert render.main(["--root", str(tmp_path), "--check"]) == 1
        assert "stale" in capsys.readouterr().err
        assert readme.read_text(encoding="utf-8") == stale
        assert render.main(["--root", str(tmp_path)]) == 0
        assert readme.read_text(encoding="utf-8") == stale.replace("old", "*(no record yet)*")
        assert render.main(["--root", str(tmp_path), "--check"]) == 0

    def test_an_unknown_block_is_named(self, tmp_path: Path) -> None:
        text = "<!-- render:weather -->\n<!-- /render -->"
        with pytest.raises(ValueError, match="no block is called 'weather'"):
            render.rendered(text, tmp_path)

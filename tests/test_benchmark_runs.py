"""Benchmarks beside the records: what the host pays for a call, and the examples as they are run for a record."""

from __future__ import annotations

import csv
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_fun.bench import suite
from kernel_fun.kda import autograd

host: Any = suite.load("host")
examples: Any = suite.load("examples")
runs: Any = suite.load("runs")
CPU = torch.device("cpu")


def test_the_host_s_time_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "SMALL", {"B": 1, "T": 64, "H": 1, "K": 16, "V": 16})
    monkeypatch.setattr(host, "REPEATS", 3)
    monkeypatch.setattr(host, "WARM_S", 0.0)
    fresh = {"cold_s": 1.5}
    monkeypatch.setattr(host.probe, "in_fresh_process", lambda *what: fresh)
    backward = autograd.ChunkKDA.backward
    given = ["--device=cpu", "--candidate=eager", f"--out={tmp_path}", "--commit=c0ffee1"]
    assert host.main(given) == 0
    assert autograd.ChunkKDA.backward is backward
    (path,) = tmp_path.rglob("*-host-eager.json")
    data = json.loads(path.read_text())
    assert [case["cold_s"] for case in data["cold"]] == [1.5, 1.5]
    found = data["host_us"]
    assert len(found) > 10
    assert all(0 < microseconds < 1e7 for microseconds in found.values()), found
    assert {"forward, no graph, calls in a row", "of which backward"} < found.keys()
    assert "cold kimi_8k (B1 T8192" in capsys.readouterr().out
    with pytest.raises(FileExistsError):
        runs.write(path, data, "host")


def test_a_backward_is_timed_within_the_call_that_makes_it() -> None:
    x = host.inputs(torch.device("cpu"), B=1, T=64, H=1, K=16, V=16)
    leaves = [t for t in x.values() if isinstance(t, torch.Tensor)]
    o, _ = host.chunk_kda(**x)
    with host.backward_timed() as taken:
        start = time.perf_counter()
        torch.autograd.grad(o.sum(), leaves)
        whole = time.perf_counter() - start
    (seconds,) = taken
    assert 0 < seconds < whole


def test_autograd_alone_is_timed_without_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the time of both passes together, what is left when that of each is taken away."""
    stood = list[float]()

    def median_us(call: Callable[[], Any], device: torch.device) -> float:
        call()
        return 1000.0

    monkeypatch.setattr(host, "_stand", stood.append)
    monkeypatch.setattr(host, "median_us", median_us)
    assert host.standing_us(CPU, 300.0, 500.0) == 200
    assert stood == [300, 500]


def test_an_example_that_ran_elsewhere_or_learned_nothing_does_not_count() -> None:
    line = "kernel-fun kda: engaged (chunk_kda on sm90, NVIDIA H200: B=4 T=256 H=4 ...)"
    good = {"log": ["something", line], "losses": [5.0, 4.0, 3.0]}
    assert examples.failure(good, "sm90") is None
    assert examples.failure(good, "eager") == "chunk_kda was not engaged on eager"
    assert examples.failure({**good, "log": []}, "sm90") == "chunk_kda was not engaged on sm90"
    assert examples.failure({**good, "losses": [3.0, 3.0]}, "sm90") == "the loss went from 3.0 to 3.0"
    assert examples.failure({**good, "losses": [3.0, float("nan")]}, "sm90") is not None


def test_a_run_of_an_example_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train_fla.py").write_text(
        "import logging\n"
        "logging.getLogger('kernel_fun').info('engaged (chunk_kda on eager, CPU: ...)')\n"
        "for step, loss in enumerate((4.5, 2.25)):\n"
        "    print(f'step {step}  loss {loss:.3f}')\n"
    )
    monkeypatch.setattr(examples, "FOLDER", tmp_path)
    monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", "eager")
    out = tmp_path / "found.json"
    assert examples.main(["--backend=eager", f"--out={out}", "train_fla"]) == 0
    data = json.loads(out.read_text())
    assert data["switches"] == {"KERNEL_FUN_KDA_BACKEND": "eager"}
    assert data["runs"][0]["losses"] == [4.5, 2.25]
    assert data["runs"][0]["log"] == ["engaged (chunk_kda on eager, CPU: ...)"]
    assert "train_fla: loss 4.500 to 2.250" in capsys.readouterr().out
    assert examples.main(["--backend=sm90", "train_fla"]) == 1
    assert "chunk_kda was not engaged on sm90" in capsys.readouterr().out


ranks_benchmark: Any = suite.load("ranks")


def test_errors_over_ranks_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ranks_benchmark.TESTS / "kda"))
    shared: Any = importlib.import_module("over_ranks")
    monkeypatch.setattr(shared, "ON_HOPPER", {"packed": (0, 10, 96)})
    out = tmp_path / "found.csv"
    given = ["--device=cpu", "--backend=eager", "--ranks=2", "--seeds=2", f"--out={out}", "--commit=c0ffee1"]
    assert ranks_benchmark.main(given) == 0
    assert "one all-gather in each direction" in capsys.readouterr().out
    about, *lines = out.read_text().splitlines()
    assert about.startswith("# ")
    rows = list(csv.DictReader(lines))
    assert {r["layout"] for r in rows} == {"contiguous", "zigzag"}
    assert len(rows) == 2 * 10 * 3  # o, ht, eight gradients; of two seeds and of both
    assert {r["seed"] for r in rows} == {"0", "1", "all"}
    for r in rows:
        assert 0 < float(r["error"]) <= float(r["limit"]) < 1e-2
        assert (r["gathers_forward"], r["gathers_backward"]) == ("1", "1")


RANKS_ROW: dict[str, Any] = {
    "packing": "one",
    "layout": "zigzag",
    "ranks": 2,
    "seed": 0,
    "tensor": "dq",
    "error_of_one": 1e-3,
    "error": 1e-3,
    "limit": 2e-3,
    "gathers_forward": 1,
    "gathers_backward": 1,
}


def test_errors_of_many_seeds_have_no_allowance_for_chance() -> None:
    by_chance = {**RANKS_ROW, "tensor": "dA_log", "limit": 5e-3}
    of_eight = [{**by_chance, "seed": n, "error": 1.5e-3 if n else 4e-3} for n in range(8)]
    (row,) = ranks_benchmark.together(of_eight)
    assert row["seed"] == "all"
    assert row["error_of_one"] == pytest.approx(1e-3)
    assert (
        row["error"] == row["ratio"] * row["error_of_one"] == pytest.approx((2.25e-6 * 7 / 8 + 2e-6) ** 0.5)
    )
    assert row["limit"] == pytest.approx(1.1e-3)
    assert ranks_benchmark.failures(of_eight) == []
    assert len(ranks_benchmark.failures([row])) == 1
    assert ranks_benchmark.together(of_eight[:7])[0]["limit"] == 5e-3


def test_a_rank_that_is_less_exact_or_gathers_twice_fails() -> None:
    good = RANKS_ROW
    assert ranks_benchmark.failures([good]) == []
    assert ranks_benchmark.failures([{**good, "error": 3e-3}]) == [
        "one, zigzag, 2 ranks, seed 0: error of dq 3.000e-03 > 2.000e-03"
    ]
    assert len(ranks_benchmark.failures([{**good, "error": float("nan")}])) == 1
    assert ranks_benchmark.failures([{**good, "gathers_backward": 2}] * 2) == [
        "one, zigzag, 2 ranks, seed 0: 1 and 2 all-gathers, not one a direction"
    ]


compiled_benchmark: Any = suite.load("compiled")


def test_breaks_graphs_and_bits_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled_benchmark, "SIZES", {"H": 1, "K": 8, "V": 8})
    monkeypatch.setattr(compiled_benchmark, "WIDTH", 16)
    monkeypatch.setattr(compiled_benchmark, "LENGTHS", (70, 80, 66))
    out = tmp_path / "found.json"
    given = ["--device=cpu", "--backend=eager", "--compiler=aot_eager", f"--out={out}", "--commit=c0ffee1"]
    assert compiled_benchmark.main(given) == 0
    data = json.loads(out.read_text())
    assert len(data["cases"]) == 3
    for case in data["cases"]:
        assert (case["graphs"], case["breaks"], case["differ"], case["failure"]) == (2, 0, [], None)
        assert [x["tensors"] for x in case["lengths"]] == [12 if "layers" in case["case"] else 10] * 3
    assert "engaged (chunk_kda on eager" in data["log"][0]
    assert "2 graphs, 0 breaks, the bits of eager mode" in capsys.readouterr().out


def test_a_case_that_breaks_recompiles_or_differs_does_not_count() -> None:
    good = {"graphs": 2, "breaks": 0, "differ": []}
    assert compiled_benchmark._why_not(good) is None
    assert compiled_benchmark._why_not({**good, "breaks": 1}) == "1 graph breaks"
    assert compiled_benchmark._why_not({**good, "graphs": 3}) == "3 graphs, more than one recompile"
    differ = [{"T": 70, "tensor": "dq"}, {"T": 80, "tensor": "dq"}, {"T": 80, "tensor": "dk"}]
    assert compiled_benchmark._why_not({**good, "differ": differ}) == "other bits than in eager mode: dq, dk"


def test_a_compiler_that_cannot_run_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("no C compiler here")

    monkeypatch.setitem(compiled_benchmark.CASES, "chunk_kda", broken)
    found = compiled_benchmark.run("chunk_kda", "aot_eager", CPU)
    assert found["failure"] == "OSError: no C compiler here"


cold_benchmark: Any = suite.load("cold")


@pytest.mark.parametrize("family, shape", [("cconv", "cpu_2k_d256"), ("kda", "cpu_1k_h4")])
def test_first_calls_are_timed_in_fresh_processes(
    family: str,
    shape: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cold_benchmark, "WARM", 0)
    out = tmp_path / "found.json"
    given = [
        family,
        "--device=cpu",
        "--backend=eager",
        f"--shape={shape}",
        f"--out={out}",
        "--commit=c0ffee1",
    ]
    assert cold_benchmark.main(given) == 0
    data = json.loads(out.read_text())
    caches = [(p["cache"], p["after_a_backward_of_torch"]) for p in data["processes"]]
    assert caches == [("empty", False), ("warm", True)]
    for p in data["processes"]:
        assert p["call_s"] == p["forward_s"] + p["backward_s"] > 0
        assert p["call_s"] + p["import_s"] <= p["from_import_s"] + 1e-3 < p["process_s"]
        assert ("backward_of_torch_s" in p) == p["after_a_backward_of_torch"]
    assert "warm cache, after a backward of torch's own: call" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="in a fresh process: ValueError: not enough values"):
        cold_benchmark.in_fresh_process(family, (1, 8), "cpu", "eager", tmp_path, False)

"""The comparison of errors: what it writes, and which launch configs it hands to fla."""

from __future__ import annotations

import csv
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_fun.bench import suite

accuracy: Any = suite.load("accuracy")
kept: Any = suite.load("kept")


def test_rows_are_written_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that dies at the second length leaves the rows of the first."""
    monkeypatch.setattr(accuracy, "HEADS", {"H": 2, "HV": 2, "K": 16, "V": 16})
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    real = accuracy.rows
    lengths: list[int] = []

    def rows(
        candidate: str, peer: str, regime: str, T: int, device: torch.device, initial_state: bool
    ) -> Any:
        lengths.append(T)
        if T == 16:
            raise KeyboardInterrupt
        return real(candidate, peer, regime, T, device, initial_state)

    monkeypatch.setattr(accuracy, "rows", rows)
    out = tmp_path / "found.csv"
    given = ["--candidate=eager", "--peer=eager", "--device=cpu", "--regime=bounded", f"--out={out}"]
    with pytest.raises(KeyboardInterrupt):
        accuracy.main([*given, "--length=15", "--length=16"])
    assert lengths == [15, 16]
    header, *lines = out.read_text().splitlines()
    found = list(csv.DictReader(lines))
    assert header.startswith("# ")
    assert {r["tensor"] for r in found} == {"o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"}
    assert {(r["regime"], r["T"], r["seeds"]) for r in found} == {("bounded", "15", "16")}
    assert all(float(r["error"]) == 0 for r in found)  # the truth is the eager backend
    assert capsys.readouterr().out.startswith("bounded T15 o ")


def test_the_gradient_of_an_initial_state_is_compared_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "HEADS", {"H": 2, "HV": 2, "K": 16, "V": 16})
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    out = tmp_path / "found.csv"
    given = ["--candidate=eager", "--peer=eager", "--device=cpu", "--regime=spikes", "--length=15"]
    accuracy.main([*given, "--initial-state", f"--out={out}"])
    header, *lines = out.read_text().splitlines()
    assert header.endswith("from an initial state")
    (row,) = (r for r in csv.DictReader(lines) if r["tensor"] == "dh0")
    assert float(row["error"]) == 0


def _kept(folder: Path, results: list[tuple[str, list[Any], dict[int, float]]]) -> Path:
    """An archive of search results: kernel, key, and time by number of warps."""
    path = folder / "kept.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        for i, (kernel, key, times) in enumerate(results):
            timings = [[{"kwargs": {}, "num_warps": w}, [t, t, t]] for w, t in times.items()]
            content = json.dumps({"key": key, "configs_timings": timings}).encode()
            member = tarfile.TarInfo(f"./{i}/{kernel}.autotune.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_fla_gets_the_fastest_config_of_a_problem_like_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLA_CONFIG_DIR", raising=False)
    monkeypatch.setenv("FLA_CACHE_MODE", "strict")
    archive = _kept(
        tmp_path,
        [
            ("scan", [16, 128, 256], {1: 0.1, 2: 0.3}),
            ("scan", [32, 128, 128], {4: 0.3, 8: 0.2}),
            ("scan", [96, 128, 128], {16: 0.1}),
            ("norm", [128, 24], {2: 1.0}),
        ],
    )
    with kept.kept_configs([archive], 32, 128, exactly=False) as folder:
        assert os.environ["FLA_CONFIG_DIR"] == str(folder)
        assert os.environ["FLA_CACHE_MODE"] == "default"
        found = {p.stem: json.loads(p.read_text())["default_config"]["num_warps"] for p in folder.iterdir()}
    assert found == {"scan": 8, "norm": 2}
    assert "FLA_CONFIG_DIR" not in os.environ
    assert os.environ["FLA_CACHE_MODE"] == "strict"
    assert not folder.exists()


def test_fla_gets_what_was_chosen_for_a_call_or_for_one_like_it(tmp_path: Path) -> None:
    """As its own code reads the folder."""
    cache = pytest.importorskip("fla.ops.utils.cache")
    long, short = [32, 128, True, "torch.bfloat16"], [32, 64, True, "torch.bfloat16"]
    archive = _kept(
        tmp_path,
        [
            ("scan", long, {4: 0.3, 8: 0.2}),
            ("scan", short, {1: 0.1, 2: 0.3}),
            ("scan", [16, 128, True, "torch.bfloat16"], {16: 0.1}),
        ],
    )
    with kept.kept_configs([archive], 32, 128, exactly=True) as folder:
        assert os.environ["FLA_CACHE_MODE"] == "full"
        held = cache.KernelConfigFile.from_file(folder / "scan.json")
        assert [
            held.lookup_exact(cache.AutotuneKey(tuple(k)))["config"]["num_warps"] for k in (long, short)
        ] == [8, 1]
        assert held.lookup_exact(cache.AutotuneKey((16, 128, True, "torch.bfloat16"))) is None
        assert held.default_config["num_warps"] in (1, 8)


@pytest.mark.parametrize("exactly", [False, True])
def test_what_is_kept_covers_the_kernels_of_fla(exactly: bool) -> None:
    cache = pytest.importorskip("fla.ops.utils.cache")
    with kept.kept_configs(kept.archives(), 32, 128, exactly=exactly) as folder:
        files = sorted(folder.iterdir())
        assert len(files) == 18
        for file in files:
            config = cache.KernelConfigFile.from_file(file)
            assert config is not None
            assert {"kwargs", "num_warps", "num_stages", "num_ctas"} <= config.default_config.keys()

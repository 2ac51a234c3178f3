"""The benchmark: a wrong candidate has no time, a record is what the protocol says it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_fun import cli, testing
from kernel_fun._common import config
from kernel_fun.bench import machine, plot, probe, record, runner, suite, timing
from kernel_fun.bench.record import Record, Row, Skipped
from kernel_fun.bench.suite import Candidate, Case, Outputs, Work
from kernel_fun.bench.timing import Quantiles
from kernel_fun.kda import chunk_kda, reference

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
FP32 = torch.float32

kda: Any = suite.load("kda")


def a_row(**changes: Any) -> Row:
    row = Row(
        bench="kda.fwd", shape="cpu_1k_h4", gate="bounded", dtype="float32", candidate="eager",
        ms=Quantiles(1.0, 2.0, 3.0), rounds=5, peak_bytes=1 << 20, host_us=None, cold_s=0.5,
        error={"o": 1e-7}, flops=1e9, bytes=1e6,
    )  # fmt: skip
    return replace(row, **changes)


def a_record(*rows: Row, **changes: Any) -> Record:
    taken = Record(
        gpu="Some CPU, 2 cores", device="cpu", commit="0123456789abcdef", dirty=False,
        utc="2026-01-02T03:04:05Z", versions={"kernel-fun": "0.1.0", "torch": "2.13.0", "fla-core": None},
        ceilings={"copy_TBps": 0.02, "gemm_TFLOPs": 0.1}, memory="peak", threads=2, rows=list(rows),
    )  # fmt: skip
    return replace(taken, **changes)


class TestSuite:
    def test_packed_lengths_fill_their_shape(self) -> None:
        for shape in kda.SHAPES.values():
            assert shape.HV % shape.H == 0
            if shape.lengths is not None:
                assert sum(shape.lengths) == shape.T
                assert shape.B == 1

    def test_defaults_are_shapes(self) -> None:
        assert all(name in kda.SHAPES for names in kda.DEFAULT.values() for name in names)

    @pytest.mark.parametrize("gate", kda.GATES)
    def test_gate_regimes_are_what_they_say(self, gate: str) -> None:
        case = kda.case(kda.SHAPES["smoke"], gate, FP32, CPU)
        a = case.arguments
        assert a["A_log"].exp().min() >= 1
        assert a["A_log"].exp().max() <= 16
        assert a["g"].mean().abs() < 0.05
        assert a["g"].std() == pytest.approx(1, abs=0.05)
        bias = torch.nn.functional.softplus(a["dt_bias"])
        if gate == "init_slow":
            assert bias.min() >= 1e-3 * 0.999
            assert bias.max() <= 1e-1 * 1.001
        else:
            assert not a["dt_bias"].any()
        assert a.get("lower_bound") == (-5.0 if gate == "bounded" else None)

    def test_inputs_are_the_same_for_every_process(self) -> None:
        first, second = (kda.case(kda.SHAPES["smoke"], "init_slow", FP32, CPU) for _ in range(2))
        assert all(torch.equal(first.arguments[n], second.arguments[n]) for n in ("q", "g", "dt_bias"))
        assert torch.equal(first.upstream["do"], second.upstream["do"])

    def test_an_unknown_gate_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`gate` must be one of softplus_random"):
            kda.case(kda.SHAPES["smoke"], "open", FP32, CPU)

    def test_floors_by_hand(self) -> None:
        shape = replace(kda.SHAPES["smoke"], B=1, T=1, H=1, HV=1, K=2, V=4)
        forward = kda.work(shape, "fwd", torch.bfloat16)
        assert forward.flops == 2 * (64 * (3 * 2 + 2 * 4) + 64**2 + 3 * 2 * 4)
        assert forward.bytes == 2 * (2 + 2 + 4 + 2 + 1) + 2 * 4  # q k v g beta, o
        both = kda.work(shape, "fwdbwd", torch.bfloat16)
        assert both.bytes == 3 * 22 + 8 + 8  # inputs read twice, gradients written, o, do
        assert both.flops > 2 * forward.flops

    @pytest.mark.parametrize("shape", ["smoke", "smoke_packed"])
    @pytest.mark.parametrize("gate", kda.GATES)
    def test_transformers_candidate_does_the_same_work(self, shape: str, gate: str) -> None:
        pytest.importorskip("transformers.models.kimi_linear")
        case = kda.case(kda.SHAPES[shape], gate, FP32, CPU)
        found = {"transformers": kda.caller("transformers", case, "fwdbwd")()}
        errors = kda.errors(case, "fwdbwd", found)["transformers"]
        assert set(errors) == {"o", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"}
        assert max(errors.values()) < 1e-3

    @pytest.mark.parametrize("what", kda.PASSES)
    def test_a_step_is_the_operation_of_the_candidate(
        self, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = kda.case(kda.SHAPES["smoke"], "softplus_random", FP32, CPU)
        found = kda.caller("eager", case, what)()
        asked: list[str] = []
        monkeypatch.setattr(
            kda, "chunk_kda", lambda **x: asked.append(config.KDA_BACKEND.read()) or chunk_kda(**x)
        )
        with kda.step("eager", case, what) as step:
            made = step()
        assert asked == ["eager"]
        if what == "fwd":
            assert torch.equal(made[0], found["o"])
        else:
            assert torch.equal(made[0], found["dq"])
            assert len(made) == len(found) - 1

    def test_segmented_oracle_is_the_recurrence(self) -> None:
        case = kda.case(kda.SHAPES["smoke_packed"], "softplus_random", FP32, CPU)
        truth = testing.run(reference.recurrent, case.arguments, do=case.upstream["do"], double=True)
        errors = kda.errors(case, "fwdbwd", {"oracle": truth})["oracle"]
        assert max(errors.values()) < 1e-13

    @pytest.mark.parametrize("head", [0, -1])
    def test_sampled_heads_see_a_mistake(self, head: int, monkeypatch: pytest.MonkeyPatch) -> None:
        shape = replace(kda.SHAPES["smoke"], T=70, H=3, HV=6, K=16, V=16)
        monkeypatch.setattr(type(shape), "token_heads", property(lambda self: 10**6))
        case = kda.case(shape, "softplus_random", FP32, CPU)
        found = kda.caller("eager", case, "fwdbwd")()
        assert max(kda.errors(case, "fwdbwd", {"x": found})["x"].values()) < 1e-4
        for name in ("o", "dq", "dg", "dA_log", "ddt_bias"):
            wrong = dict(found)
            wrong[name] = found[name].clone()
            if name in ("dA_log", "ddt_bias"):
                wrong[name][head] += 1
            else:
                wrong[name][:, :, head] *= 1.1
            assert kda.errors(case, "fwdbwd", {"x": wrong})["x"][name] > 1e-3, name

    def test_our_limits_are_the_tolerance_table(self) -> None:
        for dtype in (FP32, torch.bfloat16, torch.float16):
            case = kda.case(kda.SHAPES["smoke"], "bounded", dtype, CPU)
            for tensor in ("o", "dq", "dg", "dA_log"):
                assert case.limits[tensor] == testing.TOLERANCE["kda", tensor, dtype].relative
                for peer in ("fla", "transformers"):
                    assert case.limits[tensor] <= case.peer_limits[peer][tensor]

    def test_candidates_here(self) -> None:
        found = {c.name: c for c in kda.candidates(CPU)}
        assert found["eager"].why_not is None
        assert found["sm90"].why_not is not None
        assert found["fla"].why_not is not None


class TestTiming:
    def test_quantiles(self) -> None:
        assert Quantiles.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Quantiles(1.8, 3.0, pytest.approx(4.2))
        with pytest.raises(ValueError, match="no sample"):
            Quantiles.of([])

    def test_candidates_alternate_and_the_first_rotates(self) -> None:
        order: list[str] = []
        calls = {name: lambda name=name: order.append(name) for name in "abc"}
        samples = timing.interleaved(calls, CPU, seconds=0.0, least=3, most=3)
        assert "".join(order) == "abcbcacab"
        assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3, "c": 3}

    def test_time_is_bounded(self) -> None:
        calls = {"a": lambda: None}
        assert len(timing.interleaved(calls, CPU, seconds=0.0, least=2, most=100)["a"]) == 2
        assert len(timing.interleaved(calls, CPU, seconds=60.0, least=2, most=7)["a"]) == 7

    def test_host_time_is_not_claimed_where_the_host_computes(self) -> None:
        assert timing.host_us(lambda: None, CPU) is None


class TestProbe:
    def test_a_fresh_process_measures_time_and_memory(self) -> None:
        found = probe.in_fresh_process("kda", "smoke", "bounded", "float32", "cpu", "eager", "fwd")
        assert found["cold_s"] > 0
        o_bytes = 150 * 4 * 48 * 4
        assert o_bytes <= found["peak_bytes"] < 1 << 30

    def test_a_failure_is_reported(self) -> None:
        with pytest.raises(RuntimeError, match=r"sm90 in a fresh process: .*sm90"):
            probe.in_fresh_process("kda", "smoke", "bounded", "float32", "cpu", "sm90", "fwd")

    @pytest.mark.parametrize("forgets", [True, False])
    def test_peak_memory_follows_what_is_alive(self, forgets: bool) -> None:
        """In a fresh process, as the probe: in an old one a block may lie where others were, and add nothing."""
        done = subprocess.run(
            [sys.executable, "-c", GROWTH, "" if forgets else "refuse"],
            capture_output=True,
            text=True,
            check=True,
        )
        grown = int(done.stdout)
        assert grown + (1 << 20) >= 64 << 20
        assert not forgets or grown < 90 << 20


GROWTH = """
import sys, torch
from kernel_fun.bench import probe

def refused(*_, **__):
    raise PermissionError("clear_refs")

if sys.argv[1]:  # a kernel that keeps the peak: 100 MiB more were there before
    probe.Path.write_text = refused
    torch.ones(100 << 20, dtype=torch.uint8)
before = probe._resident()
block = torch.ones(64 << 20, dtype=torch.uint8)
print(probe._peak_resident() - before)
"""


@dataclass(frozen=True)
class FakeShape:
    name: str = "s"


class FakeFamily:
    """Right, wrong, as wrong but allowed to be, not a number, and one that raises."""

    NAME = "fake"
    PASSES = ("fwd",)
    GATES = ("g",)
    SHAPES: Mapping[str, Any] = {"s": FakeShape()}
    DEFAULT: Mapping[str, tuple[str, ...]] = {"cpu": ("s",)}

    def __init__(self) -> None:
        self.timed: list[str] = []

    def case(self, shape: Any, gate: str, dtype: torch.dtype, device: torch.device) -> Case:
        return Case(shape, gate, {}, {}, {"o": 1e-3}, {"lenient": {"o": 0.2}})

    def candidates(self, device: torch.device) -> list[Candidate]:
        return [Candidate(n) for n in ("right", "wrong", "lenient", "nan", "raises")] + [
            Candidate("absent", "no such thing")
        ]

    def caller(self, candidate: str, case: Case, what: str) -> Callable[[], Outputs]:
        def call() -> Outputs:
            self.timed.append(candidate)
            if candidate == "raises":
                raise NotImplementedError("it cannot\nand more")
            return {
                "o": torch.tensor(
                    {"right": 1.0, "wrong": 1.1, "lenient": 1.1, "nan": float("nan")}[candidate]
                )
            }

        return call

    def step(self, candidate: str, case: Case, what: str) -> AbstractContextManager[Callable[[], object]]:
        return nullcontext(self.caller(candidate, case, what))

    def errors(self, case: Case, what: str, found: Mapping[str, Outputs]) -> dict[str, dict[str, float]]:
        one = torch.tensor(1.0)
        return {n: {"o": testing.relative_error(one, x["o"])} for n, x in found.items()}

    def work(self, shape: Any, what: str, dtype: torch.dtype) -> Work:
        return Work(1.0, 1.0)


class TestGate:
    @pytest.fixture
    def taken(self, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeFamily, Record]:
        family = FakeFamily()
        monkeypatch.setattr(suite, "load", lambda name: family)
        monkeypatch.setattr(timing, "ceilings", lambda device: {"copy_TBps": 1.0, "gemm_TFLOPs": 1.0})
        monkeypatch.setattr(probe, "in_fresh_process", lambda *a: {"cold_s": 1.0, "peak_bytes": 2})
        request = runner.Request("fake", ["s"], ["g"], ["fwd"], FP32, CPU, None, seconds=0.01, cold=False)
        return family, runner.measure(request, lambda text: None)

    def test_only_what_is_right_is_timed(self, taken: tuple[FakeFamily, Record]) -> None:
        family, result = taken
        assert [row.candidate for row in result.rows] == ["right", "lenient"]
        assert family.timed.count("wrong") == family.timed.count("nan") == 1
        assert family.timed.count("right") > 5

    @pytest.mark.parametrize("peer", ["fla", "eager"])
    def test_a_peer_that_tunes_for_minutes_is_told_of(
        self, peer: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        family, said = FakeFamily(), []
        monkeypatch.setattr(family, "candidates", lambda device: [Candidate(peer)])
        monkeypatch.setattr(suite, "load", lambda name: family)
        monkeypatch.setattr(machine, "usable", lambda *a: None)
        monkeypatch.setattr(runner, "_empty", lambda device: None)
        gpu = torch.device("cuda")
        runner.measure(
            runner.Request("kda", [], [], [], FP32, gpu, None, seconds=0.01, cold=False), said.append
        )
        assert [text.startswith("fla tunes for minutes") for text in said] == [True] * (peer == "fla")

    def test_every_other_has_its_reason(self, taken: tuple[FakeFamily, Record]) -> None:
        reasons = {s.candidate: s.reason for s in taken[1].skipped}
        assert reasons["wrong"] == "wrong result, relative error o 1.0e-01 > 1e-03"
        assert reasons["nan"] == "wrong result, relative error o nan > 1e-03"
        assert reasons["raises"] == "it cannot"
        assert reasons["absent"] == "no such thing"

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--shape", "`--shape` must be one of prod8192"),
            ("--gate", "`--gate` must be one of softplus_random, init_slow, bounded, got 'x'"),
            ("--pass", "`--pass` must be one of fwd, fwdbwd, got 'x'"),
            ("--candidate", "`--candidate` must be one of sm100, sm90"),
        ],
    )
    def test_unknown_words_are_refused_first(
        self, flag: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["bench", "--device", "cpu", flag, "x"]) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--device", "meta"), "`--device` must be cpu, cuda or cuda:N, got 'meta'"),
            (("--device", "tpu"), "`--device` must be cpu, cuda or cuda:N, got 'tpu'"),
            (("--device", "cpu:1"), "`--device` must be cpu, cuda or cuda:N, got 'cpu:1'"),
            (
                ("--device", "cuda:99"),
                "`--device` must be a device of this machine, got 'cuda:99': torch sees",
            ),
            (("--family", "nope"), "`--family` must be one of kda, cconv, got 'nope'"),
            (("--family", "shapes"), "`--family` must be one of kda, cconv, got 'shapes'"),
            (("--family", "context_parallel"), "`--family` must be one of kda, cconv, got 'context"),
        ],
    )
    def test_devices_and_families_that_are_not_here(
        self, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["bench", *flags]) == cli.MISUSED
        assert capsys.readouterr().err.startswith(f"kernel-fun bench: {message}")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a device of this machine")
    def test_without_a_gpu_there_is_no_cuda(self, capsys: pytest.CaptureFixture[str]) -> None:
        for command in ("bench", "demo"):
            assert cli.main([command, "--device", "cuda"]) == cli.MISUSED
            assert "got 'cuda': torch sees no CUDA device" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["demo", "warmup"])
    def test_other_commands_refuse_a_device_alike(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main([command, "--device", "tpu"]) == cli.MISUSED
        assert "`--device` must be cpu, cuda or cuda:N, got 'tpu'" in capsys.readouterr().err

    def test_the_first_cpu_is_the_cpu(self) -> None:
        assert machine.usable("--device", "cpu:0") == torch.device("cpu")

    def test_a_request_is_refused_without_the_command(self) -> None:
        request = runner.Request(
            "kda", ["smoke"], ["bounded"], ["fwd"], FP32, torch.device("meta"), None, seconds=1.0, cold=False
        )
        with pytest.raises(ValueError, match="`--device` must be cpu, cuda or cuda:N, got 'meta'"):
            runner.measure(request, lambda text: None)
        with pytest.raises(ValueError, match="`--family` must be one of kda, cconv, got 'nope'"):
            suite.load("nope")


class TestRecord:
    def test_it_reads_back(self, tmp_path: Path) -> None:
        taken = a_record(a_row(), a_row(candidate="transformers"))
        taken.skipped.append(Skipped("kda.fwd", "cpu_1k_h4", "bounded", "fla", "no CUDA device"))
        taken.write(tmp_path / "r.json")
        assert record.read(tmp_path / "r.json") == taken

    def test_it_is_never_replaced(self, tmp_path: Path) -> None:
        a_record().write(tmp_path / "r.json")
        with pytest.raises(FileExistsError):
            a_record(a_row()).write(tmp_path / "r.json")
        assert record.read(tmp_path / "r.json").rows == []

    def test_its_place(self, tmp_path: Path) -> None:
        expected = tmp_path / "some-cpu-2-cores" / "20260102T030405Z-0123456789ab.json"
        assert a_record().default_path(tmp_path) == expected

    def test_it_has_the_agreed_keys(self) -> None:
        data = a_record(a_row()).as_json()
        assert data.keys() >= {"gpu", "commit", "dirty", "utc", "versions", "ceilings", "rows"}
        assert data["ceilings"].keys() == {"copy_TBps", "gemm_TFLOPs"}
        row = data["rows"][0]
        assert row.keys() >= {
            "bench", "shape", "gate", "candidate", "ms", "peak_bytes", "host_us", "cold_s", "error",
        }  # fmt: skip
        assert row["ms"].keys() == {"p20", "p50", "p80"}

    def test_another_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text('{"rows": [], "skipped": []}', encoding="utf-8")
        with pytest.raises(ValueError, match=r"x\.json is not a benchmark record"):
            record.read(path)

    def test_outside_a_checkout_the_commit_is_unknown(self, tmp_path: Path) -> None:
        assert record.commit_of(tmp_path) == ("unknown", True)

    def test_a_wheel_in_somebody_s_checkout_has_no_commit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suite, "root", lambda: ROOT / "src" / "kernel_fun" / "_suite")
        assert suite.commit() == ("unknown", True)

    def test_committed_records_can_be_read(self) -> None:
        for path in (suite.root() / "results").rglob("*.json"):
            taken = record.read(path)
            assert taken.default_path(suite.root() / "results") == path
            shapes = {row.shape.partition(", ")[0] for row in taken.rows if row.bench.startswith("kda.")}
            assert shapes <= set(kda.SHAPES)  # behind a comma: the layout over ranks


class TestPlot:
    def test_it_draws(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        plot.draw(a_record(a_row(), a_row(candidate="fla", bench="kda.fwdbwd")), tmp_path / "p.png")
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")

    def test_without_rows_there_is_nothing_to_draw(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        with pytest.raises(ValueError, match="needs a record with rows"):
            plot.draw(a_record(), tmp_path / "p.png")


class TestCommand:
    ARGUMENTS = ("bench", "--device", "cpu", "--shape", "smoke", "--candidate", "eager", "--seconds", "0.2")

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "in_fresh_process", lambda *a: {"cold_s": 0.5, "peak_bytes": 3 << 20})
        monkeypatch.setattr(timing, "ceilings", lambda device: {"copy_TBps": 0.01, "gemm_TFLOPs": 0.05})

    def test_json_and_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = ["--out", str(tmp_path), "--plot", str(tmp_path / "p.png"), "--pass", "fwd"]
        assert cli.main([*self.ARGUMENTS, *out, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        (row,) = data["rows"]
        assert row["candidate"] == "eager"
        assert row["bench"] == "kda.fwd"
        assert 0 < row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"]
        assert row["error"]["o"] < 1e-5
        (written,) = tmp_path.rglob("*.json")
        assert json.loads(written.read_text(encoding="utf-8")) == data
        assert (tmp_path / "p.png").exists()

    def test_plain(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([*self.ARGUMENTS, "--gate", "bounded"]) == 0
        printed = capsys.readouterr().out
        for wanted in ("kda.fwd @ smoke, bounded, float32", "kda.fwdbwd", "p20 - p80", "eager", "MiB"):
            assert wanted in printed

    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", "--list", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["shapes"].keys() == kda.SHAPES.keys()

    def test_a_wrong_candidate_fails_the_command(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = kda.chunk_kda
        monkeypatch.setattr(kda, "chunk_kda", lambda **x: (right(**x)[0] * 1.01, None))
        assert cli.main([*self.ARGUMENTS, "--pass", "fwd"]) == 1
        assert "wrong result, relative error o 1.0e-02" in capsys.readouterr().out

    @pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
    def test_seconds_must_be_positive(self, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", f"--seconds={seconds}"]) == 2
        said = capsys.readouterr().err
        assert f"`--seconds` must be positive and finite, got {float(seconds)}" in said

    @pytest.mark.parametrize("flag", ["--out", "--plot"])
    def test_an_unset_variable_is_no_place(self, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            cli.main([*self.ARGUMENTS, flag, ""])
        assert "must name a place, got ''" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "flags, sentence",
        [
            (["--plot", "x.txt"], "`--plot` must name a .png file, got x.txt"),
            (["--plot", "{}/file/x.png"], "`--plot` must be where files can be written"),
            (["--out", "{}/file/records"], "`--out` must be where files can be written"),
            (["--out", "{}/file"], "`--out` must be where files can be written"),
            (["--out", "{}/old.json"], "`--out` must name a new file"),
            (["--out", "{}/" + 300 * "x" + ".json"], "`--out` must be where files can be written"),
            (["--plot", "{}/dir.png"], "`--plot` must name a new file"),
            (["--cp", "2", "--plot", "x.png"], "`--plot` draws no ranks, got x.png with --cp 2"),
        ],
        ids=str,
    )
    def test_places_are_looked_at_before_anything_is_measured(
        self,
        flags: list[str],
        sentence: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from kernel_fun.bench import runner

        monkeypatch.setattr(runner, "measure", lambda *a: pytest.fail("measured"))
        (tmp_path / "file").touch()
        (tmp_path / "old.json").touch()
        (tmp_path / "dir.png").mkdir()
        assert cli.main([*self.ARGUMENTS, *(x.format(tmp_path) for x in flags)]) == 2
        assert sentence in capsys.readouterr().err

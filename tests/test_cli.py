"""The command line: every command plain and as JSON, with rich and without, and its refusals."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_fun import cli, kda, warming
from kernel_fun._cli import check, explain, info, screen
from kernel_fun._common import cache, config, device, support
from kernel_fun._common.plan import BACKENDS
from kernel_fun._cute import objects
from kernel_fun.bench import machine
from kernel_fun.kda import dispatch
from kernel_fun.kda.call import Problem

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parent.parent


def as_json(capsys: Capture, *arguments: str, status: int = 0) -> Any:
    assert cli.main([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def as_text(capsys: Capture, *arguments: str, status: int = 0) -> str:
    assert cli.main([*arguments]) == status
    return capsys.readouterr().out


class TestInfo:
    def test_json(self, capsys: Capture) -> None:
        data = as_json(capsys, "info")
        assert data["versions"]["torch"] == torch.__version__
        assert data["devices"][0]["device"] == "cpu"
        assert [b["backend"] for b in data["backends"]] == list(BACKENDS)
        for backend in data["backends"]:
            assert backend["available"] is (backend["reason"] is None)
        assert {s["name"] for s in data["switches"]} == {s.name for s in config.SWITCHES}

    def test_plain(self, capsys: Capture) -> None:
        printed = as_text(capsys, "info")
        for wanted in ("versions", "devices", "backends of chunk_kda", *BACKENDS, "KERNEL_FUN_DISABLE"):
            assert wanted in printed

    def test_switches_show_their_present_value(
        self, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KERNEL_FUN_KDA_MIN_CTAS", "77")
        switches = {s["name"]: s["value"] for s in as_json(capsys, "info")["switches"]}
        assert switches["KERNEL_FUN_KDA_MIN_CTAS"] == "77"

    def test_a_backend_needs_its_device_and_its_packages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cpu = [{"device": "cpu", "arch": "cpu"}]
        hopper = [*cpu, {"device": "cuda:0", "arch": "sm90"}]
        assert machine.unavailable("eager", cpu) is None
        monkeypatch.setattr(machine.support, "missing", lambda need: None)
        assert machine.unavailable("fla", hopper) is None
        assert "no CUDA device" in str(machine.unavailable("fla", cpu))
        monkeypatch.setattr(machine.support, "missing", lambda need: f"{need} not installed")
        assert machine.unavailable("fla", hopper) == "fla not installed"


class TestExplain:
    MUST_SHOW = (
        "explain",
        "--arch",
        "sm90",
        "--B",
        "16",
        "--T",
        "8192",
        "--H",
        "16",
        "--K",
        "128",
        "--V",
        "256",
    )

    def test_every_rejected_candidate_has_a_reason(self, capsys: Capture) -> None:
        data = as_json(capsys, *self.MUST_SHOW)
        assert data["device"]["arch"] == "sm90"
        assert data["problem"]["V"] == 256
        assert data["stages"]
        rejected = [r for stage in data["stages"] for r in stage["rejected"]]
        assert rejected
        assert all(r["reason"] for r in rejected)

    def test_plain_shows_the_same(self, capsys: Capture) -> None:
        data = as_json(capsys, *self.MUST_SHOW)
        printed = as_text(capsys, *self.MUST_SHOW)
        for stage in data["stages"]:
            assert stage["stage"] in printed
            for rejected in stage["rejected"]:
                assert f"not {rejected['backend']}" in printed
                assert rejected["reason"] in printed
        assert f"served by {data['backend']}" in printed

    @pytest.mark.parametrize("arch", device.ARCHS)
    def test_it_is_the_dispatcher_s_own_answer(self, arch: str, capsys: Capture) -> None:
        data = as_json(capsys, "explain", "--arch", arch, "--T", "100", "--H", "2", "--K", "64")
        problem = Problem(
            1, 100, 2, 2, 64, 64, gate="softplus", beta_mode="sigmoid", l2norm=True, needs_grad=True
        )
        plan = explain.as_json(dispatch.plan(problem, device.named(arch)))
        assert data == {**json.loads(json.dumps(plan)), "prebuilt": None}

    def test_every_flag_reaches_the_problem(self, capsys: Capture) -> None:
        data = as_json(
            capsys, "explain", "--arch", "cpu", "--T", "50", "--H", "2", "--HV", "4", "--K", "16",
            "--V", "24", "--dtype", "float32", "--gate", "bounded", "--beta", "sigmoid2",
            "--packed", "3", "--chunk-size", "32", "--no-l2norm", "--no-grad", "--initial-state",
            "--final-state", "--v-first", "--keep",
        )  # fmt: skip
        wanted = Problem(
            1, 50, 2, 4, 16, 24, N=3, dtypes=("float32",) * 5, gate="bounded", beta_mode="sigmoid2",
            state_v_first=True, has_h0=True, wants_ht=True, keep=True, chunk_size=32,
        )  # fmt: skip
        assert data["problem"] == json.loads(json.dumps(wanted.__dict__))
        assert data["backend"] == "eager"

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--H", "0"), "`--H` must be at least 1, got 0"),
            (("--H", "16", "--HV", "3"), "`--HV` must be a positive multiple of --H = 16, got 3"),
            (("--K", "300"), "`--K` must be between 1 and 256, got 300"),
            (("--packed", "4", "--B", "2"), "`--B` must be 1 with --packed, got 2"),
        ],
    )
    def test_contradictions_are_refused(self, flags: tuple[str, ...], message: str, capsys: Capture) -> None:
        assert cli.main(["explain", *flags]) == 2
        assert message in capsys.readouterr().err
        assert as_json(capsys, "explain", *flags, status=2) == {"error": message}

    def test_there_is_no_packing_of_nothing(self, capsys: Capture) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(["explain", "--packed", "0"])
        assert end.value.code == cli.MISUSED
        assert "--packed: must be at least 1, got 0" in capsys.readouterr().err

    def test_a_forced_backend_that_cannot_serve_is_an_error(
        self, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", "sm90")
        assert "KERNEL_FUN_KDA_BACKEND=sm90" in as_json(capsys, "explain", "--arch", "cpu", status=2)["error"]


class TestPrebuilt:
    """What `info` and `explain` say of KERNEL_FUN_KERNELS."""

    HOPPER = ("explain", "--arch", "sm90", "--H", "2", "--T", "100")

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A directory with the five kernels of a training step; their files hold nothing that runs."""
        pytest.importorskip("cutlass")
        monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", "sm90")
        monkeypatch.setattr(support, "missing", lambda need: None)
        step = Problem(
            1, 100, 2, 2, 128, 128, gate="softplus", beta_mode="sigmoid", l2norm=True, needs_grad=True
        )
        entries: list[dict[str, Any]] = []
        found = warming.kernels([step], "sm90", exactly=True, of_length=True)
        for i, (jit, kernel_config) in enumerate(found):
            content = f"kernel {i}".encode()
            (tmp_path / f"{i}.so").write_bytes(content)
            entries.append(
                {
                    "module": jit.module,
                    "config": repr(kernel_config),
                    "options": jit.options,
                    "symbol": "kernel",
                    "file": f"{i}.so",
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "sources": cache.sources(jit.module),
                    "versions": cache.versions(),
                }
            )
        manifest = {"format": objects.FORMAT, "kernels": entries}
        (tmp_path / objects.MANIFEST).write_text(json.dumps(manifest))
        tmp_path.chmod(0o755)
        monkeypatch.setenv("KERNEL_FUN_KERNELS", str(tmp_path))
        return tmp_path

    def test_nothing_is_prebuilt(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KERNEL_FUN_KERNELS", raising=False)
        assert as_json(capsys, "info")["prebuilt"] is None
        assert "KERNEL_FUN_KERNELS is not set" in as_text(capsys, "info")

    def test_all_of_a_call_is_prebuilt(self, folder: Path, capsys: Capture) -> None:
        held = as_json(capsys, "info")["prebuilt"]
        assert held == {"folder": str(folder), "kernels": 5, "usable": 5, "reason": None}
        assert f"KERNEL_FUN_KERNELS={folder}: 5 kernels, nothing is compiled" in as_text(capsys, "info")
        explained = as_json(capsys, *self.HOPPER)["prebuilt"]
        assert [k["reason"] for k in explained["kernels"]] == [None] * 5
        assert "holds 5 of the 5 kernels of this call" in as_text(capsys, *self.HOPPER)

    def test_what_is_damaged_or_missing_is_named(self, folder: Path, capsys: Capture) -> None:
        (folder / "3.so").write_bytes(b"something else")
        held = as_json(capsys, "info")["prebuilt"]
        assert (held["kernels"], held["usable"]) == (5, 4)
        assert "holds a damaged 3.so" in held["reason"]
        assert "4 of 5 kernels can be loaded; " in as_text(capsys, "info")
        (folder / "4.so").unlink()
        explained = as_json(capsys, *self.HOPPER, status=1)["prebuilt"]
        assert explained["lacking"] == 2
        reasons = [k["reason"] for k in explained["kernels"]]
        assert reasons[:3] == [None] * 3
        assert "holds a damaged 3.so" in reasons[3]
        assert "has no readable 4.so" in reasons[4]
        printed = as_text(capsys, *self.HOPPER, status=1)
        assert printed.startswith(f"kernels are missing: KERNEL_FUN_KERNELS={folder} holds 3 of the 5")
        assert "holds a damaged 3.so" in printed
        assert "the call would raise" in printed.splitlines()[-1]

    def test_a_call_of_another_form_is_not_prebuilt(self, folder: Path, capsys: Capture) -> None:
        printed = as_text(capsys, *self.HOPPER, "--gate", "bounded", status=1)
        assert "holds 0 of the 5 kernels of this call" in printed
        assert "has no kernel bwd_grads for Config(" in printed

    def test_a_bound_has_its_own_kernels(self, folder: Path, capsys: Capture) -> None:
        printed = as_text(capsys, *self.HOPPER, "--gate", "bounded", "--lower-bound", "-8", status=1)
        assert "gate=bounded lower_bound=-8 beta" in printed
        assert "quotients=False" in next(
            x for x in printed.splitlines() if x.lstrip().startswith("fwd_intra")
        )

    @pytest.mark.parametrize(
        ("gate", "bound", "sentence"),
        [
            ("softplus", "-8", "must be None with gate 'softplus', got -8.0"),
            ("bounded", "0.5", "must be negative, got 0.5"),
            ("bounded", "-1e39", "must be finite in float32, got -1e+39"),
        ],
    )
    def test_a_bound_that_no_call_has_is_refused(
        self, gate: str, bound: str, sentence: str, capsys: Capture
    ) -> None:
        assert cli.main(["explain", "--gate", gate, f"--lower-bound={bound}"]) == cli.MISUSED
        assert f"`--lower-bound` {sentence}" in capsys.readouterr().err

    def test_a_directory_that_is_not_there(
        self, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KERNEL_FUN_KERNELS", str(folder / "none"))
        held = as_json(capsys, "info")["prebuilt"]
        assert (held["kernels"], held["usable"]) == (0, 0)
        assert "none is no directory of prebuilt kernels: it cannot be read" in held["reason"]
        printed = as_text(capsys, *self.HOPPER, status=1)
        assert printed.count("is no directory of prebuilt kernels") == 1
        assert printed.startswith("kernels are missing: ")


class TestCompile:
    """What `compile` refuses, it refuses in one sentence and before it compiles anything."""

    TINY = ("compile", "--T", "64", "--H", "1", "--K", "64", "--no-grad", "--exactly", "--out")

    @pytest.fixture(autouse=True)
    def nothing_is_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("cutlass")
        from kernel_fun._cute import compile

        monkeypatch.setattr(compile.Jit, "object", lambda self, kernel_config: pytest.fail("compiled"))

    def refused(self, capsys: Capture, *arguments: str) -> str:
        assert cli.main(arguments) == cli.MISUSED
        said = capsys.readouterr().err
        assert said.startswith("kernel-fun compile: ")
        assert said.count("\n") == 1
        assert "KERNEL_FUN_" not in said
        return said

    def test_a_directory_others_can_write(self, tmp_path: Path, capsys: Capture) -> None:
        tmp_path.chmod(0o775)
        said = self.refused(capsys, *self.TINY, str(tmp_path))
        assert f"{tmp_path} has mode 0775, so that others can write it: chmod go-w {tmp_path}" in said

    def test_a_file(self, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / "file").touch()
        assert "file is not a directory" in self.refused(capsys, *self.TINY, str(tmp_path / "file"))

    def test_without_a_linker(self, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        from kernel_fun._cute import compile

        monkeypatch.setattr(compile.Jit, "object", lambda self, kernel_config: b"")
        monkeypatch.setattr(objects.shutil, "which", lambda name: None)
        assert "no linker (ld) on this machine" in self.refused(capsys, *self.TINY, str(tmp_path / "set"))

    def test_without_a_compiler(
        self, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(support, "missing", lambda need: f"{need} not installed")
        assert "cute not installed" in self.refused(capsys, *self.TINY, str(tmp_path))

    @pytest.mark.parametrize(
        ("flags", "reason"),
        [
            (("--K", "100"), "K=100 V=100 bfloat16 .*K = 100, kernels are built for 64 and 128"),
            (("--V", "72"), "K=128 V=72 .*V = 72, kernels take multiples of 64"),
            (("--dtype", "float32"), "float32 .*q, k, v are float32"),
        ],
    )
    def test_what_the_kernels_do_not_take(
        self, flags: tuple[str, ...], reason: str, tmp_path: Path, capsys: Capture
    ) -> None:
        asked = ("compile", "--B", "3", "--T", "777", "--H", "2", *flags, "--out", str(tmp_path / "set"))
        said = self.refused(capsys, *asked)
        assert re.search(rf"no sm90 kernels for B=3 T=777 H=2 .*{reason}", said), said
        assert not (tmp_path / "set").exists()


class TestCheck:
    @pytest.fixture(autouse=True)
    def only_fp32(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(check, "DTYPES", {"eager": ("float32",)})

    def test_json(self, capsys: Capture) -> None:
        data = as_json(capsys, "check", "--backend", "eager")
        assert data["passed"] is True
        assert data["seconds"] > 0
        assert len(data["checks"]) == 8
        for verdict in data["checks"]:
            assert verdict["passed"]
            assert 0 < verdict["error"] <= verdict["limit"] == 1e-5
        gradients = next(v for v in data["checks"] if v["op"] == "chunk_kda")["errors"]
        assert set(gradients) == {
            "o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0",
        }  # fmt: skip

    def test_plain_finds_a_wrong_gradient(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        right = kda.chunk_kda

        def wrong(*args: Any, v: torch.Tensor, **keywords: Any) -> Any:
            return right(*args, v=v + 1e-4 * (v.detach() - v), **keywords)  # same value, other gradient

        monkeypatch.setattr(kda, "chunk_kda", wrong)
        printed = as_text(capsys, "check", "--backend", "eager", status=1)
        assert "FAIL" in printed
        assert "dv: relative error 1.0" in printed
        assert "4 of 8 checks passed" in printed

    def test_a_nan_is_the_worst(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kda, "fused_recurrent_kda", lambda **x: (x["v"] * float("nan"), None))
        data = as_json(capsys, "check", "--backend", "eager", status=1)
        bad = [v for v in data["checks"] if not v["passed"]]
        assert len(bad) == 4
        assert {v["worst"] for v in bad} == {"o"}
        assert all("not finite" in v["reason"] for v in bad)

    def test_a_refusal_is_a_failure_with_its_reason(self, capsys: Capture) -> None:
        data = as_json(capsys, "check", "--backend", "sm100", status=1)
        assert not data["passed"]
        assert all("sm100" in v["reason"] for v in data["checks"])

    def test_backends_that_run_here_are_found(self) -> None:
        assert "eager" in check.available()
        assert "fla" not in check.available()

    def test_threads_are_restored(self) -> None:
        torch.set_num_threads(2)
        with check.one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2


class TestWarmup:
    def test_it_reports_seconds(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        given: dict[str, Any] = {}
        monkeypatch.setattr(kda, "warmup", lambda **x: given.update(x) or 1.25)
        data = as_json(capsys, "warmup", "--K", "64", "--V", "128", "--HV", "8", "--dtype", "float16",
                       "--device", "cuda:0", "--no-l2norm")  # fmt: skip
        assert data["seconds"] == 1.25
        assert given == {
            "K": 64, "V": 128, "HV": 8, "dtype": torch.float16, "device": "cuda:0",
            "use_qk_l2norm": False, "use_gate_in_kernel": True,
        }  # fmt: skip
        assert "1.2 s" in as_text(capsys, "warmup")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to warm")
    def test_nothing_warmed_is_a_failure(self, capsys: Capture) -> None:
        assert "nothing warmed" in as_json(capsys, "warmup", status=1)["error"]
        assert "nothing warmed" in as_text(capsys, "warmup", status=1)


class TestVerify:
    """The ledger is written when every GPU test passed, and only then."""

    def test_it_needs_the_gpu_and_the_tests(self, tmp_path: Path, capsys: Capture) -> None:
        assert cli.main(["verify", "--checkout", str(tmp_path)]) == cli.MISUSED
        assert "`--checkout`" in capsys.readouterr().err
        if not torch.cuda.is_available():
            assert cli.main(["verify", "--checkout", str(ROOT)]) == cli.MISUSED
            assert "nothing was verified" in capsys.readouterr().err

    @pytest.mark.parametrize("counts", [(9, 0, 0), (8, 1, 0), (8, 0, 1), (0, 0, 0)], ids=str)
    def test_all_or_nothing(
        self, counts: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kernel_fun._cli import verify
        from kernel_fun._common import device, ledger
        from kernel_fun.kda._kernels.sm90.launched import KERNELS

        out = tmp_path / "ledger.py"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        monkeypatch.setattr(device, "of", lambda d: device.named("sm90"))
        found = dict(zip(("passed", "failed", "skipped"), counts, strict=True))
        monkeypatch.setattr(verify, "_pytest", lambda tests, more: found)
        status = cli.main(["verify", "--checkout", str(ROOT), "--out", str(out)])
        if counts != (9, 0, 0):
            assert status == cli.FAILED
            assert not out.exists()
            return
        assert status == 0
        namespace: dict[str, Any] = {}
        exec(out.read_text(encoding="utf-8"), namespace)
        entry = namespace["VERIFIED"]["bwd_grads"]
        assert entry.gpu == "a GPU"
        assert entry.sources == ledger.sources(KERNELS["bwd_grads"])

    def test_results_are_those_of_pytest(self, tmp_path: Path) -> None:
        from kernel_fun._cli import verify

        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = sm90\n")
        (tmp_path / "test_it.py").write_text(
            "import pytest\npytestmark = pytest.mark.sm90\n"
            "def test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip()\n"
            "@pytest.fixture\ndef broken(): raise OSError\ndef test_d(broken): pass\n"
        )
        found = verify._pytest([str(tmp_path)], ["-p", "no:cacheprovider"])
        assert found == {"passed": 1, "failed": 2, "skipped": 1}


class TestScreen:
    ROWS = (("a", "1"), ("bbb", "22"))

    def test_plain_columns_line_up(self) -> None:
        assert screen.plain_table("t", ("name", "n"), self.ROWS, numbers=1).splitlines() == [
            "t", "name   n", "----  --", "a      1", "bbb   22",
        ]  # fmt: skip

    def test_rich_draws_the_same_cells(self) -> None:
        pytest.importorskip("rich")
        out = io.StringIO()
        drawn = screen.Screen(out, use_rich=True)
        assert drawn.console is not None
        drawn.table("t", ("name", "n"), self.ROWS, numbers=1)
        drawn.line("done [not markup]", "bold")
        with drawn.progress("steps", 3) as advance:
            advance(3, "loss 1.0")
        text = out.getvalue()
        for wanted in ("name", "bbb", "22", "done [not markup]"):
            assert wanted in text

    def test_without_rich_it_is_plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ["rich", *(m for m in sys.modules if m.startswith("rich."))]:
            monkeypatch.setitem(sys.modules, name, None)
        out = io.StringIO()
        drawn = screen.Screen(out, use_rich=True)
        assert drawn.console is None
        drawn.line("plain", "bold")
        with drawn.progress("steps", 20) as advance:
            for step in range(1, 21):
                advance(step, "x")
        lines = out.getvalue().splitlines()
        assert lines[0] == "plain"
        assert [line.split()[1] for line in lines[1:4]] == ["1/20", "2/20", "4/20"]
        assert lines[-1].startswith("steps 20/20")

    def test_json_is_silent(self) -> None:
        silent = screen.Screen(None)
        silent.line("x")
        silent.table("t", ("a",), [("b",)])
        with silent.progress("p", 1) as advance:
            advance(1, "x")

    def test_a_pipe_gets_plain_text(self) -> None:
        assert screen.Screen(io.StringIO()).console is None


class TestMain:
    def test_help_is_quick_and_loads_no_torch(self) -> None:
        code = (
            "import sys\nfrom kernel_fun.cli import main\n"
            "try:\n    main(['--help'])\nexcept SystemExit as end:\n"
            "    assert end.code == 0\n"
            "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for command in cli.COMMANDS:
            assert command in done.stdout

    def test_module_runs_as_a_command(self) -> None:
        command = [sys.executable, "-m", "kernel_fun", "info", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["versions"]["torch"] == torch.__version__

    def test_an_interrupt_is_quiet(self, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*drawn: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(info, "_show", interrupted)
        assert cli.main(["info"]) == 130
        assert capsys.readouterr().err == "kernel-fun info: interrupted\n"

    @pytest.mark.parametrize("command", cli.COMMANDS)
    def test_every_command_has_json_and_help(self, command: str, capsys: Capture) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main([command, "--help"])
        assert end.value.code == 0
        assert "--json" in capsys.readouterr().out

"""Kernels made ready before they are needed: here, and ahead of time for a GPU that is not here."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kernel_fun
from kernel_fun import cli, warming
from kernel_fun._common import config, device, support
from kernel_fun._common.plan import BackendUnavailable
from kernel_fun.cconv.call import Problem as Convolution
from kernel_fun.demo.model import ByteModel, ModelConfig
from kernel_fun.kda import exercise
from kernel_fun.kda.call import Problem

TRAINING = Problem(
    4,
    4096,
    2,
    4,
    16,
    8,
    dtypes=("float32",) * 5,
    gate="softplus",
    beta_mode="sigmoid",
    l2norm=True,
    needs_grad=True,
)
PROBLEMS = [
    TRAINING,
    replace(
        TRAINING,
        gate="bounded",
        beta_mode="sigmoid2",
        B=1,
        N=7,
        has_h0=True,
        wants_ht=True,
        state_v_first=True,
    ),
    replace(TRAINING, gate="bounded", lower_bound=-8.0),
    replace(TRAINING, gate="log", beta_mode="raw", l2norm=False, keep=True, dtypes=("bfloat16",) * 5),
    replace(TRAINING, needs_grad=False, wants_ht=True, dtypes=("float64",) * 5, has_h0=True),
]


@pytest.mark.parametrize(
    "problem", PROBLEMS, ids=["training", "packed", "low bound", "log decay", "inference"]
)
def test_an_exercise_is_the_problem(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs has the facts that were asked for, up to sizes that no kernel depends on."""
    from kernel_fun.kda import dispatch

    asked: list[Problem] = []
    plan = dispatch.plan
    monkeypatch.setattr(dispatch, "plan", lambda p, *rest: asked.append(p) or plan(p, *rest))
    assert exercise.run(problem, torch.device("cpu")).isfinite().all()
    assert {p.kind for p in asked} == {problem.kind}
    assert max(p.T for p in asked) < 200


@pytest.mark.parametrize("n", [1, 2, 7])
def test_an_exercise_has_the_sequences_it_is_asked_for(n: int) -> None:
    """One packed sequence is fewer chains than two, and has other kernels."""
    packed, dense = (exercise.small(p, n) for p in (replace(TRAINING, B=1, N=5), TRAINING))
    assert packed.N == dense.B == n


def test_a_list_of_problems() -> None:
    convolution = Convolution(1, 1, 12, 4, dtypes=("float32", "float32"), activation="silu", needs_grad=True)
    report = kernel_fun.warmup([*PROBLEMS[:2], replace(TRAINING, T=9), convolution], device="cpu")
    assert [entry.how for entry in report] == ["eager"] * 3  # one of each kind
    assert [entry.what.split()[0] for entry in report] == ["chunk_kda", "chunk_kda", "causal_conv1d"]
    assert all(entry.seconds > 0 for entry in report)
    assert "eager" in str(report[0])


def test_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call the model then makes, in training and generation, was warmed."""
    from kernel_fun.kda import dispatch

    model = ByteModel(ModelConfig(layers=2, width=16, H=1, HV=2, K=8, V=8, mlp_width=16))
    report = kernel_fun.warmup(model, device="cpu")
    assert {entry.what.split()[0] for entry in report} == {"chunk_kda", "causal_conv1d"}
    warmed = {p.kind for p in warming.problems_of(model) if isinstance(p, Problem)}
    asked: list[Problem] = []
    plan = dispatch.plan
    monkeypatch.setattr(dispatch, "plan", lambda p, *rest: asked.append(p) or plan(p, *rest))
    model(torch.randint(256, (2, 70)))[0].sum().backward()
    with torch.no_grad():
        _, states = model(torch.randint(256, (2, 70)), keep_states=True)
        model(torch.randint(256, (2, 3)), states, keep_states=True)
    assert {p.kind for p in asked} == warmed


def test_models_of_transformers_and_fla() -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    layer = kimi.KimiLinearDeltaAttention(
        KimiLinearConfig(
            hidden_size=32, linear_head_dim=16, linear_num_heads=2, layer_types=["linear_attention"] * 27
        ),
        0,
    ).bfloat16()
    found = warming.problems_of(layer)
    kda = [p for p in found if isinstance(p, Problem)]
    assert {(p.H, p.K, p.V, p.gate, p.dtypes[0], p.state_v_first) for p in kda} == {
        (2, 16, 16, "softplus", "bfloat16", False)
    }
    assert {(p.needs_grad, p.N is not None, p.has_h0) for p in kda} == {
        (True, False, False), (True, True, False), (False, False, False), (False, True, False), (False, False, True),
    }  # fmt: skip
    assert {(p.D, p.W) for p in found if isinstance(p, Convolution)} == {(96, 4)}


def test_nothing_to_warm_is_said() -> None:
    with pytest.raises(ValueError, match=r"must have KDA layers .* got Linear without any"):
        kernel_fun.warmup(torch.nn.Linear(2, 2), device="cpu")
    with pytest.raises(ValueError, match="at least one problem, got none"):
        kernel_fun.warmup([], device="cpu")
    with pytest.raises(TypeError, match="must be a model or problems, got str"):
        kernel_fun.warmup("model", device="cpu")
    with pytest.raises(TypeError, match="must hold problems, got int"):
        kernel_fun.warmup([1], device="cpu")
    assert len(kernel_fun.warmup(TRAINING, device="cpu")) == 1


@pytest.mark.parametrize(
    "change", [{"gate": "sofplus"}, {"beta_mode": "sigmoi"}, {"dtypes": ("bfloat",) * 5}], ids=str
)
def test_a_word_that_no_call_has_is_refused(change: dict[str, Any]) -> None:
    """It would be warmed as something else, and the real kernel stay cold."""
    (name,) = change
    with pytest.raises(ValueError, match=rf"`target` must hold problems whose `{name}` is one of .*, got '"):
        kernel_fun.warmup([replace(TRAINING, **change)], device="cpu")
    with pytest.raises(ValueError, match=r"whose `activation` is one of None, silu, swish, got 'relu'"):
        kernel_fun.warmup([Convolution(1, 1, 8, 4, activation="relu")], device="cpu")


@pytest.mark.parametrize(
    "gate, bound, sentence",
    [
        ("softplus", -5.0, "must be None with gate 'softplus', got -5.0"),
        ("bounded", 0.5, "must be negative, got 0.5"),
        ("bounded", math.nan, "must be finite in float32, got nan"),
        ("bounded", -1e39, "must be finite in float32, got -1e"),
        ("bounded", "-5", "must be a number, got str"),
    ],
)
def test_a_bound_that_no_call_has_is_refused(gate: str, bound: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"`lower_bound` {sentence}"):
        kernel_fun.warmup([replace(TRAINING, gate=gate, lower_bound=bound)], device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_an_absent_device_is_said() -> None:
    with pytest.raises(
        RuntimeError, match="nothing warmed, cuda was asked for and torch sees no CUDA device"
    ):
        kernel_fun.warmup([TRAINING])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_is_warmed_where_it_is_in_any_mode(mode: Any) -> None:
    model = ByteModel(ModelConfig(layers=1, width=16, H=1, HV=2, K=8, V=8, mlp_width=16))
    with mode():
        assert kernel_fun.warmup(model)


@pytest.mark.parametrize("dtype", ["x", torch.int32], ids=str)
def test_a_dtype_that_is_none_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"`dtype` must be a floating-point torch.dtype"):
        kernel_fun.warmup([TRAINING], device="cpu", dtype=dtype)


def test_a_kernel_that_stays_cold_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is made ready again by the same problem."""
    from kernel_fun._cute import objects

    run = exercise.run

    def forgetful(problem: Problem, where: torch.device, sequences: Any, **how: Any) -> torch.Tensor:
        objects.note("kernel_fun.kda.forgetful", problem.T, "compiled", 1.5)
        return run(problem, where, sequences, **how)

    monkeypatch.setattr(exercise, "run", forgetful)
    with pytest.raises(RuntimeError, match="forgetful 4096 stayed cold"):
        kernel_fun.warmup([TRAINING], device="cpu")


def test_a_value_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercise, "run", lambda *_, **__: torch.tensor([1.0, torch.nan]))
    with pytest.raises(RuntimeError, match="chunk_kda gave a value that is not finite"):
        kernel_fun.warmup([TRAINING], device="cpu")


class TestBuild:
    @pytest.fixture(autouse=True)
    def needs_cutlass(self) -> None:
        pytest.importorskip("cutlass")

    @pytest.fixture
    def rehearsed(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
        """What would be built, without building it."""
        from kernel_fun._cute import objects

        seen: list[tuple[Any, Any]] = []
        monkeypatch.setattr(objects, "write", lambda out, kernels, arch: seen.extend(kernels))
        monkeypatch.setattr(warming, "_is_cached", lambda digest: False)
        return seen

    GPU = Problem(1, 8192, 4, 4, 128, 128, gate="softplus", beta_mode="sigmoid", l2norm=True, needs_grad=True)

    def kernels(self, seen: list[tuple[Any, Any]]) -> list[str]:
        return [jit.module.rpartition(".")[2] for jit, _ in seen]

    def test_every_kernel_of_a_training_step(self, rehearsed: list[tuple[Any, Any]], tmp_path: Path) -> None:
        one = ["fwd_intra", "fwd_state", "fwd_state", "bwd_state", "bwd_grads"]
        beside = ["fwd_intra", "fwd_state"]  # the forms of a long forward of few chains
        scans = ["fwd_state", "fwd_state", "fwd_state", "bwd_state", "bwd_state"]
        cut = ["segment_tables", "segment_states", "segment_states", *scans, *scans]  # in either tile of V
        told: list[warming.Warmed] = []
        report = warming.build([self.GPU], "sm_90a", tmp_path, exactly=True, on_kernel=told.append)
        assert told == report
        assert self.kernels(rehearsed)[:7] == [*beside, *one]
        assert sorted(self.kernels(rehearsed)[7:]) == sorted(cut)
        forms = [c for _, c in rehearsed[:7] if hasattr(c, "overlapped")]
        assert [c.overlapped for c in forms] == [True, True, False, False, False, True]
        assert [c.leads for c in forms if hasattr(c, "leads")] == [False, False, True]
        assert [entry.how for entry in report] == ["compiled"] * 20
        assert device.of(torch.device("cpu")).arch == "cpu"
        assert config.KDA_BACKEND.read() == "auto"
        rehearsed.clear()
        warming.build(
            [self.GPU], "sm_90a", tmp_path
        )  # a form of the scans for chains so few that two fit, one for few and one for many
        few, many = ["fwd_state", "bwd_state"], ["fwd_state", "fwd_state", "bwd_state"]
        wide = [
            "fwd_state"
        ]  # of a long forward of as many chains as fit beside fwd_intra in wide tiles alone
        assert sorted(self.kernels(rehearsed)) == sorted([*beside, *wide, *one, *few, *many, *cut])

    def test_grouped_heads_and_packings_need_more(
        self, rehearsed: list[tuple[Any, Any]], tmp_path: Path
    ) -> None:
        warming.build([replace(self.GPU, HV=8, N=3, B=1)], "sm_90a", tmp_path)
        assert "bwd_grads_reduce" in self.kernels(rehearsed)
        indices = {c.index for jit, c in rehearsed if hasattr(c, "index")}
        assert indices == {"int32", "int64"}

    @pytest.mark.parametrize("keep", [False, True])
    @pytest.mark.parametrize("N", [None, 1])
    @pytest.mark.parametrize("HV, V", [(4, 64), (4, 128), (48, 128), (96, 128), (16, 256), (32, 256)])
    def test_sizes_ask_for_nothing_more(
        self, HV: int, V: int, N: int | None, keep: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the exercises of a head shape ask for is all that any B and T ask for."""
        from kernel_fun._cute import objects

        shape = replace(self.GPU, HV=HV, H=HV, V=V, N=N, keep=keep)

        def asked(sequences: list[int], **how: Any) -> set[tuple[str, str]]:
            seen: dict[tuple[str, str], Any] = {}
            with config.KDA_BACKEND.set("sm90"), device.pretend("sm90"), objects.rehearsal(seen):
                exercise.run(shape, torch.device("cpu"), sequences, **how)
            return set(seen)

        ready = asked(exercise.batches(shape), long=True)
        monkeypatch.setattr(exercise, "TOKENS", 9)
        assert asked([1, 2, 3, 5, 7, 11, 16, 24, 33, 47]) <= ready
        if HV == 4:
            monkeypatch.setattr(exercise, "TOKENS", 2 * exercise.LONG_TOKENS + 1)
            assert asked([2]) <= ready

    @pytest.mark.parametrize("HV, B, V", [(4, 9, 256), (4, 17, 128), (17, 4, 128), (34, 1, 256), (6, 6, 256)])
    def test_long_forwards_of_more_chains_ask_for_nothing_more(self, HV: int, B: int, V: int) -> None:
        """Beside fwd_intra a scan has wide tiles where narrow ones would not fit."""
        shape = replace(self.GPU, H=HV, HV=HV, V=V, needs_grad=False)
        ready = {repr(c) for _, c in warming.kernels([shape], "sm90", exactly=False)}
        own = [c for _, c in warming.kernels([replace(shape, B=B)], "sm90", exactly=True, of_length=True)]
        assert {c.BV for c in own if hasattr(c, "BV") and c.overlapped} == {128}
        assert {repr(c) for c in own} <= ready

    @pytest.mark.parametrize(
        "fields", [{}, dict(N=3), dict(B=3, V=256, keep=True), dict(N=1, H=2, HV=8, K=64)]
    )
    def test_cut_sequences_ask_for_nothing_more(self, fields: dict[str, Any]) -> None:
        """Calls as long as is cut, of one to many segments, need what the exercises of their head shape need."""

        def names(found: list[tuple[Any, Any]]) -> set[tuple[str, str]]:
            return {(jit.module, repr(c)) for jit, c in found}

        shape = replace(self.GPU, **fields)
        ready = names(warming.kernels([shape], "sm90", exactly=False))
        for T in (1 << 16, 1 << 18, 1 << 20):
            found = names(warming.kernels([replace(shape, T=T)], "sm90", exactly=True, of_length=True))
            assert any("segment_states" in module for module, _ in found)
            assert found <= ready

    @pytest.mark.parametrize("bound, quotients", [(None, True), (-5.0, True), (-0.1, True), (-5.5, False)])
    def test_a_bound_has_its_own_kernels(self, bound: float | None, quotients: bool) -> None:
        shape = replace(self.GPU, gate="bounded", lower_bound=bound)
        found = [c for _, c in warming.kernels([shape], "sm90", exactly=False) if hasattr(c, "quotients")]
        assert found
        assert {c.quotients for c in found} == {quotients}

    def test_what_no_kernel_serves_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BackendUnavailable, match="K = 100, kernels are built for 64 and 128"):
            warming.build([replace(self.GPU, K=100)], "sm_90a", tmp_path)
        with pytest.raises(
            ValueError, match=r"one of sm_90a, got 'sm90': the compiler's name of it is sm_90a"
        ):
            warming.build([TRAINING], "sm90", tmp_path / "objects")
        with pytest.raises(ValueError, match=r"`arch` must be one of sm_90a, got 'sm_80'$"):
            warming.build([self.GPU], "sm_80", tmp_path)

    def test_without_the_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(support, "missing", lambda need: f"{need} not installed")
        with pytest.raises(RuntimeError, match=r"^cute not installed"):
            warming.build([self.GPU], "sm_90a", tmp_path)

    def test_the_command(
        self, rehearsed: list[tuple[Any, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["compile", "--K", "64", "--H", "2", "--out", str(tmp_path), "--json"]
        assert cli.main(arguments) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["arch"] == "sm_90a"
        assert len(data["kernels"]) == len(rehearsed) > 8
        rehearsed.clear()
        assert cli.main([*arguments[:-1], "--exactly"]) == 0
        cut = [jit for jit, c in rehearsed if getattr(c, "index", "") or "segment" in jit.module]
        assert len(rehearsed) == 7 + len(cut)
        assert len(cut) == 9  # in one tile of V but for the summaries, which have columns of K too
        assert "to use them: KERNEL_FUN_KERNELS=" in capsys.readouterr().out
        assert cli.main(["compile", "--arch", "sm_80", "--out", str(tmp_path)]) == 2


def test_the_warmup_command_reports_kernels(capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        assert (
            cli.main(
                [
                    "warmup",
                    "--device",
                    "cpu",
                    "--K",
                    "8",
                    "--V",
                    "8",
                    "--HV",
                    "1",
                    "--dtype",
                    "float32",
                    "--json",
                ]
            )
            == 0
        )
    assert "kernels" in json.loads(capsys.readouterr().out)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGPU:
    SHAPE = Problem(1, 1, 2, 2, 128, 128, gate="softplus", beta_mode="sigmoid", l2norm=True, needs_grad=True)

    @pytest.fixture(autouse=True)
    def ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kernel_fun.kda import dispatch

        monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", "sm90")
        try:
            dispatch.plan(self.SHAPE, device.of(torch.device("cuda")))
        except BackendUnavailable as refusal:
            pytest.skip(f"no kernel of ours: {refusal}")

    def test_every_kernel_is_reported_once(self) -> None:
        first = kernel_fun.warmup([self.SHAPE])
        assert {"fwd_intra", "fwd_state", "bwd_state", "bwd_grads"} <= {
            e.what.split()[0] for e in first if e.kernel
        }
        assert not [e for e in kernel_fun.warmup([self.SHAPE]) if e.kernel]

    def test_a_fresh_process_starts_from_prebuilt_kernels(self, tmp_path: Path) -> None:
        """Built here as on a machine without a GPU; first forward and backward of a process that has none else."""
        import subprocess
        import sys

        warming.build(self.SHAPE, "sm_90a", tmp_path / "kernels")
        code = (
            "import sys, time, torch; sys.modules['cutlass'] = None\n"
            "from kernel_fun.kda import exercise; from kernel_fun.kda.call import Problem\n"
            f"torch.zeros(1, device='cuda'); begin = time.perf_counter()\n"
            f"exercise.run({self.SHAPE!r}, torch.device('cuda')); torch.cuda.synchronize()\n"
            "print(time.perf_counter() - begin)"
        )
        switches = {
            config.KERNELS.name: str(tmp_path / "kernels"),
            config.CACHE_DIR.name: str(tmp_path / "cache"),
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **switches},
        )
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 3.0
        assert not (tmp_path / "cache").exists()

"""The demo: it learns, its two forms agree, it is repeatable, and an interrupt loses nothing."""

from __future__ import annotations

import contextlib
import csv
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernel_fun import cli
from kernel_fun._cli import demo as demo_command
from kernel_fun._common import config
from kernel_fun.cconv import causal_conv1d
from kernel_fun.demo import compare, recipe, sample, session, text, train
from kernel_fun.demo import model as demo_model
from kernel_fun.demo.model import ByteModel, ModelConfig
from kernel_fun.kda import dispatch

TINY = recipe.Recipe(
    model=ModelConfig(layers=1, width=32, H=1, HV=2, K=16, V=16, mlp_width=48),
    B=4,
    T=70,
    steps=24,
    learning_rate=2e-2,
    dtype=torch.float32,
    sample_bytes=24,
    warmup_steps=4,
    held_out_windows=4,
    evaluations=4,
)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("the cat sat on the mat and the dog sat on the log\n" * 120, encoding="utf-8")
    return path


@pytest.fixture
def options(words: Path, tmp_path: Path) -> session.Options:
    return session.Options(out=tmp_path / "out", text=words, device="cpu", recipe=TINY)


def run(options: session.Options, **keywords: Any) -> tuple[session.Setting, session.Result]:
    setting = session.prepare(options)
    return setting, session.run(setting, options, **keywords)


def test_it_learns_and_writes_everything(options: session.Options) -> None:
    setting, result = run(options)
    assert result.initial_loss == pytest.approx(5.545, abs=0.15)
    assert result.held_out_loss < 3.0
    assert result.train_loss < result.initial_loss - 1.5
    assert result.steps_done == TINY.steps
    assert result.tokens == TINY.steps * TINY.B * TINY.T
    assert not result.interrupted

    assert {Path(name).name for name in result.files} == {
        "checkpoint.pt", "losses.csv", "loss.png", "sample.txt", "summary.txt",
    }  # fmt: skip
    png = (options.out / "loss.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(png) > 5000
    with (options.out / "losses.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(TINY.steps + 1))
    assert float(rows[-1]["held_out"]) == pytest.approx(result.held_out_loss, abs=1e-4)
    written = (options.out / "sample.txt").read_text(encoding="utf-8")
    assert written.startswith("\nThe ")
    assert len(written.encode()) >= TINY.sample_bytes
    summary = (options.out / "summary.txt").read_text(encoding="utf-8")
    assert str(setting.plan) in summary
    assert str(result.agreement) in summary

    saved = torch.load(options.out / "checkpoint.pt", weights_only=True)
    again = ByteModel(ModelConfig(**saved["config"]))
    again.load_state_dict(saved["model"])
    tokens = torch.arange(40)[None]
    assert torch.equal(again(tokens)[0], setting.model(tokens)[0])


def test_the_plan_it_shows_is_the_plan_that_runs(
    options: session.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    plan = dispatch.plan

    def spy(problem: Any, *rest: Any) -> Any:
        asked.append(problem)
        return plan(problem, *rest)

    setting = session.prepare(options)
    monkeypatch.setattr(dispatch, "plan", spy)
    x, y = setting.text.batch(TINY.B, TINY.T, torch.Generator().manual_seed(0))
    train.loss_of(setting.model, x, y, torch.float32).backward()
    assert set(asked) == {setting.plan.problem}
    assert setting.plan.backend == "eager"


def test_a_seed_decides_everything(options: session.Options) -> None:
    short = replace(options, steps=6)
    first, a = run(short)
    second, b = run(short)
    other, c = run(replace(short, seed=1))
    parameters = [dict(s.model.named_parameters()) for s in (first, second, other)]
    assert all(torch.equal(parameters[0][n], p) for n, p in parameters[1].items())
    assert a.sample == b.sample
    assert a.train_loss == b.train_loss
    assert any(not torch.equal(parameters[0][n], p) for n, p in parameters[2].items())
    assert a.train_loss != c.train_loss


def test_the_global_generator_is_left_alone(options: session.Options) -> None:
    before = torch.random.get_rng_state()
    run(replace(options, steps=2))
    assert torch.equal(before, torch.random.get_rng_state())


def test_ctrl_c_keeps_what_was_trained(options: session.Options) -> None:
    def press(history: train.History) -> None:
        if len(history.train) == 5:
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with train.interruptible() as pressed:
        _, result = run(options, on_step=press, stop=pressed)
    assert signal.getsignal(signal.SIGINT) is handler
    assert result.interrupted
    assert result.steps_done == 5
    assert all(Path(name).stat().st_size > 0 for name in result.files)
    assert len(result.files) == 5
    assert torch.load(options.out / "checkpoint.pt", weights_only=True)["steps"] == 5
    assert "5 of 24 steps (interrupted)" in (options.out / "summary.txt").read_text(encoding="utf-8")


def test_ctrl_c_before_the_first_step(options: session.Options) -> None:
    _, result = run(options, stop=lambda: True)
    assert result.interrupted
    assert result.steps_done == 0
    assert all(Path(name).exists() for name in result.files)


def test_a_second_ctrl_c_is_obeyed_at_once() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with train.interruptible() as pressed:
            signal.raise_signal(signal.SIGINT)
            assert pressed()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_every_parameter_learns(options: session.Options) -> None:
    setting = session.prepare(options)
    x, y = setting.text.batch(TINY.B, TINY.T, torch.Generator().manual_seed(0))
    train.loss_of(setting.model, x, y, torch.float32).backward()
    silent = [n for n, p in setting.model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


def test_chunk_and_recurrent_forms_agree_from_any_hand_over() -> None:
    torch.manual_seed(0)
    model = ByteModel(replace(TINY.model, layers=2)).double()
    tokens = torch.randint(256, (2, 150))
    with torch.no_grad():
        whole, ends = model(tokens, keep_states=True)
        for cut in (1, 63, 64, 100, 149):
            _, states = model(tokens[:, :cut], keep_states=True)
            rest, finals = model(tokens[:, cut:], states, form="recurrent", keep_states=True)
            assert (rest - whole[:, cut:]).abs().max() < 1e-12
            for a, b in zip(finals, ends, strict=True):
                assert (a.kda - b.kda).abs().max() < 1e-12
                assert (a.conv - b.conv).abs().max() < 1e-12


def test_logits_do_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = ByteModel(TINY.model)
    tokens = torch.randint(256, (1, 100))
    changed = tokens.clone()
    changed[:, 60:] = 7
    with torch.no_grad():
        assert torch.equal(model(tokens)[0][:, :60], model(changed)[0][:, :60])


def test_disagreement_is_said_and_fails(
    options: session.Options, words: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = demo_model.fused_recurrent_kda

    def wrong(*args: Any, **keywords: Any) -> Any:
        o, state = exact(*args, **keywords)
        return o * 1.5, state

    monkeypatch.setattr(demo_model, "fused_recurrent_kda", wrong)
    monkeypatch.setattr(recipe, "CPU", TINY)
    arguments = ["demo", "--text", str(words), "--steps", "12", "--out", str(options.out), "--device", "cpu"]
    assert cli.main(arguments) == 1
    assert "logits DISAGREE" in capsys.readouterr().out


def test_agreement_is_measured() -> None:
    agreement = sample.Agreement(10, 5, difference=float("nan"), largest=1.0, same_choice=0, tolerance=1.0)
    assert not agreement.agrees
    assert replace(agreement, difference=0.5).agrees


def test_bf16_trains_and_agrees(options: session.Options) -> None:
    _, result = run(replace(options, recipe=replace(TINY, dtype=torch.bfloat16, steps=8)))
    assert result.dtype == "bfloat16"
    assert result.agreement.agrees
    assert result.held_out_loss < result.initial_loss


@pytest.mark.parametrize("convolution", ["kernel-fun", "torch"])
def test_causal_convolution_is_torch_s_and_resumes(convolution: str) -> None:
    x, weight = torch.randn(2, 20, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    op = {
        "torch": demo_model.shifted_products,
        "kernel-fun": lambda x, w, h0: causal_conv1d(x, w, None, None, h0, True, "silu"),
    }[convolution]
    y, end = op(x, weight, None)
    expected = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], groups=6)).mT
    assert (y - expected).abs().max() < 1e-14
    assert torch.equal(end, x[:, -4:].mT)
    for cut in (1, 2, 9):
        first, state = op(x[:, :cut], weight, None)
        second, last = op(x[:, cut:], weight, state)
        assert (torch.cat([first, second], 1) - y).abs().max() < 1e-14
        assert torch.equal(last, end)


def test_both_convolutions_train_the_same_model(options: session.Options) -> None:
    """Step times with and without the kernel are of the same training."""
    (_, ours), (_, torchs) = (
        run(replace(options, steps=8, convolution=c)) for c in ("kernel-fun", "torch")
    )  # fmt: skip
    assert ours.held_out_loss == pytest.approx(torchs.held_out_loss, abs=1e-3)
    assert ours.convolution == "kernel-fun"
    assert torchs.convolution == "torch"
    for result in (ours, torchs):
        assert result.step_ms is not None
        assert 0 < result.step_ms < 1e3 * result.seconds
    assert "convolution by torch" in (options.out / "summary.txt").read_text(encoding="utf-8")


def test_without_matplotlib_the_rest_is_there(
    options: session.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"] or ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    _, result = run(replace(options, steps=1))
    assert not (options.out / "loss.png").exists()
    assert len(result.files) == 4


def test_text_is_split_and_never_trained_on_past_the_cut(words: Path) -> None:
    loaded = text.load(words, window=100)
    raw = words.read_bytes()
    assert bytes(loaded.train.tolist()) + bytes(loaded.held_out.tolist()) == raw
    assert len(loaded.held_out) == int(len(raw) * text.HELD_OUT)
    x, y = loaded.batch(3, 100, torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (3, 100)
    assert torch.equal(x[:, 1:], y[:, :-1])
    x, y = loaded.held_out_windows(50, 2)
    assert torch.equal(x[0], loaded.held_out[:50].long())
    assert torch.equal(y[0], loaded.held_out[1:51].long())


def test_the_last_training_window_is_reachable() -> None:
    loaded = text.Text("t", torch.arange(12, dtype=torch.uint8), torch.arange(5, dtype=torch.uint8))
    seen = {int(loaded.batch(1, 10, torch.Generator().manual_seed(s))[1][0, -1]) for s in range(20)}
    assert seen == {10, 11}


@pytest.mark.parametrize("content", [b"", b"too short"])
def test_a_text_that_is_too_short_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"`--text` must hold at least 142 bytes .* got {len(content)}"):
        text.load(path, window=70)


def test_the_default_text_is_cpython_s_documentation() -> None:
    loaded = text.load(None, window=256)
    assert "pydoc_data.topics" in loaded.name
    assert len(loaded.train) > 300_000


def test_schedule_rises_falls_and_ends_low() -> None:
    rates = [TINY.rate(step) for step in range(TINY.steps)]
    assert rates[0] < rates[3] <= TINY.learning_rate
    assert max(rates) == max(rates[3:5])
    assert rates[-1] < 0.1 * TINY.learning_rate


class TestCommand:
    @pytest.fixture(autouse=True)
    def tiny(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recipe, "CPU", TINY)

    def test_plain(self, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "o"
        arguments = ["demo", "--text", str(words), "--out", str(out), "--device", "cpu", "--steps", "10"]
        assert cli.main(arguments) == 0
        printed = capsys.readouterr().out
        for wanted in (
            "served by eager", "fwd_intra", "training 10/10", "nats/byte", "bytes/s",
            "chunk and recurrent logits agree", "The ", "loss.png",
        ):  # fmt: skip
            assert wanted in printed

    def test_json(self, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["demo", "--text", str(words), "--out", str(tmp_path / "o"), "--device", "cpu"]
        assert cli.main([*arguments, "--steps", "3", "--backend", "eager", "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["steps_done"] == 3
        assert data["backend"] == "eager"
        assert data["agreement"]["same_choice"] == data["agreement"]["bytes"]

    def test_interrupt(
        self, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        loss_of = train.loss_of
        calls: list[None] = []

        def press_in_a_step(*args: Any) -> torch.Tensor:
            calls.append(None)
            if len(calls) == 4:
                signal.raise_signal(signal.SIGINT)
            return loss_of(*args)

        monkeypatch.setattr(train, "loss_of", press_in_a_step)
        out = tmp_path / "o"
        arguments = ["demo", "--text", str(words), "--out", str(out), "--device", "cpu"]
        assert cli.main(arguments) == 130
        assert "interrupted: what was trained so far is kept" in capsys.readouterr().out
        assert (out / "loss.png").exists()
        assert (out / "sample.txt").exists()

    def test_a_backend_that_cannot_serve_is_refused(
        self, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["demo", "--text", str(words), "--out", str(tmp_path / "o"), "--device", "cpu"]
        assert cli.main([*arguments, "--backend", "sm90"]) == 2
        assert "sm90" in capsys.readouterr().err

    def test_control_bytes_do_not_reach_the_terminal(self) -> None:
        assert demo_command._printable("a\x1b[2Jb\tc\nd\x07é") == "a\ufffd[2Jb\tc\nd\ufffdé"

    @pytest.mark.parametrize("steps", ["0", "-3"])
    def test_steps_must_be_positive(
        self, steps: str, words: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["demo", "--text", str(words), "--steps", steps]) == 2
        assert f"`--steps` must be at least 1, got {steps}" in capsys.readouterr().err

    def test_files_are_asked_for_before_training(
        self, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        absent = tmp_path / "absent"
        assert cli.main(["demo", "--text", str(absent)]) == 2
        assert f"`--text` must be a file, got {absent}" in capsys.readouterr().err
        assert cli.main(["demo", "--text", str(words), "--out", str(words)]) == 2
        assert f"`--out` must be a directory that can be made, got {words}" in capsys.readouterr().err


def test_two_backends_are_compared_from_the_same_seeds(
    options: session.Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The names alone differ here, so the losses are equal; a shifted loss is told from noise."""
    monkeypatch.setattr(
        compare.config.KDA_BACKEND.__class__, "set", lambda self, value: contextlib.nullcontext()
    )
    found = compare.compare(options, ("eager", "fla"))
    assert found.backends == ["eager", "fla"]
    assert found.final("eager") == found.final("fla")
    assert found.between_backends == 0 < found.between_seeds
    assert found.agrees
    names = {path.name for path in compare.write(found, tmp_path)}
    assert names == {"compare.json", "compare.png"}
    data = json.loads((tmp_path / "compare.json").read_text(encoding="utf-8"))
    assert data["agrees"]
    assert len(data["runs"]) == 4
    step, loss = found.runs[1].held_out[-1]
    worse = replace(found.runs[1], held_out=[(step, loss + 2 * found.between_seeds)])
    assert not replace(found, runs=[found.runs[0], worse, *found.runs[2:]]).agrees


def test_a_backend_is_not_compared_with_itself(options: session.Options) -> None:
    with pytest.raises(ValueError, match="`--compare`"):
        compare.compare(options, ("eager", "eager"))


def test_generation_under_a_backend_that_is_demanded_of_chunk_kda() -> None:
    """sm90 has no recurrent form: the demo's generation takes the one there is."""
    model = ByteModel(TINY.model)
    with config.KDA_BACKEND.set("sm90"):
        logits, _ = model(torch.randint(0, 256, (1, 3)), form="recurrent")
    assert logits.isfinite().all()

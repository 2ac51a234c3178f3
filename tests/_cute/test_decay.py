"""The gate's fp32 arithmetic on numpy, as it is traced, against float64; and that it compiles alone."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cutlass import Float32, Int32, cute

from kernel_fun._cute import decay, inspect
from kernel_fun._cute.compile import Jit, Program, symbol, tensor

X = np.concatenate([np.linspace(-120, 120, 4001), [-np.inf, -1000, 1000, np.inf], -np.logspace(-6, 2, 200)])
A_LOGS = (-100.0, -20.0, -1.0, 0.0, 1.0, 2.77, 20.0, 80.0, 88.0, 100.0)


def exp2(x: Any) -> Any:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        y = np.exp2(np.float32(x))
    return np.where(y < np.float32(2.0**-126), np.float32(0), y)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch):
    """``Gate`` with numpy in the place of the DSL."""
    monkeypatch.setattr(decay, "exp2", exp2)
    monkeypatch.setattr(decay, "magnitude", np.abs)
    monkeypatch.setattr(
        decay, "part", lambda x, y: np.nan_to_num(np.clip(x * y, np.float32(0), np.float32(1)))
    )
    monkeypatch.setattr(
        decay, "cut", lambda x, limit=126.0: np.clip(x, np.float32(-limit), np.float32(limit))
    )
    monkeypatch.setattr(decay, "Float32", np.float32)
    monkeypatch.setattr(decay, "cutlass", SimpleNamespace(min=np.minimum, max=np.maximum))
    arch = SimpleNamespace(rcp_approx=lambda x: np.float32(1) / x)
    monkeypatch.setattr(decay, "cute", SimpleNamespace(arch=arch))
    return decay.Gate


def exact(kind: str, x: np.ndarray, A_log: float, bound: float) -> np.ndarray:
    """Natural-log decay in float64."""
    if kind == "log":
        return x
    if kind == "bounded":
        with np.errstate(over="ignore"):
            return bound / (1 + np.exp(-np.exp(A_log) * x))
    with np.errstate(over="ignore", invalid="ignore"):
        tail = np.exp(A_log - np.abs(x))
        e = np.exp(-np.abs(x))
        ratio = np.where(e > 0, np.log1p(e) / np.where(e > 0, e, 1), 1)
        return -(np.exp(A_log) * np.maximum(x, 0) + tail * ratio)


@pytest.mark.parametrize("A_log", A_LOGS)
@pytest.mark.parametrize("kind", ["softplus", "bounded"])
def test_decay_of_every_raw_gate(gate: Any, kind: str, A_log: float):
    x = X.astype(np.float32)
    with np.errstate(all="ignore"):
        head = gate.of_head(kind, np.float32(A_log), np.float32(-5.0))
        a = np.asarray(head.decay(x), np.float64)
        l2 = np.asarray(head.log2_decay(x), np.float64)
    l = exact(kind, x.astype(np.float64), A_log, -5.0)
    assert not np.isnan(a).any()
    assert (a >= 0).all()
    assert (a <= 1).all()
    np.testing.assert_allclose(a, np.exp(l), rtol=3e-4, atol=2e-5)
    # the log itself, where fp32 can tell it from 0: what a long run of tokens adds up
    seen = (l < -1e-30) & (l > -1e30)
    np.testing.assert_allclose(l2[seen] / decay.LOG2E, l[seen], rtol=3e-5)


@pytest.mark.parametrize("x, A_log", [(np.nan, 0.0), (0.5, np.nan)], ids=["g", "A_log"])
@pytest.mark.parametrize("kind", ["softplus", "bounded"])
def test_nan_stays(gate: Any, kind: str, x: float, A_log: float):
    head = gate.of_head(kind, np.float32(A_log), np.float32(-5.0))
    assert np.isnan(head.decay(np.float32(x)))


@pytest.mark.parametrize("x, a", [(0.0, 1.0), (-np.inf, 0.0), (-1000.0, 0.0), (-np.log(2.0), 0.5)])
def test_the_log_gate_is_its_own_logarithm(gate: Any, x: float, a: float):
    head = gate.of_head("log", None, np.float32(0))
    np.testing.assert_allclose(head.decay(np.float32(x)), a, rtol=1e-6)


@pytest.mark.parametrize("A_log", (*A_LOGS, -np.inf, np.inf))
@pytest.mark.parametrize("kind", decay.GATES)
def test_a_row_without_a_token_has_no_decay(gate: Any, kind: str, A_log: float):
    with np.errstate(all="ignore"):
        head = gate.of_head(kind, None if kind == "log" else np.float32(A_log), np.float32(-5.0))
        assert head.decay(np.float32(decay.NO_DECAY[kind])) == 1.0


def test_the_polynomial():
    e = np.concatenate([np.linspace(0, 1, 20001), np.logspace(-12, 0, 2000)]).astype(np.float32)
    p = np.full_like(e, decay.LOG1P[-1])
    for c in decay.LOG1P[-2::-1]:
        p = p * e + np.float32(c)
    wide = e.astype(np.float64)
    true = np.where(wide > 0, np.log1p(wide) / np.where(wide > 0, wide, 1), 1)
    assert np.abs(p / true - 1).max() < 8.6e-6


@dataclass(frozen=True)
class Config:
    kind: str


class Decays:
    def __init__(self, config: Config) -> None:
        self.kind = config.kind

    @cute.jit
    def __call__(self, mX: cute.Tensor, A_log: Float32, bound: Float32, blocks: Int32, stream: Any):
        self.decays(mX, A_log, bound).launch(grid=(blocks, 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def decays(self, mX: cute.Tensor, A_log: Float32, bound: Float32):
        i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        mX[i] = decay.Gate.of_head(self.kind, A_log, bound).decay(mX[i])


def build(config: Config) -> Program:
    return Program(Decays(config), (tensor("float32", symbol()), Float32(0.0), Float32(0.0), Int32(1)))


def test_it_compiles_alone(cache_dir: Any):
    (kernel,) = inspect.resources(Jit(build, "sm_90a").object(Config("softplus")))
    assert kernel.registers <= 32
    assert kernel.stack_bytes == 0

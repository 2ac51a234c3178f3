"""What a warm call of causal_conv1d costs the host beside Triton's launches: calls made by our own Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

pytest.importorskip("triton")

from calls import calls_of
from kernel_fun._common import config, support
from kernel_fun._common import device as devices
from kernel_fun.cconv import causal_conv1d, causal_conv1d_update
from kernel_fun.cconv._kernels.triton import bwd, fwd


class Nothing:
    """A Triton kernel that launches nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, name in (
        (fwd, "cconv_fwd_triton"),
        (bwd, "cconv_bwd_triton"),
        (bwd, "cconv_bwd_reduce_triton"),
    ):
        monkeypatch.setattr(module, name, Nothing())
    monkeypatch.setattr(support, "missing", lambda need: None)
    monkeypatch.setenv(config.CCONV_BACKEND.name, "triton")
    with devices.pretend("sm90"):
        yield


@pytest.mark.parametrize(
    ("what", "ceiling"), [("inference", (35, 35)), ("training", (43, 40)), ("backward", (25, 20))]
)
def test_a_warm_call_makes_few_calls(what: str, ceiling: tuple[int, int]) -> None:
    x, weight = torch.zeros(1, 64, 256, dtype=torch.bfloat16), torch.zeros(256, 4)
    if what != "inference":
        x.requires_grad_()
        weight.requires_grad_()
    step: Callable[[], Any] = lambda: causal_conv1d(x, weight, activation="silu")  # noqa: E731
    if what == "backward":
        y, _ = step()
        dy = torch.ones_like(y)
        step = lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)  # noqa: E731
    step(), step()
    found = calls_of(step)
    assert 0 < found["python"] <= ceiling[0], found
    assert 0 < found["built in"] <= ceiling[1], found


def test_a_tangent_is_refused_before_anything_is_launched() -> None:
    """No kernel would hand it on; also where the same call was made before without one."""
    x, weight = torch.randn(1, 8, 6), torch.randn(6, 4)
    causal_conv1d(x, weight), causal_conv1d(x, weight)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(
            NotImplementedError, match=r"no forward-mode derivative .*: `x` must carry no tangent"
        ):
            causal_conv1d(dual, weight)
        with pytest.raises(NotImplementedError, match="_update has no forward-mode derivative"):
            causal_conv1d_update(dual[:, 0], torch.zeros(1, 6, 4), weight=weight)

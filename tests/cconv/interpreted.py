"""The Triton kernels in Triton's interpreter, on CPU tensors; run by tests/_triton/test_interpreted.py.

The stages are called as the plan would call them: no plan offers Triton a tensor on the CPU. The interpreter
truncates to bfloat16 where hardware rounds, so bfloat16 is left to the GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_fun.cconv import ops, reference
from kernel_fun.cconv._kernels.triton import bwd, config, fwd, update
from kernel_fun.cconv.call import bind, bind_step
from kernel_fun.testing import poisoned_empty

from .cases import Case, check, run

FULL = Case(D=5, bias=True, residual=True, h0=True, ht=True, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 tokens, so that short problems have several, and tails."""
    for name, pinned in config.TILES.items():
        monkeypatch.setitem(config.TILES, name, replace(pinned, BD=32, BT=16, warps=1))
    config.fitted.cache_clear()


def stages(
    case: Case, arguments: dict[str, Any], upstream: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What the stages return, by the names of ``cases.run``."""
    call = bind({**ops._defaults(), **arguments, "kwargs": {}})
    with poisoned_empty():
        y, ht = fwd.fwd(call)
        g = bwd.bwd(call, upstream["dy"], upstream.get("dht"), True)
    found = {"y": y, "ht": ht, "dx": g.dx, "dweight": g.dweight, "dbias": g.dbias, "dinitial_state": g.dh0}
    return {name: value for name, value in found.items() if value is not None}


def compare(case: Case) -> None:
    arguments, upstream = case.arguments(), case.upstream()
    truth = run(reference.causal_conv1d, arguments, **upstream, double=True)
    truth.pop("dresidual", None)
    check(truth, stages(case, arguments, upstream))


@pytest.mark.parametrize(
    "size",
    [
        {"B": 1, "T": 1},
        {"B": 2, "T": 2},
        {"B": 1, "T": 19},
        {"B": 3, "T": 0},
        {"lengths": (5, 0, 1, 9, 0), "tail": 3},
        {"lengths": (0, 17, 3), "tail": 1},
        {"lengths": ()},
        {"lengths": (0, 0)},
    ],
    ids=str,
)
def test_sizes(size: dict[str, Any]) -> None:
    compare(replace(FULL, **size))


@pytest.mark.parametrize("lengths", [None, (0, 17, 3)], ids=["dense", "packed"])
def test_nothing_optional(lengths: tuple[int, ...] | None) -> None:
    compare(Case(B=1, T=19, D=5, lengths=lengths, dtype=torch.float32))


@pytest.mark.parametrize("W", [2, 8])
@pytest.mark.parametrize("lengths", [None, (1, 12, 0, 6)], ids=["dense", "packed"])
def test_widths(W: int, lengths: tuple[int, ...] | None) -> None:
    compare(replace(FULL, W=W, B=1, T=19, lengths=lengths))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_float16(activation: str | None) -> None:
    case = replace(FULL, B=1, D=40, dtype=torch.float16, weight_dtype=torch.float32, activation=activation)
    compare(case)


def test_strides_and_stray_rows() -> None:
    case = replace(FULL, lengths=(9, 8), tail=4)
    arguments, upstream = case.arguments(), case.upstream()
    expected = stages(case, arguments, upstream)
    for name in ("x", "residual"):
        arguments[name][:, 17:] = torch.nan
        arguments[name] = arguments[name].mT.contiguous().mT
    for name in ("weight", "initial_state"):
        arguments[name] = arguments[name].mT.contiguous().mT
    upstream["dy"][:, 17:] = torch.nan
    found = stages(case, arguments, upstream)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("W", [2, 4])
def test_update(W: int) -> None:
    a = replace(FULL, B=3, T=4, W=W).arguments()
    call = bind({**ops._defaults(), **a, "kwargs": {}})
    y, ht = fwd.fwd(call)
    assert ht is not None
    cache = torch.empty(3, W, 5).mT.copy_(a["initial_state"])
    for t in range(4):
        step = {"x": a["x"][:, t], "residual": a["residual"][:, t], "cache": cache}
        y_t = update.update(bind_step({**step, **{n: a[n] for n in ("weight", "bias", "activation")}}))
        assert torch.allclose(y_t, y[:, t], rtol=1e-5, atol=1e-6)
    assert torch.equal(cache, ht)

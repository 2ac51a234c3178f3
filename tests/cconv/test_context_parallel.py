"""causal_conv1d over 2, 3 and 4 processes equals one process: outputs, states and every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kernel_fun.cconv import causal_conv1d, is_supported
from kernel_fun.kda import build_cp_context
from ranks import Raised, Ranks

LEAVES = ("x", "weight", "bias", "residual", "initial_state")
BY_TOKEN = ("x", "residual")
D = 5

PACKINGS = {
    "one sequence": (0, 48),
    "boundaries inside": (0, 7, 8, 31, 48),
    "boundaries at every rank": (0, 12, 16, 24, 32, 36, 48),
    "empty sequences": (0, 0, 12, 12, 13, 24, 24, 48, 48),
    "pieces shorter than the window": (0, 24),
    "tiny sequences in tiny pieces": (0, 2, 2, 3, 4, 11, 23, 24),
}


@dataclass(frozen=True)
class Problem:
    """One packed batch, made alike in every process."""

    cu: tuple[int, ...]
    layout: str
    W: int = 4
    dtype: torch.dtype = torch.float64
    states: bool = True
    reduce: bool = False

    def leaves(self) -> dict[str, Tensor]:
        T, N = self.cu[-1], len(self.cu) - 1
        shapes = {
            "x": (1, T, D),
            "weight": (D, self.W),
            "bias": (D,),
            "residual": (1, T, D),
            "initial_state": (N, D, self.W),
        }
        make = torch.Generator().manual_seed(7)
        found = {n: torch.randn(s, generator=make, dtype=torch.float64) for n, s in shapes.items()}
        return {n: x.to(self.dtype) for n, x in found.items() if self.states or n != "initial_state"}

    def upstream(self) -> tuple[Tensor, Tensor]:
        make = torch.Generator().manual_seed(8)
        shapes = ((1, self.cu[-1], D), (len(self.cu) - 1, D, self.W))
        dy, dht = (torch.randn(s, generator=make, dtype=torch.float64).to(self.dtype) for s in shapes)
        return dy, dht


def results(p: Problem, x: dict[str, Tensor], dy: Tensor, dht: Tensor, **more: Any) -> dict[str, Tensor]:
    x = {n: t.clone().requires_grad_() for n, t in x.items()}
    y, ht = causal_conv1d(**x, activation="silu", output_final_state=p.states, **more)
    loss = (y * dy).sum() + (0.0 if ht is None else (ht * dht).sum())
    loss.backward()
    grads = {f"d{n}": t.grad for n, t in x.items() if t.grad is not None}
    return {"y": y.detach(), **grads, **({} if ht is None else {"ht": ht.detach()})}


def on_rank(group: Any, p: Problem) -> tuple[dict[str, Tensor], Any, Any, list[int]]:
    context = build_cp_context(torch.tensor(p.cu), group, layout=p.layout, reduce_gradients=p.reduce)
    members = list(context.sequences)
    x = {n: context.shard(t) if n in BY_TOKEN else t for n, t in p.leaves().items()}
    if p.states:
        x["initial_state"] = x["initial_state"][members]
    dy, dht = p.upstream()
    gathers: list[int] = []
    patch = pytest.MonkeyPatch()
    for name in ("all_gather_single", "all_gather_into_tensor"):
        if hasattr(dist, name):
            patch.setattr(dist, name, counted(getattr(dist, name), gathers))
    try:
        found = results(p, x, context.shard(dy), dht[members], cp_context=context)
    finally:
        patch.undo()
    return found, context.token_ranges, members, gathers


def counted(gather: Any, seen: list[int]) -> Any:
    def watched(output: Tensor, given: Tensor, **options: Any) -> Any:
        seen.append(given.numel())
        return gather(output, given, **options)

    return watched


def compare(p: Problem, parts: list[Any], tolerance: float = 1e-12) -> None:
    expected = results(p, p.leaves(), *p.upstream(), cu_seqlens=torch.tensor(p.cu))
    whole = {n: torch.zeros_like(t) for n, t in expected.items()}
    for found, ranges, members, gathers in parts:
        assert found.keys() == expected.keys()
        assert len(gathers) == (2 if p.W > 1 else 0)
        for name, mine in found.items():
            if name in ("y", "dx", "dresidual"):
                at = 0
                for start, stop in ranges:
                    whole[name][:, start:stop] = mine[:, at : at + stop - start]
                    at += stop - start
            elif name in ("ht", "dinitial_state"):
                whole[name].index_add_(0, torch.tensor(members), mine)
            elif p.reduce:
                whole[name] = mine
            else:
                whole[name] += mine
    for name, want in expected.items():
        assert (whole[name] - want).abs().max() <= tolerance * max(1.0, want.abs().max()), name


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_equals_one_process(packing: str, world: int, layout: str, ranks: Ranks) -> None:
    tiny = "tiny" in packing or "shorter" in packing
    p = Problem(PACKINGS[packing], layout, W=8 if tiny else 4)
    compare(p, ranks.run(world, on_rank, p))


@pytest.mark.parametrize("W", [1, 2, 11])
@pytest.mark.parametrize("states", [False, True])
def test_widths(W: int, states: bool, ranks: Ranks) -> None:
    p = Problem(PACKINGS["boundaries inside"], "zigzag", W=W, states=states)
    compare(p, ranks.run(3, on_rank, p))


def test_bfloat16_is_rounded_as_in_one_process(ranks: Ranks) -> None:
    p = Problem(PACKINGS["one sequence"], "contiguous", dtype=torch.bfloat16)
    compare(p, ranks.run(4, on_rank, p), tolerance=2**-7)


def test_parameter_gradients_summed_over_the_group(ranks: Ranks) -> None:
    p = Problem(PACKINGS["boundaries inside"], "contiguous", reduce=True)
    compare(p, ranks.run(4, on_rank, p))


def failing(group: Any, p: Problem, bad: int) -> str:
    context = build_cp_context(torch.tensor(p.cu), group)
    x = context.shard(p.leaves()["x"])
    if dist.get_rank(group) == bad:
        x = x[:, 1:]
    try:
        causal_conv1d(x, p.leaves()["weight"], cp_context=context)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


@pytest.mark.parametrize("bad", range(3))
def test_where_one_rank_raises_all_do_and_none_waits(bad: int, ranks: Ranks) -> None:
    p = Problem(PACKINGS["one sequence"], "contiguous")
    answers, seconds = ranks.try_run(3, failing, p, bad)
    assert seconds < 20
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, Raised), answer
        assert "`x` must hold this rank's T = 16 tokens" in answer
        assert answer.startswith("ContractError" if rank == bad else "PeerFailure")


def test_it_is_served_like_any_other_call(ranks: Ranks) -> None:
    p = Problem(PACKINGS["one sequence"], "contiguous")
    assert set(ranks.run(2, asked, p)) == {(False, "tensor on cpu")}


def asked(group: Any, p: Problem) -> Any:
    context = build_cp_context(torch.tensor(p.cu), group)
    x = p.leaves()
    return is_supported(context.shard(x["x"]), x["weight"], cp_context=context)

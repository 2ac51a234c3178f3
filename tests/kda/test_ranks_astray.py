"""Ranks that catch an error and go on: either they are all at the same call, or every one of them raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from over_ranks import BY_TOKEN, Problem, on_rank
from test_context_parallel import PACKINGS, broken, compare
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernel_fun.cconv import causal_conv1d
from kernel_fun.cconv.context_parallel import CausalConv1dParallel
from kernel_fun.kda import build_cp_context, chunk_kda
from kernel_fun.kda.context_parallel import ContextParallelKDA
from ranks import Ranks, a_group_like

ONE = Problem(PACKINGS["one sequence"], states=False)
GOOD = Problem(PACKINGS["boundaries inside"])
ASTRAY = "the ranks are at different calls: make a new group"


def local(p: Problem, context: Any) -> dict[str, Any]:
    return {n: context.shard(t) if n in BY_TOKEN else t for n, t in p.leaves().items()}


def leaves(p: Problem, context: Any) -> dict[str, Any]:
    return {n: t.clone().requires_grad_() for n, t in local(p, context).items()}


def attempt(said: list[str], step: Callable[[], Any]) -> None:
    """Do a step of training, and go on whatever happens."""
    try:
        step()
        said.append("returned")
    except (Exception, KeyboardInterrupt) as error:
        said.append(f"{type(error).__name__}: {error}")


def behind_the_exchange(group: Any, p: Problem) -> list[str]:
    """Rank 0 fails behind the exchange of its first call."""
    from kernel_fun.kda._kernels.eager import fwd_state

    real, calls, said = fwd_state.fwd_state, iter((False, True)), list[str]()

    def second_breaks(*args: Any, **more: Any) -> Any:
        return broken() if next(calls, False) else real(*args, **more)

    context = build_cp_context(torch.tensor(p.cu), a_group_like(group))
    x = local(p, context)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 0:
            patch.setattr(fwd_state, "fwd_state", second_breaks)
        for _ in range(3):
            attempt(said, lambda: p.call(x, cp_context=context))
    return said


def test_a_rank_that_failed_alone_and_goes_on_is_found(ranks: Ranks) -> None:
    """Its calls and those of the others would pair up, one apart, and look alike."""
    first, second = ranks.run(2, behind_the_exchange, ONE)
    assert first[0].startswith("MemoryError")
    assert second[0] == "returned"
    for answer in (*first[1:], *second[1:]):
        assert answer.startswith(
            "PeerFailure: chunk_kda forward: ranks of the context-parallel group went on"
        )
        assert f"(1 of rank 0, 0 of rank 1), {ASTRAY}" in answer
    compare(GOOD, ranks.run(2, on_rank, GOOD))  # other groups of these ranks work on


UNTOLD = {
    "no v": "`v` must be a torch.Tensor",
    "no room for the message": "out of memory in a kernel",
    "a torn context": "`cp_context` must hold `pre_num_ranks`",
    "an argument left out": "missing 1 required positional argument: 'beta'",
    "an argument twice": "got multiple values for argument 'q'",
    "no v, everywhere": "`v` must be a torch.Tensor",
}
"""Mistakes that a rank cannot tell, and its own error."""


def untold(group: Any, p: Problem, how: str) -> list[str]:
    """Rank 0, or every rank, makes a mistake that the others are not told of."""
    context = build_cp_context(torch.tensor(p.cu), a_group_like(group))
    x, said = local(p, context), list[str]()
    strays = dist.get_rank(group) == 0 or how.endswith("everywhere")
    for mistaken in (True, False, False) if strays else (False, False):
        with pytest.MonkeyPatch.context() as patch:
            wrong, cut = x, context
            if mistaken and how.startswith("no v"):
                wrong = {**x, "v": None}
            elif mistaken and how == "an argument left out":
                wrong = {n: t for n, t in x.items() if n != "beta"}
            elif mistaken and how == "a torn context":
                cut = replace(context, pre_num_ranks=None)
            elif mistaken and how == "no room for the message":
                patch.setattr("kernel_fun._common.exchange.Exchange.reserve", broken)
            if mistaken and how == "an argument twice":
                attempt(said, lambda: chunk_kda(x["q"], **x, cp_context=context))
            else:
                attempt(said, lambda wrong=wrong, cut=cut: p.call(wrong, cp_context=cut))
    return said


@pytest.mark.parametrize("how", UNTOLD)
def test_a_rank_that_could_not_tell_and_goes_on_is_found(how: str, ranks: Ranks) -> None:
    """Its next call and the others' last would pair up; where all ranks made the mistake, none is ahead."""
    answers = ranks.run(2, untold, ONE, how)
    for answer in answers if how.endswith("everywhere") else answers[:1]:
        assert UNTOLD[how] in answer.pop(0)
    for text in (*answers[0], *answers[1]):
        if how.endswith("everywhere"):
            assert text == "returned"
        else:
            assert text.startswith(
                "PeerFailure: chunk_kda forward: ranks of the context-parallel group went on"
            )
            assert f"(1 of rank 0, 0 of rank 1), {ASTRAY}" in text
    compare(GOOD, ranks.run(2, on_rank, GOOD))  # other groups of these ranks work on


def backwards(group: Any, p: Problem, orders: tuple[tuple[int, ...], ...]) -> list[str]:
    """Each rank runs the backwards of two calls of the same sizes in its own order."""
    context = build_cp_context(torch.tensor(p.cu), a_group_like(group))
    outputs = [p.call(leaves(replace(p, seed=s), context), cp_context=context)[0] for s in (1, 2)]
    said: list[str] = []
    for i in orders[dist.get_rank(group)]:
        attempt(said, lambda i=i: outputs[i].sum().backward(retain_graph=True))
    return said


def test_backwards_in_another_order_are_found(ranks: Ranks) -> None:
    for answer in ranks.run(2, backwards, ONE, ((0, 1), (1, 0))):
        for text in answer:
            assert text.startswith(
                "PeerFailure: chunk_kda backward: rank 1 of the context-parallel group runs"
            )
            assert ASTRAY in text
    for order in ((1, 0), (0, 0, 1)):  # any one order, and a backward again
        assert ranks.run(2, backwards, ONE, (order, order)) == [["returned"] * len(order)] * 2


def training(group: Any, p: Problem, how: str) -> list[str]:
    """Four steps; in the first something of rank 0's own fails, which no call of ours takes part in."""
    context = build_cp_context(torch.tensor(p.cu), a_group_like(group))
    first, said = dist.get_rank(group) == 0, list[str]()

    def step(n: int) -> None:
        x, fails = leaves(replace(p, seed=n), context), first and n == 0
        if how == "a hook that packs" and fails:
            with torch.autograd.graph.saved_tensors_hooks(broken, lambda t: t):
                p.call(x, cp_context=context)
        elif how == "one rank checkpoints" and first:
            o = checkpoint(lambda: p.call(x, cp_context=context)[0], use_reentrant=False)
            assert isinstance(o, Tensor)
            o.sum().backward()
            return
        o = p.call(x, cp_context=context)[0]
        if how == "a loss" and fails:
            broken()
        if how == "a hook before" and fails:
            o.register_hook(broken)
        if how == "an interrupt" and fails:
            raise KeyboardInterrupt
        o.sum().backward()

    for n in range(4):
        attempt(said, lambda n=n: step(n))
    return said


@pytest.mark.parametrize(
    "how", ["a loss", "a hook before", "an interrupt", "a hook that packs", "one rank checkpoints"]
)
def test_a_rank_that_leaves_a_pass_out_and_goes_on_is_found(how: str, ranks: Ranks) -> None:
    """Passes that meet are of one call on every rank, or the group is done with: no later step returns."""
    for rank, answer in enumerate(ranks.run(2, training, ONE, how)):
        own = rank == 0 and how != "one rank checkpoints"
        assert len(answer) == 4
        assert answer[0].startswith(("MemoryError", "KeyboardInterrupt") if own else "PeerFailure"), answer
        for text in answer[own:]:
            assert text.startswith("PeerFailure: chunk_kda"), answer
            assert ASTRAY in text
    compare(GOOD, ranks.run(2, on_rank, GOOD))


def checkpointed(group: Any, p: Problem, reentrant: bool) -> list[str]:
    """Recomputation stops early by raising in a hook that packs; a rank may want other gradients."""
    context = build_cp_context(torch.tensor(p.cu), group)
    said: list[str] = []

    def block(*tensors: Tensor) -> Tensor:
        o = p.call(dict(zip(names, tensors)), cp_context=context)[0]
        return (o * o).tanh() if dist.get_rank(group) == 0 else o

    for n in range(3):
        x = leaves(replace(p, seed=n), context)
        names = list(x)
        step = lambda x=x: checkpoint(block, *x.values(), use_reentrant=reentrant).sum().backward()  # noqa: E731
        attempt(said, step)
    return said


@pytest.mark.parametrize("reentrant", [False, True])
def test_ranks_that_all_checkpoint_are_not_astray(reentrant: bool, ranks: Ranks) -> None:
    assert ranks.run(2, checkpointed, ONE, reentrant) == [["returned"] * 3] * 2


def taking_turns(group: Any, p: Problem) -> list[str]:
    """Every rank fails once where no other hears of it, but not at the same call."""
    context = build_cp_context(torch.tensor(p.cu), a_group_like(group))
    x, said = local(p, context), list[str]()
    turns = (True, False, False, False) if dist.get_rank(group) == 0 else (False, True, False, False)
    for mistaken in turns:
        wrong = {**x, "v": None} if mistaken else x
        attempt(said, lambda wrong=wrong: p.call(wrong, cp_context=context))
    return said


def test_ranks_that_have_been_astray_stay_so(ranks: Ranks) -> None:
    """The second failure makes the counts equal again, and the ranks no less astray."""
    first, second = ranks.run(2, taking_turns, ONE)
    assert "`v` must be a torch.Tensor" in first.pop(0)
    assert "`v` must be a torch.Tensor" in second.pop(1)
    assert all(text.startswith("PeerFailure") and ASTRAY in text for text in (*first, *second))


def no_node(group: Any, p: Problem) -> list[str]:
    """Rank 0 cannot make a node of autograd, for a convolution and for chunk_kda, once each."""
    context, said = build_cp_context(torch.tensor(p.cu), a_group_like(group)), list[str]()
    x = leaves(p, context)
    weight = torch.ones(x["v"].shape[-1], 3, dtype=x["v"].dtype, requires_grad=True)

    def convolve() -> Any:
        return causal_conv1d(x["v"][:, :, 0], weight, cp_context=context)

    def call() -> Any:
        return p.call(x, cp_context=context)

    for node, step in ((CausalConv1dParallel, convolve), (ContextParallelKDA, call)):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank(group) == 0:
                patch.setattr(node, "apply", broken)
            attempt(said, step)
        attempt(said, step)
    return said


def test_a_rank_whose_node_cannot_be_made_is_heard(ranks: Ranks) -> None:
    first, second = ranks.run(2, no_node, ONE)
    assert first == ["MemoryError: out of memory in a kernel", "returned"] * 2
    assert second[1::2] == ["returned"] * 2
    for answer in second[::2]:
        assert "rank 0 of the context-parallel group raised MemoryError: out of memory" in answer

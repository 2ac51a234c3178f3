"""causal_conv1d over 2, 3 and 4 processes equals one process: outputs, states and every gradient."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kernel_fun.cconv import causal_conv1d, is_supported
from kernel_fun.kda import build_cp_context
from ranks import Raised, Ranks, a_group_like

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
        assert len(gathers) == (2 if p.W > 1 or p.reduce else 0)
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


MISTAKES = {
    "no x": ({"x": None}, "`x` must be a torch.Tensor, got NoneType"),
    "x of two dimensions": ({"x": torch.zeros(24, D)}, "`x` must have shape"),
    "x on the meta device": ({"x": torch.zeros(1, 24, D, device="meta")}, "`x` must hold data"),
    "a sparse x": ({"x": torch.zeros(1, 24, D).to_sparse()}, "`x` must be a dense tensor"),
    "two rows": ({"x": torch.zeros(2, 24, D)}, "`x` must have batch size 1 with `cp_context`, got 2"),
    "no weight, states": ({"weight": None, "initial_state": torch.zeros(1, D, 4)}, "`weight` must be a torch.Tensor"),
    "states of W - 1 inputs": ({"initial_state": torch.zeros(1, D, 3)}, "`initial_state` must have shape"),
    "a bias of other channels": ({"bias": torch.zeros(D + 1)}, "`bias` must have shape"),
    "an activation": ({"activation": "tanh"}, "`activation` must be None, 'silu'"),
}  # fmt: skip


def mistaken(group: Any, bad: int, change: dict[str, Any], alone: bool, **of_context: Any) -> str:
    """Rank ``bad`` calls with other arguments; ``alone``: nobody else calls, in a group of their own."""
    group = a_group_like(group) if alone else group
    context = build_cp_context(torch.tensor([0, 48]), group, **of_context)
    x = context.shard(torch.randn(1, 48, D))
    arguments: dict[str, Any] = {"x": x, "weight": torch.randn(D, 4)}
    if dist.get_rank(group) == bad:
        arguments.update(change)
    elif alone:
        return "did not call"
    try:
        causal_conv1d(**arguments, cp_context=context)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


@pytest.mark.parametrize("bad", range(2))
@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_that_leaves_the_size_known_reaches_all(what: str, bad: int, ranks: Ranks) -> None:
    change, message = MISTAKES[what]
    answers, seconds = ranks.try_run(2, mistaken, bad, change, False)
    assert seconds < 20
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, Raised), answer
        # the others read as many bytes of it as its data would have had
        assert (message if rank == bad else message[:15]) in answer
        assert answer.startswith("Contract" if rank == bad else "PeerFailure")


@pytest.mark.parametrize(
    ("change", "what"), [({"bias": torch.zeros(D)}, "bias"), ({"activation": "silu"}, "activation")]
)
def test_ranks_that_compute_something_else_are_told(change: dict[str, Any], what: str, ranks: Ranks) -> None:
    """The gradient of a rank's inputs depends on what later ranks make of them."""
    answers, _ = ranks.try_run(2, mistaken, 1, change, False)
    for answer in answers:
        assert answer.startswith(
            "PeerFailure: causal_conv1d forward: ranks 0 and 1 of the context-parallel group called with "
            f"different {what}; these must agree: "
        ), answer


def integers(group: Any) -> str:
    """Rank 1 gives integers where the others compute, and send, in float64."""
    context = build_cp_context(torch.tensor([0, 48]), group)
    dtype = torch.int64 if dist.get_rank(group) == 1 else torch.float64
    try:
        causal_conv1d(torch.ones(1, 24, D, dtype=dtype), torch.ones(D, 4).double(), cp_context=context)
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


def test_an_x_of_integers_does_not_say_how_wide_the_message_is(ranks: Ranks) -> None:
    first, second = ranks.run(2, integers)
    assert second.startswith("ContractTypeError: `x` must be float32")
    assert first.startswith("PeerFailure: causal_conv1d forward: rank 1 of the context-parallel group raised")


def test_the_context_may_tell_the_taps_of_a_missing_weight(ranks: Ranks) -> None:
    answers, _ = ranks.try_run(2, tapless, 4)
    assert answers[1].startswith("ContractTypeError: `weight` must be a torch.Tensor")
    assert answers[0].startswith("PeerFailure: causal_conv1d forward: rank 1")


def tapless(group: Any, taps: int) -> str:
    return mistaken(group, 1, {"weight": None}, False, conv1d_kernel_size=taps)


UNTOLD = {
    "no weight": {"weight": None},
    "a weight of one dimension": {"weight": torch.zeros(6)},
    "a weight of other channels": {"weight": torch.zeros(D + 1, 4)},
    "no taps": {"weight": torch.zeros(D, 0)},
}


@pytest.mark.parametrize("what", UNTOLD)
def test_no_message_of_a_guessed_size_is_sent(what: str, ranks: Ranks) -> None:
    """It would end the other rank's process, where gloo compares sizes."""
    answers, seconds = ranks.try_run(2, mistaken, 1, UNTOLD[what], True)
    assert seconds < 20
    assert answers[0] == "did not call"
    assert answers[1].startswith(("ContractError: `weight`", "ContractTypeError: `weight`"))


def going_on(group: Any, change: dict[str, Any]) -> list[str]:
    """Rank 1 makes a mistake before its first call, and every rank calls twice."""
    context = build_cp_context(torch.tensor([0, 48]), a_group_like(group))
    good = {"x": context.shard(torch.randn(1, 48, D)), "weight": torch.randn(D, 4)}
    said: list[str] = []
    for arguments in ({**good, **change}, good, good)[dist.get_rank(group) == 0 :]:
        try:
            causal_conv1d(**arguments, cp_context=context)
            said.append("returned")
        except (TypeError, ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("what", UNTOLD)
def test_a_rank_that_could_not_tell_and_goes_on_is_found(what: str, ranks: Ranks) -> None:
    first, second = ranks.run(2, going_on, UNTOLD[what])
    assert second.pop(0).startswith(("ContractError: `weight`", "ContractTypeError: `weight`"))
    for text in (*first, *second):
        assert text.startswith(
            "PeerFailure: causal_conv1d forward: ranks of the context-parallel group went on"
        )


def without_exchange(group: Any) -> list[str]:
    """A convolution of one tap makes no exchange, so a rank whose call of one is refused is not ahead."""
    context = build_cp_context(torch.tensor([0, 48]), a_group_like(group))
    x, said = context.shard(torch.randn(1, 48, D)), list[str]()
    for taps in (1, 4):
        refused = taps == 1 and dist.get_rank(group) == 1
        try:
            causal_conv1d(x, torch.randn(D, taps), activation="tanh" if refused else None, cp_context=context)
            said.append("returned")
        except ValueError as error:
            said.append(str(error))
    return said


def test_where_nobody_waits_nobody_is_ahead(ranks: Ranks) -> None:
    first, (refused, *more) = ranks.run(2, without_exchange)
    assert "`activation` must be None" in refused
    assert [*first, *more] == ["returned"] * 3


def backwards(group: Any, order: tuple[tuple[int, ...], ...]) -> list[str]:
    """Each rank runs the backwards of two calls of the same sizes in its own order."""
    context = build_cp_context(torch.tensor([0, 48]), a_group_like(group))
    x = torch.randn(1, 24, D, requires_grad=True)
    outputs = [causal_conv1d(x, torch.randn(D, 4), cp_context=context)[0] for _ in range(2)]
    said: list[str] = []
    for i in order[dist.get_rank(group)]:
        try:
            outputs[i].sum().backward()
            said.append("returned")
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_backwards_in_another_order_are_found(ranks: Ranks) -> None:
    first, second = ranks.run(2, backwards, ((0, 1), (1, 0)))
    for text in (*first, *second):
        assert text.startswith(
            "PeerFailure: causal_conv1d backward: rank 1 of the context-parallel group runs"
        )
    assert ranks.run(2, backwards, ((1, 0), (1, 0))) == [["returned"] * 2] * 2


def speechless(group: Any) -> tuple[str, list[str]] | None:
    """Rank 1 makes a mistake and has no memory for a message; nobody else calls."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    patch, listener = pytest.MonkeyPatch(), Listener()
    patch.setattr(torch, "empty", no_memory)
    logging.getLogger("kernel_fun").addHandler(listener)
    try:
        return mistaken(group, 1, {"activation": "tanh"}, True), heard
    finally:
        logging.getLogger("kernel_fun").removeHandler(listener)
        patch.undo()


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("no room")


def test_an_error_that_cannot_be_sent_is_raised_as_it_is(ranks: Ranks) -> None:
    _, answer = ranks.run(2, speechless)
    error, heard = answer
    assert error.startswith("ContractError: `activation` must be None")
    (warning,) = (line for line in heard if "not told" in line)
    assert "were not told of ContractError (MemoryError: no room)" in warning


def summed_on_one(group: Any, W: int, how: str) -> str:
    """Rank 0 wants a gradient of the weight, or of a bias, and rank 1 does not."""
    first = dist.get_rank(group) == 0
    context = build_cp_context(torch.tensor([0, 20, 64]), group, reduce_gradients=True)
    x = torch.randn(1, 32, D, requires_grad=True)
    weight = torch.randn(D, W, requires_grad=first or how != "weight")
    bias = torch.randn(D, requires_grad=first) if first or how == "bias" else None
    try:
        y, _ = causal_conv1d(x, weight, bias if "bias" in how else None, cp_context=context)
        y.sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


@pytest.mark.parametrize("W", [1, 3])
@pytest.mark.parametrize("how", ["weight", "bias", "no bias"])
def test_a_sum_that_only_some_ranks_would_make_is_refused_by_all(how: str, W: int, ranks: Ranks) -> None:
    answers, seconds = ranks.try_run(2, summed_on_one, W, how)
    assert seconds < 20
    for answer in answers:
        assert answer.startswith(
            "PeerFailure: causal_conv1d forward: ranks 0 and 1 of the context-parallel group"
        )
        assert "gradients of weight and bias" in answer


@pytest.mark.parametrize("W", [1, 3])
def test_parameter_gradients_of_one_tap_or_more_are_summed(W: int, ranks: Ranks) -> None:
    p = Problem(PACKINGS["boundaries inside"], "zigzag", W=W, reduce=True)
    compare(p, ranks.run(3, on_rank, p))


def changed_input(group: Any, bad: int) -> str:
    """Rank ``bad`` overwrites what its backward needs."""
    context = build_cp_context(torch.tensor([0, 48]), group)
    x = torch.randn(1, 24, D, requires_grad=True)
    weight = torch.randn(D, 4, requires_grad=True)
    y, _ = causal_conv1d(x, weight, cp_context=context)
    if dist.get_rank(group) == bad:
        with torch.no_grad():
            weight.mul_(2)
    try:
        y.sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


@pytest.mark.parametrize("bad", range(2))
def test_a_backward_without_what_it_saved_reaches_all(bad: int, ranks: Ranks) -> None:
    answers, seconds = ranks.try_run(2, changed_input, bad)
    assert seconds < 20
    assert answers[bad].startswith("RuntimeError: one of the variables needed for gradient")
    assert answers[1 - bad].startswith(f"PeerFailure: causal_conv1d backward: rank {bad}")
    assert "RuntimeError: one of the variables" in answers[1 - bad]


def test_it_is_served_like_any_other_call(ranks: Ranks) -> None:
    p = Problem(PACKINGS["one sequence"], "contiguous")
    assert set(ranks.run(2, asked, p)) == {(False, "tensor on cpu")}


def asked(group: Any, p: Problem) -> Any:
    context = build_cp_context(torch.tensor(p.cu), group)
    x = p.leaves()
    return is_supported(context.shard(x["x"]), x["weight"], cp_context=context)

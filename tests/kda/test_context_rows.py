"""A rank that cuts its part of one sequence into rows: as one process, whatever the other ranks do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from over_ranks import BY_TOKEN, LAYOUTS, Problem, alone, context_of, on_rank
from test_context_parallel import (
    FAILURES,
    FORMS,
    TOLERANCE,
    absent,
    compare,
    failing,
    order_of_work,
    with_decay_totals,
)
from torch import Tensor

from kernel_fun._common import config, device
from kernel_fun._common.context_parallel import Piece, Split
from kernel_fun.kda import chunk_kda, context_rows
from kernel_fun.kda.summaries import apply, compose
from kernel_fun.testing import make_inputs
from ranks import Ranks

T = 1536
"""Pieces of 768, 512, 384, 256 and 192 tokens: twos and threes of whole chunks, or not both."""
PACKINGS = {
    "boundaries at ranks": (0, T // 4, T),
    "one at each end": (0, T // 6, T - T // 6, T),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_equals_one_process(rows: int, world: int, layout: str, ranks: Ranks) -> None:
    p = Problem((0, T), layout, rows=rows, seed=world)
    compare(p, ranks.run(world, on_rank, p))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("packing", PACKINGS)
def test_some_ranks_hold_one_sequence(packing: str, world: int, layout: str, ranks: Ranks) -> None:
    p = Problem(PACKINGS[packing], layout, rows=2, seed=world)
    compare(p, ranks.run(world, on_rank, p))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_op(form: str, layout: str, ranks: Ranks) -> None:
    p = replace(Problem((0, 768), layout, rows=2, seed=3), **FORMS[form])
    compare(p, ranks.run(3, on_rank, p))


def each_its_own(group: Any, p: Problem) -> dict[str, Any]:
    return on_rank(group, replace(p, rows=1 + dist.get_rank(group)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_may_cut_differently(layout: str, ranks: Ranks) -> None:
    p = Problem((0, T), layout)
    compare(p, ranks.run(3, each_its_own, p))


def in_parts(group: Any, p: Problem, n: int) -> dict[str, Any]:
    """With M of each row as the product of n."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_rows, "_parts", lambda chains, chunks, sms: n if chunks % n == 0 else 1)
        return on_rank(group, p)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [2, 4])
def test_transitions_are_products_of_those_of_parts(n: int, layout: str, ranks: Ranks) -> None:
    p = Problem((0, 2 * T), layout, rows=2, seed=n)
    compare(p, ranks.run(3, in_parts, p, n))


@pytest.mark.parametrize(
    ("chains", "chunks", "parts"),
    [
        (96, 512, 4),
        (32, 512, 4),
        (128, 512, 1),
        (132, 512, 1),
        (133, 512, 4),
        (264, 512, 1),
        (96, 6, 1),
        (96, 511, 1),
        (96, 128, 1),
        (32, 128, 2),
        (96, 256, 4),
    ],
)
def test_parts_fill_the_gpu(chains: int, chunks: int, parts: int) -> None:
    assert context_rows._parts(chains, chunks, 132) == parts
    assert context_rows._parts(chains, chunks, 1) == 1


def test_parameter_gradients_summed_over_the_group(ranks: Ranks) -> None:
    p = Problem((0, 768), reduce=True, rows=3)
    compare(p, ranks.run(4, on_rank, p))


def batches(group: Any, p: Problem) -> list[tuple[str, int, int]]:
    """Stage, rows and columns of every scan of a forward and a backward."""
    from kernel_fun.kda._kernels.eager import bwd_state, fwd_state

    seen: list[tuple[str, int, int]] = []

    def seeing(stage: Any) -> Any:
        def saw(call: Any, *given: Any, **more: Any) -> Any:
            seen.append((stage.__name__, call.q.shape[0], call.v.shape[3]))
            return stage(call, *given, **more)

        return saw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fwd_state, "fwd_state", seeing(fwd_state.fwd_state))
        patch.setattr(bwd_state, "bwd_state", seeing(bwd_state.bwd_state))
        on_rank(group, p)
    return seen


def test_every_row_is_scanned_and_no_more_are_summarised_than_others_need(ranks: Ranks) -> None:
    p = Problem((0, T), rows=3, K=8, V=4)
    first, second, third, last = ranks.run(4, batches, p)

    def expected(local: int, mapped: int, reverse: int) -> list[tuple[str, int, int]]:
        forward = [("fwd_state", local, 4), ("fwd_state", mapped, 8), ("fwd_state", 3, 4)]
        return [*forward, ("bwd_state", reverse, 4), ("fwd_state", 3, 4), ("bwd_state", 3, 4)]

    assert first == expected(3, 2, 2)  # the first row begins with the caller's state
    assert second == third == expected(3, 3, 3)
    assert last == expected(2, 2, 3)  # nobody needs what the last row does


@pytest.mark.parametrize("rows", [1, 3])
def test_no_rank_has_a_gather_in_flight_beside_work(rows: int, ranks: Ranks) -> None:
    """A gather that waits for another rank holds SMs, which kernels of as many CTAs as SMs miss for a whole wave."""
    first, second, third, last = (done for done, _ in ranks.run(4, order_of_work, Problem((0, T), rows=rows)))
    summaries = ["state", "state"]
    forward, backward = ["send", "arrive", "state", "confirm"], ["send", "arrive", "state"]
    scan = ["reverse", "grads", "confirm"]
    if rows == 3:
        whole = ["intra", *summaries, *forward, "reverse", *backward, *scan]
        assert first == second == third == last == whole
    else:
        assert first == ["intra", *summaries[:1], *forward, *backward, *scan]
        assert second == third == ["intra", *summaries, *forward, "reverse", *backward, *scan]
        assert last == ["intra", *forward, "reverse", *backward, *scan[1:]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_chunk_keeps_its_decay(layout: str, ranks: Ranks) -> None:
    p = Problem((0, T), layout, rows=3)
    answers = ranks.run(4, with_decay_totals, p)
    compare(p, [part for part, _ in answers])
    assert all(read == {"fwd_state of one", "bwd_state of one"} for _, read in answers)


@pytest.mark.parametrize(
    ("how", "bad"),
    [
        ("a kernel that fails", 0),
        ("the first kernel fails", 1),
        ("no memory left", 1),
        ("a gradient kernel that fails", 2),
        ("a gradient without room for states", 1),
        ("another scale", 2),
    ],
)
def test_where_one_rank_raises_all_do_and_none_waits(how: str, bad: int, ranks: Ranks) -> None:
    answers, seconds = ranks.try_run(3, failing, Problem((0, T), rows=2), bad, how)
    assert seconds < 20
    for rank, answer in enumerate(answers):
        assert FAILURES[how] in answer
        assert answer.startswith("PeerFailure: chunk_kda") == (rank != bad or not FAILURES[how]), answer
    p = Problem((0, T), rows=2)
    compare(p, ranks.run(3, on_rank, p))  # the group works on


def whole_states(group: Any, p: Problem) -> Tensor:
    context = context_of(p, group)
    x = {n: context.shard(t) if n in BY_TOKEN else t for n, t in p.leaves().items()}
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_rows, "ROWS", p.rows)
        return p.call(x, cp_context=context, return_intermediate_states=True)[2]


def test_intermediate_states(ranks: Ranks) -> None:
    p = Problem((0, 768), states=False, rows=3)
    with torch.inference_mode():
        want = p.call(p.leaves(), cu_seqlens=torch.tensor(p.cu), return_intermediate_states=True)[2]
    found = torch.cat(ranks.run(4, whole_states, p), 1)
    assert found.shape == want.shape
    assert (found - want).abs().max() < TOLERANCE


def changed_in_place(group: Any, p: Problem) -> tuple[Tensor, Tensor]:
    context = context_of(p, group)
    x = {n: context.shard(t) if n in BY_TOKEN else t for n, t in p.leaves().items()}
    x = {n: t.clone().requires_grad_() for n, t in x.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_rows, "ROWS", p.rows)
        o, ht = p.call(x, cp_context=context)
        assert ht is not None
        o += 1
        ht += 1
        (o.square().sum() + ht.sum()).backward()
    return o.detach(), x["v"].grad


def test_results_may_be_changed_in_place(ranks: Ranks) -> None:
    p = Problem((0, 512), rows=2)
    x = {n: t.requires_grad_() for n, t in p.leaves().items()}
    o, ht = p.call(x, cu_seqlens=torch.tensor(p.cu))
    assert ht is not None
    ((o + 1).square().sum() + ht.sum()).backward()
    (o_1, dv_1), (o_2, dv_2) = ranks.run(2, changed_in_place, p)
    assert (torch.cat((o_1, o_2), 1) - o - 1).abs().max() < TOLERANCE
    assert (torch.cat((dv_1, dv_2), 1) - x["v"].grad).abs().max() < TOLERANCE


def test_the_problem_of_these_tests_has_a_memory() -> None:
    """What comes from before a row matters in it, far above the tolerance."""
    p = Problem((0, 768))
    o = alone(p)["o"]
    apart = alone(replace(p, cu=tuple(range(0, 769, 128)), states=False))["o"]
    assert (o - apart).abs().max() > 1e-3


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.skipif(absent, reason="needs a Hopper GPU")
def test_a_kernel_reads_values_that_all_rows_and_heads_share() -> None:
    """As the zeros are behind which M is scanned, here with values that show."""
    x = make_inputs(
        "init_slow", B=3, T=256, H=4, K=128, dtype=torch.bfloat16, initial_state=True, output_final_state=True,
        device="cuda",
    )  # fmt: skip
    x["v"] = x["v"][:1, :, :1].clone().expand_as(x["v"])
    with torch.inference_mode(), config.KDA_BACKEND.set("sm90"):
        shared, apart = chunk_kda(**x), chunk_kda(**{**x, "v": x["v"].contiguous()})
    assert all(torch.equal(found, want) for found, want in zip(shared, apart, strict=True))
    assert shared[1][0].abs().max() > 0.1


def local(pieces: int, tokens: int, pre: int = 0, post: int = 1) -> Split:
    bounds = tuple(i * tokens for i in range(pieces + 1))
    return Split(None, 0, 2, bounds, tuple(Piece(i, i, i, pre, post) for i in range(pieces)), False, 0)


@pytest.mark.parametrize(
    ("heads", "V", "pieces", "tokens", "rows"),
    [
        (32, 128, 1, 131072, 4),
        (32, 128, 2, 65536, 2),
        (32, 128, 1, 32768, 4),
        (32, 128, 1, 16384, 4),
        (32, 128, 1, 8192, 2),
        (32, 128, 1, 4096, 1),
        (32, 64, 1, 131072, 4),
        (32, 256, 1, 131072, 2),
        (8, 128, 1, 131072, 16),
        (8, 128, 1, 32768, 8),
        (16, 128, 1, 131072, 8),
        (48, 128, 1, 131072, 2),
        (96, 128, 1, 131072, 1),
        (32, 128, 1, 131072 + 128, 2),
        (32, 128, 1, 131072 + 64, 3),
        (32, 128, 1, 131072 + 1, 1),
    ],
)
def test_as_many_rows_as_fill_the_gpu(
    heads: int, V: int, pieces: int, tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "of", lambda where: device.named("sm90"))
    call: Any = SimpleNamespace(
        v=torch.empty(1, 1, heads, V, device="meta"), q=torch.empty(1, 1, heads, 128, device="meta")
    )
    assert context_rows.count(call, local(pieces, tokens)) == rows
    assert context_rows.count(call, local(pieces, tokens, post=0)) == 1


def test_a_cpu_is_full_with_one() -> None:
    call: Any = SimpleNamespace(v=torch.empty(1, 1, 1, 64), q=torch.empty(1, 1, 1, 64))
    assert context_rows.count(call, local(1, 1 << 20)) == 1


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("through", [True, False])
def test_composed_summaries_do_what_the_runs_do_one_after_another(through: bool, backwards: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    S_loc = torch.randn(4, 2, 3, 5, generator=draw)
    M = torch.randn(4, 2, 3, 3, generator=draw)
    start = torch.randn(2, 3, 5, generator=draw, dtype=torch.float64)
    inner = slice(None, -1) if backwards else slice(1, None)
    found = compose(S_loc, M if through else M[inner], through, backwards=backwards)
    ends = torch.empty(4, 2, 3, 5, dtype=torch.float64)
    apply(found, start if through else None, ends)
    S = start if through else torch.zeros_like(start)
    for i in reversed(range(4)) if backwards else range(4):
        S = M[i].double() @ S + S_loc[i].double()
        torch.testing.assert_close(ends[i], S)

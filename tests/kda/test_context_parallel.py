"""chunk_kda over 2, 3 and 4 processes equals one process: outputs, states and every gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from over_ranks import (
    BY_TOKEN,
    F64,
    LAYOUTS,
    ON_HOPPER,
    WORLDS,
    Problem,
    alone,
    count_gathers,
    errors,
    on_hopper,
    on_rank,
    on_rank_in_streams,
    together,
)
from torch import Tensor

from kernel_fun._common import context_parallel as partition
from kernel_fun._common import device as devices
from kernel_fun._common import exchange
from kernel_fun._common.check import ContractError, ContractTypeError
from kernel_fun._common.context_parallel import _share
from kernel_fun._common.exchange import HEADER, agreed_size
from kernel_fun.cconv import causal_conv1d
from kernel_fun.kda import build_cp_context, chunk_kda, context_rows, is_supported
from kernel_fun.kda.call import FLAGS
from ranks import Raised, Ranks

TOLERANCE = 1e-10

# 576 tokens are pieces of 288, 192, 144, 96 and 72: all of more than one chunk
PACKINGS = {
    "one sequence": (0, 576),
    "a short one at each end": (0, 10, 500, 576),
    "boundaries inside": (0, 100, 300, 301, 390, 576),
    "boundaries at every rank": (0, 72, 96, 144, 192, 288, 384, 432, 576),
    "empty sequences": (0, 0, 100, 100, 288, 288, 288, 432, 576, 576),
    "all of one token": tuple(range(25)),
    "3 tokens a piece, one sequence": (0, 24),
    "3 tokens a piece": (0, 2, 2, 13, 23, 24),
}


def contexts_of_fla(cu: tuple[int, ...], world: int, layout: str) -> tuple[dict[str, Any], ...]:
    """The fields of fla's context of every rank but for the group, which a rank knows itself."""
    make = pytest.importorskip("fla.ops.cp.context").get_cp_cu_seqlens
    made = [make(torch.tensor(cu), world_size=world, rank=r, layout=layout) for r in range(world)]
    return tuple({n: v for n, v in vars(c).items() if n != "group"} for c in made)


def compare(p: Problem, parts: list[dict[str, Any]], tolerance: float = TOLERANCE) -> None:
    expected, found = alone(p), together(p, parts)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        error = (found[name] - want).abs().max().item()
        assert error <= tolerance * max(1.0, want.abs().max().item()), (name, error)
    pieces = 2 if p.layout == "zigzag" else 1
    columns = p.V + p.K * (len(parts) * pieces > 2)  # of two slots nothing passes through either
    data = pieces * p.HV * p.K * columns * (8 if p.dtype == F64 else 4)
    for part in parts:
        assert part["gathers"] == [HEADER + data] * 2
        assert part["forward"] == 1


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_equals_one_process(packing: str, world: int, layout: str, ranks: Ranks) -> None:
    p = Problem(PACKINGS[packing], layout, seed=world)
    compare(p, ranks.run(world, on_rank, p))


FORMS = {
    "no states": {"states": False},
    "v first": {"flags": {"state_v_first": True}},
    "kept states": {"flags": {"disable_recompute": True}},
    "bounded gate": {"flags": {"lower_bound": -5.0, "safe_gate": True}},
    "given decay": {"flags": {"use_gate_in_kernel": False}},
    "negative eigenvalues": {"flags": {"allow_neg_eigval": True}},
    "scaled, not normalised": {"flags": {"use_qk_l2norm_in_kernel": False, "scale": 0.1}, "K": 3, "V": 5},
    "equal heads": {"H": 2, "HV": 2},
}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_op(form: str, layout: str, ranks: Ranks) -> None:
    p = replace(Problem(PACKINGS["a short one at each end"], layout, seed=3), **FORMS[form])
    compare(p, ranks.run(3, on_rank, p))


@pytest.mark.parametrize("seed", range(12))
def test_random_packings(seed: int, ranks: Ranks) -> None:
    draw = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, 241, (seed % 7,), generator=draw).sort().values.tolist()
    p = Problem((0, *cuts, 240), ("contiguous", "zigzag")[seed % 2], seed=seed, states=seed % 3 > 0)
    world = (2, 3, 4)[seed % 3]
    compare(p, ranks.run(world, on_rank, p))


def as_exact_as_one_process(p: Problem, parts: list[dict[str, Any]]) -> None:
    for found in errors(p, parts):
        assert found.several <= found.limit, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_inputs_are_as_exact_as_one_process(dtype: torch.dtype, ranks: Ranks) -> None:
    p = Problem(PACKINGS["one sequence"], K=32, V=32, dtype=dtype)
    as_exact_as_one_process(p, ranks.run(4, on_rank, p))


absent = not torch.cuda.is_available() or devices.of(torch.device("cuda")).arch != "sm90"


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.skipif(absent, reason="needs a Hopper GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("packing", ON_HOPPER)
def test_ranks_on_one_hopper_gpu(packing: str, world: int, layout: str, ranks: Ranks) -> None:
    p = on_hopper(packing, layout)
    as_exact_as_one_process(p, ranks.run(world, on_rank, p))


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    """Two GPUs with NCCL between them."""
    ranks = Ranks("nccl", (2,))
    yield ranks
    ranks.stop()


@pytest.mark.gpu
@pytest.mark.skipif(absent or torch.cuda.device_count() < 2, reason="needs two Hopper GPUs")
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("packing", [(0, 65536), (0, 9, 20000, 40001, 40001, 65536)], ids=["one", "packed"])
def test_two_gpus_over_nccl(packing: tuple[int, ...], layout: str, gpus: Ranks) -> None:
    p = replace(on_hopper("one", layout), cu=packing, H=4, HV=8)
    parts = gpus.run(2, on_rank, p)
    as_exact_as_one_process(p, parts)
    assert [len(part["gathers"]) for part in parts] == [2, 2]


IN_STREAMS = replace(on_hopper("one", "contiguous"), seed=5), on_hopper("packed", "zigzag")
"""Problems that run beside each other."""


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.skipif(absent, reason="needs a Hopper GPU")
def test_two_streams_on_one_gpu(ranks: Ranks) -> None:
    assert ranks.run(2, on_rank_in_streams, IN_STREAMS) == [[[], []]] * 2


@pytest.mark.gpu
@pytest.mark.skipif(absent or torch.cuda.device_count() < 2, reason="needs two Hopper GPUs")
def test_two_streams_over_nccl(gpus: Ranks) -> None:
    assert gpus.run(2, on_rank_in_streams, IN_STREAMS) == [[[], []]] * 2


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("packing", ["one sequence", "boundaries inside", "all of one token"])
def test_a_context_of_fla(packing: str, layout: str, ranks: Ranks) -> None:
    cu = PACKINGS[packing]
    p = Problem(cu, layout, theirs=contexts_of_fla(cu, 3, layout), states=False)
    compare(p, ranks.run(3, on_rank, p))


@pytest.mark.parametrize("packing", [n for n, cu in PACKINGS.items() if all(a < b for a, b in pairwise(cu))])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_our_context_says_what_theirs_says(packing: str, layout: str, ranks: Ranks) -> None:
    """Where no sequence is empty: fla drops those."""
    cu = PACKINGS[packing]
    for world in (2, 3, 4):
        theirs = contexts_of_fla(cu, world, layout)
        for mine, other in zip(ranks.run(world, fields_of_context, cu, layout), theirs, strict=True):
            assert {n: plain(mine[n]) for n in other} == {n: plain(v) for n, v in other.items()}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def fields_of_context(group: Any, cu: tuple[int, ...], layout: str) -> dict[str, Any]:
    context = build_cp_context(torch.tensor(cu), group, layout=layout)
    return {n: v for n, v in vars(context).items() if n != "group"}


def chunk_states(group: Any, p: Problem) -> Tensor:
    context = build_cp_context(torch.tensor(p.cu), group, layout=p.layout)
    x = {n: context.shard(t) if n in BY_TOKEN else t for n, t in p.leaves().items()}
    with torch.inference_mode():
        return p.call(x, cp_context=context, return_intermediate_states=True)[2]


def test_intermediate_states_of_parts_of_whole_chunks(ranks: Ranks) -> None:
    p = Problem((0, 512), states=False)
    with torch.inference_mode():
        want = p.call(p.leaves(), cu_seqlens=torch.tensor(p.cu), return_intermediate_states=True)[2]
    found = torch.cat(ranks.run(4, chunk_states, p), 1)
    assert found.shape == want.shape == (1, 8, p.HV, p.K, p.V)
    assert (found - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("seed", range(8))
def test_128_slots_know_their_neighbours(seed: int) -> None:
    """Against asking every slot which sequences have tokens in it."""
    draw = torch.Generator().manual_seed(seed)
    size, slots = (1, 5, 64)[seed % 3], 128
    T = size * slots
    cuts = torch.randint(0, T + 1, (seed * 20,), generator=draw).sort().values.tolist()
    bounds = [0, *cuts, T]
    owner = [n for n, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b)]
    inside = [set(owner[s * size : (s + 1) * size]) for s in range(slots)]
    shares = [_share(bounds, slot, slots) for slot in range(slots)]
    for slot, share in enumerate(shares):
        lengths = {n: b - a for n, (a, b) in zip(share.sequences, pairwise(share.cu))}
        counts = {n: owner[slot * size : (slot + 1) * size].count(n) for n in inside[slot]}
        assert {n: length for n, length in lengths.items() if length} == counts
        assert share.pre == sum(share.sequences[0] in inside[s] for s in range(slot))
        assert share.post == sum(share.sequences[-1] in inside[s] for s in range(slot + 1, slots))
    empty = [n for n, (a, b) in enumerate(pairwise(bounds)) if a == b]
    kept = [n for share in shares for n, (a, b) in zip(share.sequences, pairwise(share.cu)) if a == b]
    assert sorted(kept) == empty


def test_parameter_gradients_summed_over_the_group(ranks: Ranks) -> None:
    p = Problem(PACKINGS["boundaries inside"], reduce=True)
    compare(p, ranks.run(4, on_rank, p))


def with_decay_totals(group: Any, p: Problem) -> tuple[dict[str, Any], set[str]]:
    """As :func:`on_rank`, on stages that give and read the decay of each chunk as the Hopper kernels do."""
    from kernel_fun.kda._kernels.eager import bwd_state, fwd_intra, fwd_state, operands
    from kernel_fun.kda._kernels.eager.layout import layout

    read: set[str] = set()

    def totals(call: Any) -> Tensor:
        """``[chunks, HV, K]``; of a packed call with a row for every chunk that its tokens could have."""
        lay = layout(call)
        a = operands.decays(lay, call, slice(0, lay.NT), F64).prod(1).unflatten(0, (lay.NT, p.HV))
        rows = call.q.shape[0] * -(-call.q.shape[1] // 64) + (
            0 if call.cu_seqlens is None else call.cu_seqlens.numel() - 1
        )
        return torch.cat((a, a.new_full((rows - lay.NT, *a.shape[1:]), float("nan"))))

    def giving(stage: Any) -> Any:
        return lambda call: stage(call)._replace(total=totals(call))

    def reading(stage: Any) -> Any:
        def read_first(call: Any, intra: Any, *given: Any, **more: Any) -> Any:
            want = totals(call)
            assert intra.total.shape == want.shape
            n = layout(call).NT
            assert torch.equal(intra.total[:n], want[:n])
            for x in (call.q, call.k, call.v, call.g, intra.A, intra.Aqk):
                assert x.stride(-1) == 1
            read.add(f"{stage.__name__} of {'one' if call.cu_seqlens is None else 'many'}")
            return stage(call, intra, *given, **more)

        return read_first

    patch = pytest.MonkeyPatch()
    patch.setattr(fwd_intra, "fwd_intra", giving(fwd_intra.fwd_intra))
    patch.setattr(fwd_state, "fwd_state", reading(fwd_state.fwd_state))
    patch.setattr(bwd_state, "bwd_state", reading(bwd_state.bwd_state))
    try:
        return on_rank(group, p), read
    finally:
        patch.undo()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("packing", ["one sequence", "boundaries inside", "empty sequences"])
def test_every_chunk_keeps_its_decay(packing: str, layout: str, ranks: Ranks) -> None:
    p = Problem(PACKINGS[packing], layout)
    answers = ranks.run(3, with_decay_totals, p)
    compare(p, [part for part, _ in answers])
    # a rank whose pieces hold one sequence each makes dense calls only
    sizes = ("one",) if packing == "one sequence" else ("one", "many")
    expected = {f"{stage} of {n}" for stage in ("fwd_state", "bwd_state") for n in sizes}
    assert set().union(*(read for _, read in answers)) == expected


def order_of_work(group: Any, p: Problem) -> tuple[list[str], list[int]]:
    """What a forward and a backward do, in order, and over how many slots each fold goes."""
    from kernel_fun._common.exchange import Exchange
    from kernel_fun.kda import context_parallel
    from kernel_fun.kda._kernels.eager import bwd_grads, bwd_state, fwd_intra, fwd_state

    done: list[str] = []
    folds: list[int] = []
    patch = pytest.MonkeyPatch()

    def telling(name: str, function: Any) -> Any:
        def told(*args: Any, **more: Any) -> Any:
            done.append(name)
            return function(*args, **more)

        return told

    def folding(
        gathered: Any, split: Any, slots: range, *rest: Any, fold: Any = context_parallel.fold
    ) -> Any:
        folds.append(len(slots))
        return fold(gathered, split, slots, *rest)

    patch.setattr(fwd_intra, "fwd_intra", telling("intra", fwd_intra.fwd_intra))
    patch.setattr(fwd_state, "fwd_state", telling("state", fwd_state.fwd_state))
    patch.setattr(bwd_state, "bwd_state", telling("reverse", bwd_state.bwd_state))
    patch.setattr(bwd_grads, "bwd_grads", telling("grads", bwd_grads.bwd_grads))
    patch.setattr(Exchange, "send_rows", telling("send", Exchange.send_rows))
    patch.setattr(Exchange, "arrive", telling("arrive", Exchange.arrive))
    patch.setattr(Exchange, "confirm", telling("confirm", Exchange.confirm))
    patch.setattr(context_parallel, "fold", folding)
    patch.setattr(context_rows, "fold", folding)
    try:
        on_rank(group, p)
    finally:
        patch.undo()
    return done, folds


def test_the_gather_is_in_flight_during_other_work_and_folds_touch_only_their_sequence(ranks: Ranks) -> None:
    (first, folds_1), (second, folds_2), (third, folds_3), (last, folds_4) = ranks.run(
        4, order_of_work, Problem((0, 10, 150, 430, 576))
    )
    # Forward: the last sequence of a rank goes on: its part of fwd_intra and its summary, then the rest while
    # waiting. Backward: a summary of the first sequence if it began elsewhere, and the rescan while waiting; who
    # waits for nobody scans in reverse once, and first. What was told is read when all work is queued.
    forward = ["send", "intra", "arrive", "state", "confirm"]
    begins = ["intra", "state", *forward]
    backward = ["send", "state", "arrive", "reverse", "grads", "confirm"]
    assert first == begins + backward
    assert second == third == [*begins, "reverse", *backward]
    # one sequence: everything that is sent, or would be, is there before a rank waits for others
    assert last == [
        "intra",
        *forward[:1],
        *forward[2:],
        "reverse",
        "send",
        "arrive",
        "state",
        "grads",
        "confirm",
    ]
    # forward over the slots before, backward over those after
    assert (folds_1, folds_2, folds_3, folds_4) == ([1], [1, 1], [1, 1], [1])
    for _, folds in ranks.run(4, order_of_work, Problem(PACKINGS["boundaries at every rank"])):
        assert folds == []


# ------------------------------------------------------------------------------------------- failures


def failing(group: Any, p: Problem, bad: int, how: str) -> str:
    """Rank ``bad`` makes a mistake; every rank must raise."""
    rank = dist.get_rank(group)
    context = build_cp_context(torch.tensor(p.cu), group, layout=p.layout)
    x = {n: context.shard(t) if n in BY_TOKEN else t for n, t in p.leaves().items()}
    x["initial_state"] = x["initial_state"][list(context.sequences)]
    x = {n: t.clone().requires_grad_() for n, t in x.items()}
    more: dict[str, Any] = {}
    patch = pytest.MonkeyPatch()
    patch.setattr(context_rows, "ROWS", p.rows)
    if rank == bad:
        if how == "a tensor of another length":
            x["k"] = x["k"][:, :-1]
        elif how == "fewer tokens than the context":
            x.update({n: x[n][:, :-1] for n in BY_TOKEN})
        elif how == "the whole batch on one rank":
            x.update({n: t for n, t in p.leaves().items() if n in BY_TOKEN})
        elif how == "states of all sequences":
            x["initial_state"] = x["initial_state"].expand(3, -1, -1, -1)
        elif how == "another scale":
            more["scale"] = 2.0
        elif how == "a keyword nobody knows":
            more["shiny"] = True
        elif how == "a backend that is not there":
            p = replace(p, backend="sm90")
        elif how == "no gradient":
            x = {n: t.detach() for n, t in x.items()}
        elif how == "another packing":
            context = build_cp_context(torch.tensor([0, 50, p.cu[-1]]), group, layout=p.layout)
            x["initial_state"] = x["initial_state"][:1].expand(context.num_seqs, -1, -1, -1)
        elif how == "a kernel that fails":
            patch.setattr("kernel_fun.kda._kernels.eager.fwd_state.fwd_state", broken)
        elif how == "the first kernel fails":
            patch.setattr("kernel_fun.kda._kernels.eager.fwd_intra.fwd_intra", broken)
        elif how == "a gradient kernel that fails":
            patch.setattr("kernel_fun.kda._kernels.eager.bwd_state.bwd_state", broken)
        elif how == "an interrupt":
            patch.setattr("kernel_fun.kda._kernels.eager.fwd_state.fwd_state", interrupted)
        elif how == "no memory left":
            patch.setattr("kernel_fun.kda._kernels.eager.fwd_state.fwd_state", partial(starved, patch))
        elif how == "no q":
            more["q"] = x.pop("q").new_empty(0)
        elif how == "a decay of too few heads":
            x["g"] = x["g"][:, :, :1]
        elif how == "states of another layout":
            x["initial_state"] = x["initial_state"].mT
        elif how == "a flag of another type":
            more["output_final_state"] = "yes"
        elif how == "a flag that is a tensor":
            more["state_v_first"] = torch.ones(2)
        elif how == "two rows":
            x.update({n: torch.cat((x[n], x[n])) for n in BY_TOKEN})
    try:
        o, _ = p.call(x, cp_context=context, **more)
        if "gradient" in how or "overwritten" in how:
            if rank == bad and how == "an overwritten input":
                with torch.no_grad():
                    x["v"].mul_(2)
            if rank == bad and how == "a gradient without room for states":
                patch.setattr("kernel_fun.kda.context_rows.compose", broken)
                patch.setattr("kernel_fun.kda.context_rows.unread", broken)  # of a single row
            o.sum().backward()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        patch.undo()
    return "returned"


def broken(*_: Any, **__: Any) -> Any:
    raise MemoryError("out of memory in a kernel")


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def starved(patch: Any, *_: Any, **__: Any) -> Any:
    """Nothing that allocates tensors works from here on."""
    for name in ("empty", "zeros", "cat", "stack"):
        patch.setattr(torch, name, broken)
    raise MemoryError("out of memory in a kernel")


FAILURES = {
    "a tensor of another length": "`k` must have shape",
    "fewer tokens than the context": "`q` must hold this rank's T =",
    "the whole batch on one rank": "`q` must hold this rank's T =",
    "states of all sequences": "`initial_state` must have a row for each of the 1 local sequences",
    "another scale": "",
    "a keyword nobody knows": "unexpected keyword argument 'shiny'",
    "a backend that is not there": "KERNEL_FUN_KDA_BACKEND=sm90 cannot serve",
    "a kernel that fails": "out of memory in a kernel",
    "the first kernel fails": "out of memory in a kernel",
    "a gradient kernel that fails": "out of memory in a kernel",
    "a gradient without room for states": "out of memory in a kernel",
    "no memory left": "out of memory in a kernel",
    "an interrupt": "KeyboardInterrupt",
    "no q": "`q` must have shape",
    "a decay of too few heads": "`g` must have shape",
    "states of another layout": "`initial_state` must have shape",
    "a flag of another type": "`output_final_state` must be True or False, got 'yes'",
    "a flag that is a tensor": "`state_v_first` must be True or False, got tensor",
    "two rows": "`q` must have batch size 1 with `cp_context`, got 2",
    "an overwritten input": "needed for gradient computation has been modified",
    "no gradient": "",
    "another packing": "",
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("how", FAILURES)
def test_where_one_rank_raises_all_do_and_none_waits(how: str, world: int, ranks: Ranks) -> None:
    p = Problem(PACKINGS["one sequence"], seed=1)
    # the first rank summarises in the forward, the last one in the backward
    bad = 0 if how in ("a kernel that fails", "no memory left", "an interrupt") else world - 1
    answers, seconds = ranks.try_run(world, failing, p, bad, how)
    assert seconds < 20, answers
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, Raised), answer
        if not FAILURES[how]:  # the ranks disagree: every one of them is told
            what = {
                "another packing": "contexts; boundaries, layout and reduce_gradients",
                "another scale": "scale; these must agree: shapes, H, dtypes of the inputs, gate",
                "no gradient": "need of a gradient; these must agree: shapes",
            }[how]
            start = (
                f"PeerFailure: chunk_kda forward: ranks 0 and {bad} of the context-parallel group called with"
            )
            assert answer.startswith(f"{start} different {what}"), (rank, answer)
        elif rank == bad:
            assert FAILURES[how] in answer
            assert not answer.startswith("PeerFailure")
        else:
            assert answer.startswith("PeerFailure: chunk_kda"), (rank, answer)
            assert f"rank {bad} of the context-parallel group raised" in answer
            assert FAILURES[how] in answer
    good = Problem(PACKINGS["boundaries inside"])
    compare(good, ranks.run(world, on_rank, good))  # the group works on


def unused_output(group: Any, p: Problem) -> dict[str, Any]:
    """A rank whose loss reads the final state alone takes part in the backward all the same."""
    context = build_cp_context(torch.tensor(p.cu), group)
    x = {n: context.shard(t) if n in BY_TOKEN else t for n, t in p.leaves().items()}
    x["initial_state"] = x["initial_state"][list(context.sequences)]
    x = {n: t.clone().requires_grad_() for n, t in x.items()}
    o, ht = p.call(x, cp_context=context)
    assert ht is not None
    (ht.sum() if dist.get_rank(group) == 1 else o.sum()).backward()
    return {n: t.grad for n, t in x.items()}


def test_a_loss_of_one_output(ranks: Ranks) -> None:
    p = Problem(PACKINGS["one sequence"])
    parts = ranks.run(2, unused_output, p)
    x = {n: t.requires_grad_() for n, t in p.leaves().items()}
    o, ht = p.call(x, cu_seqlens=torch.tensor(p.cu))
    assert ht is not None
    (o[:, :288].sum() + ht.sum()).backward()
    for name in BY_TOKEN:
        found = torch.cat([part[name] for part in parts], 1)
        assert (found - x[name].grad).abs().max() < TOLERANCE, name


def loss_of_a_mask(group: Any, p: Problem) -> dict[str, Any]:
    """No token of the last rank is in the loss."""
    context = build_cp_context(torch.tensor(p.cu), group)
    x = {n: context.shard(t) if n in BY_TOKEN else t for n, t in p.leaves().items()}
    x = {n: t.clone().requires_grad_() for n, t in x.items()}
    weight = torch.ones(p.V, 3, dtype=F64, requires_grad=True)
    v, _ = causal_conv1d(x["v"][:, :, 0], weight, cp_context=context)
    o, _ = p.call({**x, "v": v[:, :, None].expand_as(x["v"])}, cp_context=context)
    start, stop = context.token_ranges[0]
    mask = torch.arange(start, stop) < 288
    (o[:, mask] ** 2).sum().backward()
    return {n: t.grad for n, t in x.items()}


def test_a_rank_without_a_token_of_the_loss(ranks: Ranks) -> None:
    first, last = ranks.run(2, loss_of_a_mask, Problem(PACKINGS["one sequence"], states=False))
    assert first["v"].abs().max() > 0
    assert not last["v"].any()


# ------------------------------------------------------------------------------------ in one process


CU = torch.tensor([0, 3, 8])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 3, 7]), "layout": "zigzag"}, ContractError, r"divisible by 2 \* world_size = 2, got 7"),
        ({"cu_seqlens": torch.tensor([0, 0])}, ContractError, r"positive and divisible by world_size = 1, got 0"),
        ({"cu_seqlens": torch.tensor([0])}, ContractError, r"`cu_seqlens` must have shape \[N\+1\] with N >= 1"),
        ({"cu_seqlens": torch.tensor([1, 8])}, ContractError, r"`cu_seqlens` must start at 0, got 1"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, ContractError, r"must not decrease, got 5 then 3"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, ContractTypeError, r"`cu_seqlens` must be int64 or int32"),
        ({"cu_seqlens": [0, 8]}, ContractTypeError, r"`cu_seqlens` must be a torch.Tensor, got list"),
        ({"cu_seqlens_cpu": torch.tensor([0, 8])}, ContractError, r"`cu_seqlens_cpu` must have the shape"),
        ({"layout": "striped"}, ContractError, r"`layout` must be 'contiguous' or 'zigzag', got 'striped'"),
        ({"use_tf32x3_affine_chain": False}, ContractError, r"`use_tf32x3_affine_chain` must be True"),
        ({"reduce_gradients": "no"}, ContractTypeError, r"`reduce_gradients` must be True or False, got 'no'"),
        ({"conv1d_kernel_size": -1}, ContractError, r"`conv1d_kernel_size` must be at least 1, got -1"),
        ({"conv1d_kernel_size": "4"}, ContractTypeError, r"`conv1d_kernel_size` must be an int or None, got str"),
        ({"cu_seqlens": torch.tensor([0, 8], device="meta")}, ContractError, r"`cu_seqlens` must hold data"),
        ({"group": None}, ContractTypeError, r"`group` must be a torch.distributed process group"),
        ({"shiny": 1}, TypeError, r"shiny"),
    ],
    ids=str,
)  # fmt: skip
def test_contexts_that_cannot_be(change: Any, error: Any, message: str, group_of_one: Any) -> None:
    with pytest.raises(error, match=message):
        build_cp_context(**{"cu_seqlens": CU, "group": group_of_one, **change})


def inputs(T: int = 8, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    q, k, v, g = (torch.randn(1, T, 2, 4, dtype=dtype) for _ in range(4))
    return {"q": q, "k": k, "v": v, "g": -g.abs(), "beta": torch.rand(1, T, 2, dtype=dtype)}


@pytest.mark.parametrize(
    ("context", "error", "message"),
    [
        (object(), ContractTypeError, r"`cp_context` must be a context of .*got object without `group`"),
        (SimpleNamespace(group=None, cu_seqlens=None), ContractError, r"cu_seqlens is required for CP"),
        (SimpleNamespace(group=3, cu_seqlens=CU), ContractTypeError, r"`cp_context.group` must be a torch.distributed"),
    ],
    ids=["no context", "no boundaries", "no group"],
)  # fmt: skip
def test_a_mistaken_context_is_named_before_any_exchange(
    context: Any, error: Any, message: str, group_of_one: Any
) -> None:
    gathers, watched = count_gathers()
    with watched, pytest.raises(error, match=message):
        chunk_kda(**inputs(), cp_context=context)
    assert gathers == []


def test_a_context_of_another_rank_is_refused(group_of_one: Any) -> None:
    context = build_cp_context(CU, group_of_one)
    with pytest.raises(
        ValueError, match=r"must describe rank 0 of 1 in its group, got one that reaches 0 slots before and 1"
    ):
        chunk_kda(**inputs(), cp_context=replace(context, post_num_ranks=1))


def test_a_context_is_read_once(group_of_one: Any) -> None:
    context = build_cp_context(torch.tensor([0, 5, 8]), group_of_one)
    first = partition.read(context)
    assert first is not None
    assert partition.read(context) is first
    assert partition.read(replace(context)) == first


@pytest.mark.parametrize("read_before", [False, True])
def test_a_context_changed_in_place_is_refused(read_before: bool, group_of_one: Any) -> None:
    """Where its pieces begin and end elsewhere was worked out from what its boundaries were."""
    context = build_cp_context(torch.tensor([0, 5, 8]), group_of_one)
    if read_before:
        chunk_kda(**inputs(), cp_context=context)
    context.cu_seqlens_cpu[1] = 3
    with pytest.raises(
        ContractError, match=r"must have the boundaries it was built with, \[0, 5, 8\], got \[0, 3"
    ):
        chunk_kda(**inputs(), cp_context=context)


@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize("how", ["replaced", "copied and changed"])
def test_other_boundaries_in_a_context_are_refused(how: str, remembered: bool, group_of_one: Any) -> None:
    context = build_cp_context(torch.tensor([0, 5, 8]), group_of_one)
    if remembered:
        chunk_kda(**inputs(), cp_context=context)
    if how == "replaced":
        context = replace(context, cu_seqlens=torch.tensor([0, 3, 8], dtype=torch.int32))
    else:
        context = context.copy_for_backward()
        context.cu_seqlens[1] = 3
    with pytest.raises(ContractError, match=r"built with, \[0, 5, 8\], got \[0, 3"):
        chunk_kda(**inputs(), cp_context=context)


def test_boundaries_on_another_device_are_watched_from_the_first_call_on(group_of_one: Any) -> None:
    """Their values are not asked for, which would wait for the device."""
    context = build_cp_context(torch.tensor([0, 5, 8]), group_of_one)
    elsewhere = replace(
        context, cu_seqlens=context.cu_seqlens.to("meta"), cu_seqlens_cpu=context.cu_seqlens_cpu
    )
    partition._splits[elsewhere] = partition.read(context), elsewhere.cu_seqlens._version
    assert partition.read(elsewhere) is partition.read(context)
    elsewhere.cu_seqlens.zero_()
    with pytest.raises(ContractError, match=r"built with, \[0, 5, 8\], got others since"):
        partition.read(elsewhere)


def test_boundaries_changed_before_backward_are_noticed(group_of_one: Any) -> None:
    context = build_cp_context(torch.tensor([0, 5, 8]), group_of_one)
    x = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in inputs().items()}
    o, _ = chunk_kda(**x, cp_context=context)
    context.cu_seqlens[1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_a_context_made_in_inference_mode_serves_training(group_of_one: Any) -> None:
    with torch.inference_mode():
        context = build_cp_context(torch.tensor([0, 5, 8]), group_of_one)
    x = {n: t.requires_grad_() for n, t in inputs().items()}
    chunk_kda(**x, cp_context=context)[0].sum().backward()
    convolved = torch.randn(1, 8, 3, requires_grad=True)
    causal_conv1d(convolved, torch.randn(3, 4), cp_context=context)[0].sum().backward()
    assert x["q"].grad is not None
    assert convolved.grad is not None


def test_a_context_of_a_group_that_is_gone(group_of_one: Any) -> None:
    group = dist.new_group([0])
    context = build_cp_context(CU, group)
    chunk_kda(**inputs(), cp_context=context)
    dist.destroy_process_group(group)
    with pytest.raises(ContractError, match=r"`cp_context.group` must be a process group that exists"):
        chunk_kda(**inputs(), cp_context=context)


def test_the_class_of_fla_itself(group_of_one: Any) -> None:
    context = pytest.importorskip("fla.ops.cp").build_cp_context(CU, group_of_one)
    x = inputs()
    found, _ = chunk_kda(**x, cp_context=context)
    expected, _ = chunk_kda(**x, cu_seqlens=CU)
    assert torch.equal(found, expected)


def test_a_tensor_of_another_length_is_not_cut(group_of_one: Any) -> None:
    context = build_cp_context(CU, group_of_one)
    with pytest.raises(
        ValueError, match=r"must hold the 8 tokens of the packed batch along dim 1, got shape"
    ):
        context.shard(torch.zeros(1, 9, 2))


def test_what_cannot_be_cut_is_named(group_of_one: Any) -> None:
    context = build_cp_context(CU, group_of_one)
    with pytest.raises(ContractError, match=r"`x` must have a dimension 1 .* got shape \[8\]: give the one"):
        context.shard(torch.arange(8))
    assert torch.equal(context.shard(torch.arange(8), 0), torch.arange(8))
    assert torch.equal(context.shard(torch.arange(8), -1), torch.arange(8))
    with pytest.raises(ContractTypeError, match=r"`x` must be a torch.Tensor, got list"):
        context.shard([1])  # pyright: ignore[reportArgumentType]


def test_a_context_does_not_change(group_of_one: Any) -> None:
    context: Any = build_cp_context(CU, group_of_one)
    with pytest.raises(FrozenInstanceError):
        context.layout = "zigzag"


@pytest.mark.parametrize("how", ["made before", "made after"])
def test_a_group_that_was_destroyed_is_named(how: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    context = build_cp_context(CU, group)
    dist.destroy_process_group()
    call: Any = {
        "made before": lambda: chunk_kda(**inputs(), cp_context=context),
        "made after": lambda: build_cp_context(CU, group),
    }[how]
    with pytest.raises(ContractError, match=r"group` must be a process group that exists, got one that was"):
        call()


@pytest.mark.parametrize("flag", FLAGS)
def test_a_switch_is_no_word(flag: str) -> None:
    with pytest.raises(ContractTypeError, match=f"`{flag}` must be True or False, got 'no'"):
        chunk_kda(**inputs(), **{flag: "no"})


@pytest.mark.parametrize(
    ("tellers", "size"),
    [
        (([3, 3, 4], [5]), 3),
        (([4, 3, 3, 4, 4],), 4),
        (([3, 4], [5]), None),
        (([], [5]), 5),
        (([], []), None),
    ],
)
def test_most_arguments_tell_a_size(tellers: Any, size: int | None) -> None:
    assert agreed_size(*tellers) == size


@pytest.mark.parametrize(
    ("backend", "given", "carrier"),
    [("gloo", "cuda:1", "cpu"), ("nccl", "cuda:1", "cuda:1"), ("nccl", "meta", "cuda:3"), ("nccl", "cpu", "cuda:3")],
)  # fmt: skip
def test_an_error_lies_where_its_backend_reads(
    backend: str, given: str, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of an argument on another device."""
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    split: Any = SimpleNamespace(ranks=2, group=None)
    assert exchange._carrier(split, torch.device(given)) == torch.device(carrier)


def test_without_a_group_the_context_packs(group_of_one: Any) -> None:
    x = inputs()
    context = replace(build_cp_context(CU, group_of_one), group=None)
    found, _ = chunk_kda(**x, cp_context=context)
    expected, _ = chunk_kda(**x, cu_seqlens=CU)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_one_rank_alone_is_the_plain_call(layout: str, group_of_one: Any) -> None:
    x = inputs(130, F64)
    cu = torch.tensor([0, 10, 130])
    expected, ht = chunk_kda(**x, cu_seqlens=cu, output_final_state=True)
    context = build_cp_context(cu, group_of_one, layout=layout)
    found, parts = chunk_kda(**x, cp_context=context, output_final_state=True)
    assert (found - expected).abs().max() < 1e-12
    assert ht is not None
    whole = torch.zeros_like(ht).index_add_(0, torch.tensor(context.sequences), parts)
    assert (whole - ht).abs().max() < 1e-12


def test_intermediate_states(group_of_one: Any) -> None:
    x = inputs(66)
    cu = torch.tensor([0, 10, 66])
    context = build_cp_context(cu, group_of_one)
    with torch.inference_mode():
        expected = chunk_kda(**x, cu_seqlens=cu, return_intermediate_states=True, chunk_size=32)
        found = chunk_kda(**x, cp_context=context, return_intermediate_states=True, chunk_size=32)
    for a, b in zip(expected, found):
        assert (a is None and b is None) or torch.equal(a, b)


def test_no_double_backward(group_of_one: Any) -> None:
    x = {n: t.requires_grad_() for n, t in inputs().items()}
    o, _ = chunk_kda(**x, cp_context=build_cp_context(CU, group_of_one))
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        dq.sum().backward()


def test_is_supported_tells_the_truth_without_a_word_to_other_ranks(group_of_one: Any) -> None:
    x = inputs()
    gathers, watched = count_gathers()
    with watched:
        answer = is_supported(x["q"], x["v"], cp_context=build_cp_context(CU, group_of_one))
    assert answer == (False, "tensor on cpu")
    assert gathers == []


def test_under_the_compiler_it_is_a_graph_break(group_of_one: Any) -> None:
    context = build_cp_context(CU, group_of_one)

    def twice(**x: Tensor) -> Tensor:
        return chunk_kda(**x, cp_context=context)[0] * 2

    x = inputs()
    assert torch.equal(torch.compile(twice, backend="eager")(**x), twice(**x))


def test_capture_is_refused(group_of_one: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"`use_graph` with `cp_context`"):
        chunk_kda(**inputs(), cp_context=build_cp_context(CU, group_of_one), use_graph=True)


def test_the_shards_are_a_partition(ranks: Ranks) -> None:
    tokens = torch.arange(48)
    for layout in ("contiguous", "zigzag"):
        parts = ranks.run(4, shards, layout)
        assert torch.equal(torch.cat(parts).sort().values, tokens)
    assert torch.equal(parts[0], torch.cat((tokens[:6], tokens[42:])))


def shards(group: Any, layout: str) -> Tensor:
    return build_cp_context(torch.tensor([0, 48]), group, layout=layout).shard(torch.arange(48), 0)


def test_every_layout_of_every_size_divides_the_packings() -> None:
    assert all(cu[-1] % 24 == 0 for cu in PACKINGS.values())
    assert any(a == b for a, b in pairwise(PACKINGS["empty sequences"]))


def test_boundaries_on_the_host_must_be_the_same(group_of_one: Any) -> None:
    """Also the convolution's contexts are made by this function."""
    cu = torch.tensor([0, 30, 70])
    build_cp_context(cu, group_of_one, cu_seqlens_cpu=cu.clone().int())
    with pytest.raises(ContractError, match="`cu_seqlens_cpu` must hold the values"):
        build_cp_context(cu, group_of_one, cu_seqlens_cpu=torch.tensor([0, 40, 70]))

"""What context parallel gives to the stages on Hopper passes the launchers' checks, in every kind of slot.

The kernels do not run here, nor are there other ranks: launches are recorded, and what other ranks would send
is 0. That the values are right is shown with the eager stages, and on a GPU, in test_context_parallel.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from test_stages import inputs, launched  # noqa: F401

from kernel_fun._common import context_parallel
from kernel_fun._common.exchange import Exchange
from kernel_fun.kda import chunk_kda, context_rows


@pytest.fixture(autouse=True)
def second_of_three(monkeypatch):
    """This process counts as rank 1 of 3; the others send 0."""
    monkeypatch.setattr(context_parallel, "_membership", lambda name, group: (1, 3))
    monkeypatch.setattr(Exchange, "reserve", lambda self: None)
    monkeypatch.setattr(Exchange, "send_rows", lambda self, given: None)
    monkeypatch.setattr(Exchange, "arrive", lambda self: torch.zeros(3, *self._terms.shape))
    monkeypatch.setattr(Exchange, "confirm", lambda self: None)


class Group:
    """What stands for a process group."""


def context(cu, pre, post, layout="contiguous", front=None):
    found = SimpleNamespace(group=Group(), cu_seqlens=torch.tensor(cu), layout=layout)
    if layout == "contiguous":
        return SimpleNamespace(**vars(found), pre_num_ranks=pre, post_num_ranks=post)
    return SimpleNamespace(
        **vars(found), pre_num_ranks_by_part=pre, post_num_ranks_by_part=post, front_num_seqs=front
    )


CONTEXTS = {
    "passed through": context([0, 130], 1, 1),
    "in two rows": context([0, 256], 1, 1),
    "begins in two rows": context([0, 256], 0, 1),
    "zigzag, four rows": context([0, 256, 512], (1, 4), (4, 1), "zigzag", 1),
    "begins": context([0, 130], 0, 1),
    "ends": context([0, 130], 1, 0),
    "two open": context([0, 61, 130], 1, 1),
    "one in between": context([0, 61, 61, 90, 130], 1, 1),
    "all here": context([0, 61, 130], 0, 0),
    "zigzag, passed through": context([0, 65, 130], (1, 4), (4, 1), "zigzag", 1),
    "zigzag, packed": context([0, 9, 65, 70, 130], (1, 4), (4, 1), "zigzag", 2),
}


@pytest.mark.parametrize("which", CONTEXTS)
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"state": True, "v_first": True},
        {"gate": "bounded", "K": 128, "V": 192, "HV": 4, "io": torch.float16},
        {"gate": "log", "g": torch.bfloat16, "beta": torch.float32},
    ],
    ids=str,
)
def test_every_slot_reaches_the_kernels(which, form, launched, monkeypatch):  # noqa: F811
    ctx = CONTEXTS[which]
    monkeypatch.setattr(context_rows, "ROWS", 2)
    x = inputs(cu=ctx.cu_seqlens.tolist(), T=int(ctx.cu_seqlens[-1]), **form)
    del x["cu_seqlens"]
    o, ht = chunk_kda(**x, use_qk_l2norm_in_kernel=True, cp_context=ctx)
    forward = [name for name, _ in launched]
    (o.sum() if ht is None else o.sum() + ht.sum()).backward()
    backward = [name for name, _ in launched[len(forward) :]]
    split = context_parallel.read(ctx)
    summaries = sum(piece.post > 0 for piece in split.pieces)
    waits = bool(split.ended_elsewhere())
    reverse_summaries = waits * sum(piece.pre > 0 for piece in split.pieces)
    if split.one_each:  # all of them at once, and M by itself
        summaries = 0 if not waits else 1 if which == "begins" else 2
        reverse_summaries = int(waits and which != "begins")
    assert forward.count("fwd_state") == 1 + summaries
    assert backward.count("bwd_state") == 1 + reverse_summaries
    assert x["q"].grad is not None
    assert x["q"].grad.shape == x["q"].shape


def test_a_repeated_call_is_known_by_its_place(launched, monkeypatch):  # noqa: F811
    """Same tensors, another place of the rank: bound anew, once."""
    from kernel_fun.kda import ops

    planned = []
    real = ops._planned
    monkeypatch.setattr(ops, "_planned", lambda *a: planned.append(a) or real(*a))
    ops.known.KNOWN.forget()
    launches = []
    for which in ("begins", "ends", "begins", "ends"):
        ctx = CONTEXTS[which]
        x = inputs(cu=ctx.cu_seqlens.tolist())
        del x["cu_seqlens"]
        del launched[:]
        chunk_kda(**x, use_qk_l2norm_in_kernel=True, cp_context=ctx)[0].sum().backward()
        launches.append([name for name, _ in launched])
    assert len(planned) == 2
    assert launches[:2] == launches[2:]
    assert launches[0] != launches[1]


def test_boundaries_of_another_dtype_are_another_call(launched, monkeypatch):  # noqa: F811
    from kernel_fun.kda import ops

    planned = []
    real = ops._planned
    monkeypatch.setattr(ops, "_planned", lambda *a: planned.append(a) or real(*a))
    ops.known.KNOWN.forget()
    for dtype in (torch.int64, torch.int32, torch.int64):
        ctx = context([0, 61, 130], 1, 1)
        ctx.cu_seqlens = ctx.cu_seqlens.to(dtype)
        x = inputs(cu=[0, 61, 130])
        del x["cu_seqlens"]
        chunk_kda(**x, use_qk_l2norm_in_kernel=True, cp_context=ctx)
    assert len(planned) == 2


@pytest.mark.parametrize(("which", "place"), [("in two rows", "cpu"), ("two open", "meta")])
def test_boundaries_that_no_kernel_reads_stay_on_the_cpu(which, place):
    """What holds one sequence is cut into rows."""
    split = context_parallel.read(CONTEXTS[which])
    cu, host = context_parallel.local_boundaries(CONTEXTS[which], torch.device("meta"), split)
    assert (cu.device.type, host.device.type) == (place, "cpu")
    # an operation that reads them in any case does not give its split
    assert context_parallel.local_boundaries(CONTEXTS[which], torch.device("meta"))[0].device.type == "meta"


def test_the_first_kernel_is_launched_before_autograd_makes_a_node(launched, monkeypatch):  # noqa: F811
    from kernel_fun.kda import context_parallel as ranks

    class Made(Exception):
        pass

    def apply(*args):
        raise Made

    monkeypatch.setattr(ranks.ContextParallelKDA, "apply", apply)
    ctx = CONTEXTS["in two rows"]
    x = inputs(cu=ctx.cu_seqlens.tolist(), T=int(ctx.cu_seqlens[-1]))
    del x["cu_seqlens"]
    with pytest.raises(Made):
        chunk_kda(**x, cp_context=ctx)
    assert [name for name, _ in launched] == ["fwd_intra"]

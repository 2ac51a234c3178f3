"""One problem on one process and over the ranks of a group: what a rank computes, the whole from the parts of
all, and the errors of both. For the tests, and for `python -m benchmarks.ranks`, which records them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from kernel_fun._common import config
from kernel_fun.kda import build_cp_context, chunk_kda, context_rows
from kernel_fun.testing import TOLERANCE

F64 = torch.float64
BY_TOKEN = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True)
class Problem:
    """One packed batch, made alike in every process from its seed."""

    cu: tuple[int, ...]
    layout: str = "contiguous"
    H: int = 1
    HV: int = 2
    K: int = 8
    V: int = 4
    dtype: torch.dtype = F64
    states: bool = True
    seed: int = 0
    flags: dict[str, Any] = field(default_factory=dict)
    theirs: tuple[dict[str, Any], ...] = ()
    """The fields of fla's context of each rank, to be used in place of ours."""
    reduce: bool = False
    backend: str = "eager"
    device: str = "cpu"
    rows: int | None = None
    """A piece of one sequence is cut into."""

    @property
    def gated(self) -> bool:
        return bool(self.flags.get("use_gate_in_kernel", True))

    def leaves(self) -> dict[str, Tensor]:
        T, N = self.cu[-1], len(self.cu) - 1
        shapes = {
            "q": (1, T, self.H, self.K),
            "k": (1, T, self.H, self.K),
            "v": (1, T, self.HV, self.V),
            "g": (1, T, self.HV, self.K),
            "beta": (1, T, self.HV),
            "A_log": (self.HV,),
            "dt_bias": (self.HV * self.K,),
            "initial_state": self.state_shape(N),
        }
        make = torch.Generator().manual_seed(self.seed)
        found = {n: torch.randn(s, generator=make, dtype=F64) for n, s in shapes.items()}
        found["g"] -= 2.0  # slow decay: what a rank gets from others matters
        if not self.gated:
            found["g"] = torch.nn.functional.logsigmoid(found["g"] + 5.0)
            found["beta"] = found["beta"].sigmoid()
            del found["A_log"], found["dt_bias"]
        if not self.states:
            del found["initial_state"]
        wide = F64 if self.dtype == F64 else torch.float32
        return {n: x.to(self.device, self.dtype if n in BY_TOKEN else wide) for n, x in found.items()}

    def state_shape(self, N: int) -> tuple[int, ...]:
        last = (self.V, self.K) if self.flags.get("state_v_first") else (self.K, self.V)
        return (N, self.HV, *last)

    def upstream(self) -> tuple[Tensor, Tensor]:
        make = torch.Generator().manual_seed(self.seed + 1)
        do = torch.randn(1, self.cu[-1], self.HV, self.V, generator=make, dtype=F64)
        dht = torch.randn(self.state_shape(len(self.cu) - 1), generator=make, dtype=F64)
        wide = F64 if self.dtype == F64 else torch.float32
        return do.to(self.device, self.dtype), dht.to(self.device, wide)

    def call(self, x: dict[str, Tensor], **more: Any) -> tuple[Tensor, Tensor | None]:
        flags = {
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": self.gated,
            "output_final_state": self.states,
        }
        with config.KDA_BACKEND.set(self.backend):
            return chunk_kda(**x, **{**flags, **self.flags, **more})

    def loss(self, o: Tensor, ht: Tensor | None, do: Tensor, dht: Tensor) -> Tensor:
        return (o * do).sum() + (0.0 if ht is None else (ht * dht).sum())


def alone(p: Problem) -> dict[str, Tensor]:
    """Outputs and gradients of one process."""
    x = {n: t.requires_grad_() for n, t in p.leaves().items()}
    o, ht = p.call(x, cu_seqlens=torch.tensor(p.cu, device=p.device))
    p.loss(o, ht, *p.upstream()).backward()
    return results(x, o, ht)


def results(x: dict[str, Tensor], o: Tensor, ht: Tensor | None) -> dict[str, Tensor]:
    found = {"o": o, **{f"d{n}": t.grad for n, t in x.items() if t.grad is not None}}
    found = found if ht is None else {**found, "ht": ht}
    return {n: t.detach().cpu() for n, t in found.items()}


def context_of(p: Problem, group: Any) -> Any:
    if p.theirs:
        return SimpleNamespace(**p.theirs[dist.get_rank(group)], group=group)
    return build_cp_context(torch.tensor(p.cu), group, layout=p.layout, reduce_gradients=p.reduce)


class Part(NamedTuple):
    """What a rank has of a problem."""

    where: Any
    """Our context, which says where the rank's tokens belong."""
    x: dict[str, Tensor]
    do: Tensor
    dht: Tensor


def part_of(p: Problem, group: Any) -> Part:
    where = build_cp_context(torch.tensor(p.cu), group, layout=p.layout)
    members, (do, dht) = list(where.sequences), p.upstream()
    x = {n: where.shard(t) if n in BY_TOKEN else t for n, t in p.leaves().items()}
    if p.states:
        x["initial_state"] = x["initial_state"][members]
    return Part(where, {n: t.clone().requires_grad_() for n, t in x.items()}, where.shard(do), dht[members])


def on_rank(group: Any, p: Problem) -> dict[str, Any]:
    """One rank's part of outputs and gradients, and where it belongs."""
    torch.manual_seed(0)
    context, mine = context_of(p, group), part_of(p, group)
    gathers, watched = count_gathers()
    with watched, patch.object(context_rows, "ROWS", p.rows):
        o, ht = p.call(mine.x, cp_context=context)
        forward = len(gathers)
        p.loss(o, ht, mine.do, mine.dht).backward()
    return {
        "found": results(mine.x, o, ht),
        "ranges": mine.where.token_ranges,
        "sequences": list(mine.where.sequences),
        "gathers": gathers,
        "forward": forward,
    }


def on_rank_in_streams(group: Any, problems: tuple[Problem, ...]) -> list[list[str]]:
    """Problems of a rank begun one after the other, each in a stream of its own, their passes interleaved and
    nothing waited for between them: of each the results that are not to the bit those it has alone."""
    alone = [on_rank(group, p)["found"] for p in problems]
    parts = [part_of(p, group) for p in problems]
    contexts = [context_of(p, group) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    outputs: list[tuple[Tensor, Tensor | None]] = []
    for p, stream, part, context in zip(problems, streams, parts, contexts, strict=True):
        with torch.cuda.stream(stream):
            outputs.append(p.call(part.x, cp_context=context))
    for p, stream, part, out in zip(problems, streams, parts, outputs, strict=True):
        with torch.cuda.stream(stream):
            p.loss(*out, part.do, part.dht).backward()
    torch.cuda.synchronize()
    beside = [results(part.x, *out) for part, out in zip(parts, outputs, strict=True)]
    return [
        [n for n, want in one.items() if not torch.equal(found[n], want)]
        for one, found in zip(alone, beside, strict=True)
    ]


def count_gathers() -> tuple[list[int], Any]:
    """A list that grows by the bytes of each all-gather of this process, and the context that watches."""
    seen: list[int] = []

    def counting(gather: Any) -> Any:
        def counted(output: Tensor, given: Tensor, **options: Any) -> Any:
            seen.append(given.numel() * given.element_size())
            return gather(output, given, **options)

        return counted

    @contextmanager
    def watched() -> Generator[None]:
        names = [n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n)]
        real = {n: getattr(dist, n) for n in names}
        for n in names:
            setattr(dist, n, counting(real[n]))
        try:
            yield
        finally:
            for n in names:
                setattr(dist, n, real[n])

    return seen, watched()


def together(p: Problem, parts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The whole from the ranks' parts: tokens in place, states and parameters as sums over the ranks."""
    T, N = p.cu[-1], len(p.cu) - 1
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, mine in part["found"].items():
            if name in ("o", *(f"d{n}" for n in BY_TOKEN)):
                into = whole.setdefault(name, mine.new_full((1, T, *mine.shape[2:]), float("nan")))
                at = 0
                for start, stop in part["ranges"]:
                    into[:, start:stop] = mine[:, at : at + stop - start]
                    at += stop - start
            elif name in ("ht", "dinitial_state"):
                into = whole.setdefault(name, mine.new_zeros(N, *mine.shape[1:]))
                into.index_add_(0, torch.tensor(part["sequences"]), mine)
            elif not p.reduce:
                whole[name] = whole[name] + mine if name in whole else mine
            elif name in whole:
                assert torch.equal(whole[name], mine)
            else:
                whole[name] = mine
    return whole


class Errors(NamedTuple):
    """Of one output or gradient: norm of the difference from the truth over that of the truth."""

    tensor: str
    one: float
    """Of one process."""
    several: float
    limit: float
    """Of ``several``."""


def errors(p: Problem, parts: list[dict[str, Any]]) -> list[Errors]:
    """Against float64 on the same rounded inputs: the limit is 1.1 times the error of one process.

    dA_log is one number a head, and of few the errors of two equally good runs differ by chance: half the
    table's limit will do for it, and a GPU's problems have 16 heads.
    """
    (truth, single), several = _truth_and_one(replace(p, layout="contiguous")), together(p, parts)
    found: list[Errors] = []
    for name, want in truth.items():
        one, more = (float((y[name].double() - want).norm() / want.norm()) for y in (single, several))
        by_chance = 0.5 * TOLERANCE["kda", name, p.dtype].relative if name == "dA_log" else 1e-6
        found.append(Errors(name, one, more, max(1.1 * one, by_chance)))
    return found


_known: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}


def _truth_and_one(p: Problem) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients in float64, and of one process; those of the last problem are kept."""
    if repr(p) not in _known:
        oracle = replace(p, dtype=F64, backend="eager")
        x = {n: t.to(F64).requires_grad_() for n, t in p.leaves().items()}
        o, ht = oracle.call(x, cu_seqlens=torch.tensor(p.cu, device=p.device))
        oracle.loss(o, ht, *(t.to(F64) for t in p.upstream())).backward()
        _known.clear()
        _known[repr(p)] = results(x, o, ht), alone(p)
    return _known[repr(p)]


WORLDS = 2, 4
LAYOUTS = "contiguous", "zigzag"
ON_HOPPER = {"one": (0, 4096), "one in rows": (0, 4096), "packed": (0, 700, 701, 3000, 4096)}
"""Boundaries of what is cut over processes that share a Hopper GPU."""


def on_hopper(packing: str, layout: str) -> Problem:
    return Problem(
        ON_HOPPER[packing],
        layout,
        H=8,
        HV=16,
        K=128,
        V=128,
        dtype=torch.bfloat16,
        backend="sm90",
        device="cuda",
        rows=2 if packing == "one in rows" else None,
    )

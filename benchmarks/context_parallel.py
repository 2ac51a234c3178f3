"""One sequence over the GPUs of one host: `kernel-fun bench --cp N`.

Every rank times the same calls; a time is that of the slowest rank, from a barrier to the end of its work.
Rounds of one rank and of N alternate: GPUs that get warm are slower, for both.
``kda.fwdbwd`` on one rank has the whole sequence, on N ranks each has its part. Efficiency is the time of one
rank over N times that of N. Rows of another layout than contiguous say so behind the shape's name.

fla takes the launch configs kept in benchmarks/data where there are such, unless FLA_CACHE_MODE is set;
those of its kernels that are in none are searched.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes

import kernel_fun
from kernel_fun._common import support
from kernel_fun._common.context_parallel import LAYOUTS
from kernel_fun.bench import machine, record, suite, timing
from kernel_fun.bench.record import Record, Row, Skipped
from kernel_fun.bench.timing import Quantiles

from . import kda, kept
from .shapes import SHAPES, Shape

DEFAULT = ("kimi_64k", "kimi_256k")
PASSES = ("fwd", "fwdbwd")
CANDIDATES = ("sm90", "fla")
BY_TOKEN = ("q", "k", "v", "g", "beta")
WARM, ROUNDS = 3, 15

Step = Callable[[], None]
Timed = tuple[str, str, str, int, list[float], list[float], int]
"""Shape, pass, candidate, ranks, ms of the rounds, ms of them in all-gathers, peak bytes."""


def measure(
    world: int, shapes: Sequence[str], gate: str, candidates: Sequence[str], layout: str = LAYOUTS[0]
) -> Record:
    """A record of one rank beside ``world`` of them.

    Raises:
        ValueError: there are fewer GPUs, a shape has not one row, or lengths, or it or the layout is unknown.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"`--layout` must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if world < 2:
        raise ValueError(f"`--cp` must be 2 or more, got {world}")
    if world > torch.cuda.device_count():
        raise ValueError(f"`--cp` {world} needs {world} GPUs, here are {torch.cuda.device_count()}")
    for name in shapes:
        if name not in SHAPES or SHAPES[name].B != 1 or SHAPES[name].lengths is not None:
            raise ValueError(f"`--shape` must name one sequence, such as {', '.join(DEFAULT)}, got {name!r}")
    context = mp.get_context("spawn")
    with contextlib.ExitStack() as stack:
        if "fla" in candidates and "FLA_CACHE_MODE" not in os.environ:
            heads = SHAPES[shapes[0]].HV, SHAPES[shapes[0]].V
            stack.enter_context(kept.kept_configs(kept.archives(), *heads, exactly=True))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        answers = context.SimpleQueue()
        args = (world, str(Path(folder) / "store"), tuple(shapes), gate, tuple(candidates), layout, answers)
        start_processes(_rank, args, nprocs=world, start_method="spawn")  # raises what a rank raises
        timed, skipped = answers.get()
    device = torch.device("cuda", 0)
    commit, dirty = suite.commit()
    taken = Record(
        gpu=next(d["name"] for d in machine.devices() if d["device"] == "cuda:0"),
        device="cuda",
        commit=commit,
        dirty=dirty,
        utc=record.now(),
        versions=kernel_fun.versions(),
        ceilings=timing.ceilings(device),
        memory="peak of torch's allocator on one rank",
        threads=torch.get_num_threads(),
        skipped=skipped,
    )
    for name, what, candidate, ranks, ms, gather, peak in timed:
        shape = SHAPES[name]
        work = kda.work(replace(shape, T=shape.T // ranks), what, torch.bfloat16)
        for bench, times in ((f"kda.{what}", ms), ("all-gathers", gather)):
            if ranks > 1 or bench != "all-gathers":
                where = f"{bench}, {ranks} rank{'s' * (ranks > 1)}"
                where = where if bench != "all-gathers" else f"{where}, of kda.{what}"
                quantiles = Quantiles(*torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist())
                taken.rows.append(
                    Row(where, in_layout(name, layout), gate, "bfloat16", candidate, quantiles, len(times),
                        peak, None, None, {}, work.flops, work.bytes)
                )  # fmt: skip
    return taken


def in_layout(shape: str, layout: str) -> str:
    """What a record calls a shape that is cut in a layout."""
    return shape if layout == LAYOUTS[0] else f"{shape}, {layout}"


def efficiencies(taken: Record, world: int) -> list[tuple[str, str, str, float]]:
    """(shape, pass, candidate, efficiency) of every case that both one and ``world`` ranks have."""
    ms = {(r.shape, r.bench, r.candidate): r.ms.p50 for r in taken.rows}
    found: list[tuple[str, str, str, float]] = []
    for (shape, bench, candidate), alone in ms.items():
        what, _, ranks = bench.partition(", ")
        together = ms.get((shape, f"{what}, {world} ranks", candidate))
        if ranks == "1 rank" and together is not None:
            found.append((shape, what, candidate, alone / (world * together)))
    return found


def _rank(
    rank: int,
    world: int,
    store: str,
    shapes: Sequence[str],
    gate: str,
    candidates: Sequence[str],
    layout: str,
    answers: Any,
) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
    )
    timed: list[Timed] = []
    skipped: list[Skipped] = []
    try:
        for name in shapes:
            for candidate in candidates:
                try:
                    timed += _candidate(SHAPES[name], gate, candidate, rank, world, layout)
                except (RuntimeError, NotImplementedError) as error:  # refusals, alike on every rank
                    reason = str(error).partition("\n")[0]
                    skipped.append(Skipped("kda.fwdbwd", in_layout(name, layout), gate, candidate, reason))
                torch.cuda.empty_cache()
        if rank == 0:
            answers.put((timed, skipped))
    finally:
        dist.destroy_process_group()


def _candidate(shape: Shape, gate: str, candidate: str, rank: int, world: int, layout: str) -> list[Timed]:
    """One rank and ``world`` of them: the calls of one implementation."""
    device = torch.device("cuda", rank)
    steps: dict[tuple[int, str], Step] = {}
    peaks: dict[tuple[int, str], int] = {}
    for ranks in (1, world):
        held = torch.cuda.memory_allocated()
        case = kda.case(replace(shape, T=shape.T // ranks), gate, torch.bfloat16, device)
        inputs = {
            n: x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for n, x in case.arguments.items()
        }
        function, context = kda.function(candidate)
        if ranks > 1:
            inputs["cp_context"] = _context(candidate, shape.T, device, layout)
        for what in PASSES:
            step = _step(function, context, inputs, case.upstream["do"] if what == "fwdbwd" else None)
            torch.cuda.reset_peak_memory_stats()
            for _ in range(WARM):
                step()
            steps[ranks, what], peaks[ranks, what] = step, torch.cuda.max_memory_allocated() - held
    return [
        (shape.name, what, candidate, ranks, *times, peaks[ranks, what])
        for (ranks, what), times in _times(steps).items()
    ]


def _step(function: Callable[..., Any], context: Callable[[], Any], inputs: dict[str, Any], do: Any) -> Step:
    leaves = [x for x in inputs.values() if getattr(x, "requires_grad", False)]

    def step() -> None:
        with context(), torch.set_grad_enabled(do is not None):
            o = function(**inputs)[0]
            if do is not None:
                torch.autograd.grad(o, leaves, do)

    return step


def _context(candidate: str, T: int, device: torch.device, layout: str) -> Any:
    cu_seqlens, group = torch.tensor([0, T]), dist.group.WORLD
    assert group is not None
    if candidate == "fla":
        from fla.ops.cp import build_cp_context  # pyright: ignore

        return build_cp_context(  # pyright: ignore
            cu_seqlens.to(device), group=group, cu_seqlens_cpu=cu_seqlens, layout=layout
        )
    from kernel_fun.kda import build_cp_context

    return build_cp_context(cu_seqlens, group, layout=layout)


def _times(steps: dict[tuple[int, str], Step]) -> dict[tuple[int, str], tuple[list[float], list[float]]]:
    """(ms of each round, ms of it in all-gathers) of each step, of the slowest rank."""
    rounds: list[list[float]] = [[] for _ in steps]
    gathers: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for taken, step in zip(rounds, steps.values()):
            taken.append(_round(step))
    for _ in range(ROUNDS):  # apart: to wait for a gather where it starts overlaps it with nothing
        for taken, step in zip(gathers, steps.values()):
            with _events() as events:
                _round(step)
            taken.append(sum(a.elapsed_time(b) for a, b in events))
    slowest = torch.tensor([rounds, gathers], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {key: (slowest[0, i].tolist(), slowest[1, i].tolist()) for i, key in enumerate(steps)}


def _round(step: Step) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


@contextlib.contextmanager
def _events() -> Generator[list[tuple[Any, Any]]]:
    """Pairs of events around every all-gather within."""
    found: list[tuple[Any, Any]] = []
    names = [n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n)]
    real = {n: getattr(dist, n) for n in names}

    def watched(gather: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work = gather(*args, **options)
            if options.get("async_op") and work is not None:
                work.wait()  # of the stream, not of the host
            end.record()
            found.append((begin, end))
            return work

        return call

    for n in names:
        setattr(dist, n, watched(real[n]))
    try:
        yield found
    finally:
        for n in names:
            setattr(dist, n, real[n])


def candidates_here(wanted: Sequence[str] | None) -> list[str]:
    """Those asked for, or our kernels and fla where it is installed."""
    if wanted:
        unknown = [n for n in wanted if n not in CANDIDATES]
        if unknown:
            raise ValueError(
                f"`--candidate` must be one of {', '.join(CANDIDATES)} with --cp, got {unknown[0]!r}"
            )
        return list(wanted)
    return [n for n in CANDIDATES if n != "fla" or support.module_found("fla")]

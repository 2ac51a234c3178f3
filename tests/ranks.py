"""Processes that stand for the ranks of a process group: forked once, given jobs, gloo between them."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = (2, 3, 4)
GROUP_TIMEOUT = 240.0
"""Seconds after which a collective that waits for a rank gives up; no test may come near it."""
ANSWER_TIMEOUT = 300.0


class Raised:
    """What a rank raised."""

    def __init__(self, error: BaseException) -> None:
        self.type = type(error)
        self.text = str(error)
        self.trace = traceback.format_exc()


class Ranks:
    """Processes and the groups of the first so many of them. Started at the first job.

    ``backend``: gloo; or nccl, for which rank n has GPU n.
    """

    def __init__(self, backend: str = "gloo", sizes: tuple[int, ...] = SIZES) -> None:
        self._backend, self._sizes = backend, sizes
        self._links: list[Connection] = []
        self._processes: list[Any] = []

    def try_run(self, world: int, job: Callable[..., Any], *args: Any) -> tuple[list[Any], float]:
        """``job(group, *args)`` on every rank of a group: its results, or a Raised in a result's place, and
        the seconds until the last answer. ``job`` is a function of an importable module."""
        if not self._links:
            self._start()
        begin = time.monotonic()
        for link in self._links[:world]:
            link.send((job.__module__, job.__qualname__, world, pickle.dumps(args)))
        answers: list[Any] = []
        for rank, link in enumerate(self._links[:world]):
            if not link.poll(ANSWER_TIMEOUT):
                self.stop()
                raise TimeoutError(f"rank {rank} of {world} gave no answer in {ANSWER_TIMEOUT} s")
            answers.append(pickle.loads(link.recv()))
        return answers, time.monotonic() - begin

    def run(self, world: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """As :meth:`try_run`, where no rank may raise."""
        answers, _ = self.try_run(world, job, *args)
        for rank, answer in enumerate(answers):
            assert not isinstance(answer, Raised), f"rank {rank} of {world}:\n{answer.trace}"
        return answers

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            self._place.cleanup()
        self._links, self._processes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "kernel_fun.kda", "kernel_fun.cconv", "pytest"])
        self._place = tempfile.TemporaryDirectory()
        store = str(Path(self._place.name) / "store")
        for rank in range(max(self._sizes)):
            ours, theirs = context.Pipe()
            facts = (rank, store, theirs, list(sys.path), self._backend, self._sizes)
            process = context.Process(target=_serve, args=facts, daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)


def a_group_like(group: Any) -> Any:
    """Another group of the same ranks. It is not destroyed: the next one would take its name, and what the
    store holds of it."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


def _serve(
    rank: int, store: str, link: Connection, path: list[str], backend: str, sizes: tuple[int, ...]
) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=max(sizes), timeout=timeout
    )
    groups = {n: dist.new_group(list(range(n)), timeout=timeout) for n in sizes}
    while True:
        try:
            module, name, world, args = link.recv()
        except EOFError:
            return
        try:
            job = getattr(importlib.import_module(module), name)
            answer = job(groups[world], *pickle.loads(args))
        except BaseException as error:  # the parent judges it
            answer = Raised(error)
        link.send(pickle.dumps(answer))

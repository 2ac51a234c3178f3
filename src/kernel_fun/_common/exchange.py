"""The one collective of a context-parallel operation: an all-gather that also tells of failures.

A rank that raised before its turn still takes part: it sends its error instead of data, and every rank
raises. So does a call that differs between ranks. Each rank's message is a header of 64 bytes and the data.
What the gather needs is allocated before the work it carries the result of, so that a rank which runs out of
memory in that work can still tell. A rank that cannot allocate even this, or whose arguments do not say how
large the message of the others is, is missed until the group's timeout.

A rank that fails after it has sent is alone with its error, and is missed in the next collective. If it goes
on instead, ranks may be at different calls of equal sizes. So it counts such failures of a group, and every
header has the count: from then on all exchanges of the group raise on every rank. A failure that could not be
told is counted too; there the ranks must agree, as all of them may have made the same mistake.

Every exchange of a group is one of each of its ranks, so its number is the same on all of them. The header of
a backward has the number of its forward: ranks that run backwards in different orders raise.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from kernel_fun._common import context_parallel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernel_fun._common.context_parallel import Split

HEADER = 64
"""Bytes before the data: eight int64 words, so that the data stays aligned."""
OK, FAILED = 0, 1


@dataclass
class _Past:
    """What this rank has done in a group."""

    exchanges: int = 0
    """Begun, with data or an error."""
    untold: int = 0
    """Failures before an exchange that the other ranks could not be told of."""
    alone: int = 0
    """Failures after an exchange, where no other rank could know."""


_pasts: weakref.WeakKeyDictionary[Any, _Past] = weakref.WeakKeyDictionary()


def _past(group: Any) -> _Past:
    return _pasts.setdefault(group, _Past())


class Silence(Enum):
    """Why a rank that fails tells no other."""

    NOBODY_WAITS = "the call makes no exchange"
    UNKNOWN_SIZE = "the arguments do not say how large the message of the others is"


class PeerFailure(RuntimeError):
    """Another rank of the group raised, or called something else."""


class Exchange:
    """An all-gather of one tensor per rank, in flight between :meth:`send` and :meth:`receive`.

    ``what`` names the operation and its direction; it, the shape, the dtype, ``agreed`` and the context must
    be the same on every rank, and so must ``of``: in a backward, the ``number`` of the forward's exchange.
    Messages of different sizes no collective can compare: what they do is the backend's affair.
    """

    def __init__(
        self,
        split: Split,
        what: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        agreed: Mapping[str, Any] | None = None,
        of: int = 0,
    ) -> None:
        import torch

        self.number = 0
        """Of this exchange among those of its group, from 1; 0 before it begins."""
        self._of = of
        self._split, self._what = split, what
        self._shape, self._dtype, self._device = shape, dtype, device
        agreed = {} if agreed is None else agreed
        self._names = ", ".join(("shapes", *agreed))
        self._call = zlib.crc32(repr((what, shape, str(dtype), *agreed.items())).encode())
        self._bytes = torch.Size(shape).numel() * dtype.itemsize
        self._mine: Tensor | None = None
        self._sent = False

    def reserve(self) -> None:
        """Allocate this rank's message and room for those of all ranks."""
        import torch

        if self._mine is not None:
            return
        size, ranks = HEADER + self._bytes, self._split.ranks
        carrier = _carrier(self._split, self._device)
        mine = torch.empty(size, dtype=torch.uint8, device=carrier)
        self._all = mine[None] if ranks == 1 else mine.new_empty(ranks, size)
        self._mine = mine

    @contextlib.contextmanager
    def or_tell(self) -> Generator[None]:
        """An exception in the block reaches its caller, and before :meth:`send` every rank. After it, one
        that the other ranks do not raise too makes every later exchange of the group raise."""
        try:
            self.reserve()
        except BaseException:
            _untold(self._split.group)
            raise
        try:
            yield
        except BaseException as error:
            if not self._sent:
                _tell(error, self._split.group, lambda: self)
            elif not isinstance(error, PeerFailure) and self._split.ranks > 1:
                _past(self._split.group).alone += 1
            raise

    def send(self, data: Tensor) -> None:
        """Start the all-gather; does not wait for it."""
        import torch

        self.reserve()
        assert self._mine is not None
        self._mine[HEADER:].copy_(data.contiguous().view(-1).view(torch.uint8))
        self._start(OK)

    def tell(self, error: BaseException) -> None:
        """Take part with an error in place of the data.

        Where the process is to stop (a KeyboardInterrupt, say) it does not wait for the others to listen.
        """
        import torch

        if self._split.ranks == 1:
            return
        self.reserve()
        assert self._mine is not None
        text = f"{type(error).__name__}: {error}".encode()[: self._bytes]
        self._mine.zero_()
        self._mine[HEADER : HEADER + len(text)].copy_(torch.tensor(list(text), dtype=torch.uint8))
        self._start(FAILED, len(text))
        if isinstance(error, Exception):
            self._wait()

    def receive(self) -> Tensor:
        """Wait: the data of every rank, ``[ranks, *shape]``, or the same exception on every rank."""
        data = self.arrive()
        self.confirm()
        return data

    def arrive(self) -> Tensor:
        """The data of every rank, ``[ranks, *shape]``: on a GPU in the order of the stream, and the host does
        not wait. It means nothing until :meth:`confirm` has returned."""
        self._wait()
        self._headers = _on_host(self._all[:, :HEADER])
        data = self._all[:, HEADER:].view(self._dtype).view(self._split.ranks, *self._shape)
        return data.to(self._device)

    def confirm(self) -> None:
        """Raise what a rank told, the same exception on every rank. On a GPU the host waits for the gather
        here, and for nothing after it: work queued between :meth:`arrive` and this follows without a gap."""
        headers = self._headers().view(_int64()).tolist()
        failed = [r for r, header in enumerate(headers) if header[0] != OK]
        if failed:
            text = bytes(self._all[failed[0], HEADER : HEADER + headers[failed[0]][1]].cpu().tolist())
            raise PeerFailure(
                f"{self._what}: rank {failed[0]} of the context-parallel group raised "
                f"{text.decode(errors='replace')}"
            )
        alone = [r for r, header in enumerate(headers) if header[4]]
        if alone:
            raise PeerFailure(
                f"{self._what}: rank {alone[0]} of the context-parallel group failed in an earlier call "
                "after its exchange, where no other rank could know, and went on: the ranks may be at "
                "different calls. Make a new group"
            )
        untold = [header[5] for header in headers]
        if len(set(untold)) > 1:
            most = max(untold)
            raise PeerFailure(
                f"{self._what}: rank {untold.index(most)} of the context-parallel group failed in {most} "
                f"earlier calls where the other ranks could not be told, rank {untold.index(min(untold))} in "
                f"{min(untold)}, and went on: the ranks may be at different calls. Make a new group"
            )
        differ = (
            (2, f"other arguments than rank 0 (these must agree: {self._names})"),
            (3, "another context than rank 0 (boundaries, layout and reduce_gradients must agree)"),
        )
        for word, what in differ:
            values = [header[word] for header in headers]
            strange = [
                r for r, value in enumerate(values) if 0 not in (value, values[0]) and value != values[0]
            ]
            if strange:
                raise PeerFailure(
                    f"{self._what}: rank {strange[0]} of the context-parallel group called with {what}, "
                    f"or called something else"
                )
        forwards = [header[6] for header in headers]
        strange = [r for r, number in enumerate(forwards) if number != forwards[0]]
        if strange:
            raise PeerFailure(
                f"{self._what}: rank {strange[0]} of the context-parallel group runs the backward of another "
                "call than rank 0: all ranks must run them in the same order"
            )

    def _start(self, status: int, text: int = 0) -> None:
        import torch
        import torch.distributed as dist

        assert self._mine is not None
        past = _Past() if self._split.ranks == 1 else _past(self._split.group)
        words = [status, text, self._call, self._split.fingerprint, past.alone, past.untold, self._of, 0]
        self._mine[:HEADER].copy_(torch.tensor(words, dtype=torch.int64).view(torch.uint8))
        self._work: Any = None
        self._sent = True
        if self._split.ranks == 1:
            return
        library: Any = dist  # the collective has its new name since torch 2.13
        gather = getattr(library, "all_gather_single", None) or library.all_gather_into_tensor
        self._work = gather(self._all.view(-1), self._mine, group=self._split.group, async_op=True)
        past.exchanges += 1
        self.number = past.exchanges

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


@contextlib.contextmanager
def failing(context: Any, exchange: Callable[[Split], Exchange | Silence]) -> Generator[None]:
    """Around what comes before an operation's exchange: an exception in it reaches every rank of the group.

    ``exchange`` makes the one that the other ranks wait in. Where the arguments do not tell its size it makes
    none: a message of another size would do them more harm than silence. A mistake in the context itself,
    which may be None, is raised without a word to the others: they make the same.
    """
    split = None
    try:
        split = None if context is None else context_parallel.read(context)
        yield
    except BaseException as error:
        if split is not None:
            group, read = split.group, split
            _tell(error, group, lambda: exchange(read))
        elif context is not None:
            _untold(getattr(context, "group", None))
        raise


def _tell(error: BaseException, group: Any, exchange: Callable[[], Exchange | Silence]) -> None:
    """Send an error to the other ranks; where that fails, say so, and leave the error as it is."""
    theirs = None
    try:
        theirs = exchange()
        if isinstance(theirs, Exchange):
            theirs.tell(error)
        elif theirs is Silence.UNKNOWN_SIZE:
            _untold(group)
    except Exception as why:
        if not (isinstance(theirs, Exchange) and theirs.number):
            _untold(group)
        logging.getLogger("kernel_fun").warning(
            "kernel-fun: the other ranks of the context-parallel group were not told of %s (%s: %s)",
            type(error).__name__, type(why).__name__, why,
        )  # fmt: skip


def _untold(group: Any) -> None:
    import torch.distributed as dist

    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        _past(group).untold += 1


def agreed_size(*tellers: Iterable[int]) -> int | None:
    """A size as the arguments of a refused call tell it, the first tellers that tell any: what more of them
    say than say anything else, or None. One mistaken argument among several does not decide."""
    for told in tellers:
        counts = Counter(told).most_common(2)
        if counts:
            return None if len(counts) > 1 and counts[0][1] == counts[1][1] else counts[0][0]
    return None


def reduce_over(split: Split, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Sums of gradients over the group, in float32 or wider, rounded to their dtypes; one all-reduce."""
    import torch
    import torch.distributed as dist

    given = [g for g in gradients if g is not None]
    if split.ranks == 1 or not given:
        return gradients
    wide = torch.float64 if any(g.dtype == torch.float64 for g in given) else torch.float32
    flat = torch.cat([g.reshape(-1).to(wide) for g in given])
    flat = flat.to(_carrier(split, flat.device))
    dist.all_reduce(flat, group=split.group)
    sums = iter(flat.split([g.numel() for g in given]))
    return tuple(None if g is None else next(sums).view(g.shape).to(g.device, g.dtype) for g in gradients)


def _carrier(split: Split, device: torch.device) -> torch.device:
    """Where messages lie: gloo's go through the host and NCCL's through the GPU, whatever device the data, or
    arguments that are refused, lie on."""
    import torch
    import torch.distributed as dist

    if split.ranks == 1:
        return device
    backend = dist.get_backend(split.group)
    if backend == "gloo":
        return torch.device("cpu")
    if backend == "nccl" and device.type != "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _on_host(x: Tensor) -> Callable[[], Tensor]:
    """A contiguous copy in the host's memory, for when it is asked for; on a GPU under way in the stream."""
    import torch

    if not x.is_cuda:
        return x.contiguous
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(x.device))

    def waited() -> Tensor:
        there.synchronize()
        return copy

    return waited


def _int64() -> torch.dtype:
    import torch

    return torch.int64

"""The one collective of a context-parallel operation: an all-gather that also tells of failures.

A rank that raised before its turn still takes part: it sends its error instead of data, and every rank
raises. So does a call that differs between ranks. Each rank's message is a header of 128 bytes and the data.
What the gather needs is allocated before the work it carries the result of, so that a rank which runs out of
memory in that work can still tell. A rank that cannot allocate even this, or whose arguments do not say how
large the message of the others is, is missed until the group's timeout.

A rank that fails where no other hears of it, before an exchange that it cannot make or behind one, and goes
on, is at another call than the others: messages of equal sizes would pair up, with wrong numbers. So every
header has the operation and pass it belongs to, how many failures its rank kept to itself, and of a backward
the number of its forward's exchange. (An exchange is one of each rank, so its number is the same on all.)
Where these differ the ranks are astray: every rank sees it in the same exchange, and from then on each raises
before it sends anything. Where all ranks made the same mistake, none is astray.
"""

from __future__ import annotations

import contextlib
import logging
import struct
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

HEADER = 128
"""Bytes before the data: eight int64 words, then digests of what must agree."""
ITEMS = 16
"""Digests there is room for."""
LAYOUT = f"=6q16x{ITEMS}i"
OK, FAILED = 0, 1
STATUS, TEXT, WHAT, CONTEXT, UNHEARD, OF = range(6)
"""Words: OK or FAILED, the length of an error's text, operation and pass, the context's fingerprint, failures
that no other rank heard of, and the number of the forward's exchange."""


@dataclass
class _Past:
    """What this rank has done in a group."""

    exchanges: int = 0
    """Begun, with data or an error."""
    unheard: int = 0
    """Failures that the other ranks did not hear of."""
    astray: str = ""
    """How ranks came to be at different calls, once they are."""
    unread: Exchange | None = None
    """One that this rank left before it looked at the headers."""

    def proceed(self, what: str) -> None:
        """PeerFailure if the group is astray."""
        left, self.unread = self.unread, None
        if left is not None:
            left.look()
        if self.astray:
            raise PeerFailure(f"{what}: {self.astray}")


_pasts: weakref.WeakKeyDictionary[Any, _Past] = weakref.WeakKeyDictionary()


def _past(group: Any) -> _Past:
    found = _pasts.get(group)
    if found is None:
        found = _pasts[group] = _Past()
    return found


class Silence(Enum):
    """Why a rank that fails tells no other."""

    NOBODY_WAITS = "the call makes no exchange"
    UNKNOWN_SIZE = "the arguments do not say how large the message of the others is"


class PeerFailure(RuntimeError):
    """Another rank of the group raised, or called something else."""


class Terms:
    """What an exchange carries, and what the ranks must agree on in it; the same for calls that repeat it.

    ``what`` names the operation and its direction; it, the shape, the dtype and ``agreed`` must be the same
    on every rank.
    """

    def __init__(
        self, what: str, shape: tuple[int, ...], dtype: torch.dtype, agreed: Mapping[str, Any] | None = None
    ) -> None:
        import torch

        self.what, self.shape, self.dtype = what, shape, dtype
        self.bytes = torch.Size(shape).numel() * dtype.itemsize
        items = {"shapes": (shape, str(dtype)), **(agreed or {})}
        assert len(items) <= ITEMS
        self.agreed = tuple(items)
        self.number = zlib.crc32(what.encode())
        self.digests = [*map(_digest, items.items()), *[0] * (ITEMS - len(items))]


class Exchange:
    """An all-gather of one tensor per rank, in flight between :meth:`send` and :meth:`receive`.

    The terms and the context must be the same on every rank, and so must ``of``: in a backward, the
    ``number`` of the forward's exchange. Messages of different sizes no collective can compare: what they do
    is the backend's affair.
    """

    def __init__(self, split: Split, terms: Terms, device: torch.device, of: int = 0) -> None:
        self.number = 0
        """Of this exchange among those of its group, from 1; 0 before it begins."""
        self._split, self._terms, self._device, self._of = split, terms, device, of
        self._past = _Past() if split.ranks == 1 else _past(split.group)
        self._mine: Tensor | None = None
        self._work: Any = None
        self._over = False
        """This rank's failure has been dealt with, or is none of its own."""

    def reserve(self) -> None:
        """Allocate this rank's message and room for those of all ranks."""
        import torch

        if self._mine is not None:
            return
        size, ranks = HEADER + self._terms.bytes, self._split.ranks
        carrier = _carrier(self._split, self._device)
        mine = torch.empty(size, dtype=torch.uint8, device=carrier)
        self._all = mine[None] if ranks == 1 else mine.new_empty(ranks, size)
        self._mine = mine

    @contextlib.contextmanager
    def or_tell(self) -> Generator[None]:
        """An exception in the block reaches its caller, and before :meth:`send` every rank. One after it that
        the other ranks do not raise too leads astray: from the group's next exchange on every rank raises."""
        self._past.proceed(self._terms.what)
        try:
            self.reserve()
        except BaseException:
            self._unheard()
            raise
        try:
            yield
        except BaseException as error:
            if self.number:
                if not isinstance(error, (PeerFailure, *_stops())):
                    self._unheard()
            elif not self._over:
                self._over = True
                _tell(error, self._split.group, lambda: self)
            raise

    def _unheard(self) -> None:
        if not self._over:
            self._over = True
            self._past.unheard += 1

    def send(self, data: Tensor) -> None:
        """Start the all-gather; does not wait for it."""
        self._data().copy_(data)
        self._start(OK)

    def send_rows(self, given: Mapping[int, Tensor]) -> None:
        """As :meth:`send`, of a tensor with these rows; 0 in other rows, and behind the columns of these."""
        data = self._data()
        if len(given) < len(data) or any(x.shape[-1] < data.shape[-1] for x in given.values()):
            data.zero_()
        for i, x in given.items():
            data[i, ..., : x.shape[-1]] = x
        self._start(OK)

    def _data(self) -> Tensor:
        """Where this rank's data lies in its message."""
        self.reserve()
        assert self._mine is not None
        return self._mine[HEADER:].view(self._terms.dtype).view(self._terms.shape)

    def tell(self, error: BaseException) -> None:
        """Take part with an error in place of the data; not in a group whose ranks are astray.

        Where the process is to stop (a KeyboardInterrupt, say) it does not wait for the others to listen.
        """
        import torch

        if self._split.ranks == 1 or self._past.astray:
            return
        self.reserve()
        assert self._mine is not None
        text = f"{type(error).__name__}: {error}".encode()[: self._terms.bytes]
        self._mine.zero_()
        self._mine[HEADER : HEADER + len(text)].copy_(torch.tensor(list(text), dtype=torch.uint8))
        self._start(FAILED, len(text))
        if isinstance(error, Exception):
            self.look()

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
        data = self._all[:, HEADER:].view(self._terms.dtype).view(self._split.ranks, *self._terms.shape)
        return data.to(self._device)

    def confirm(self) -> None:
        """Raise what a rank told, the same exception on every rank. On a GPU the host waits for the gather
        here, and for nothing after it: work queued between :meth:`arrive` and this follows without a gap."""
        words, digests = self._read(self._headers())
        failed = [r for r, word in enumerate(words) if word[STATUS] != OK]
        if failed:
            text = bytes(self._all[failed[0], HEADER : HEADER + words[failed[0]][TEXT]].cpu().tolist())
            raise PeerFailure(
                f"{self._terms.what}: rank {failed[0]} of the context-parallel group raised "
                f"{text.decode(errors='replace')}"
            )
        self._past.proceed(self._terms.what)
        what, agreed = self._terms.what, self._terms.agreed
        for r, values in enumerate(digests):
            differ = [n for n, mine, first in zip(agreed, values, digests[0]) if mine != first]
            if differ:
                raise PeerFailure(
                    f"{what}: ranks 0 and {r} of the context-parallel group called with different "
                    f"{', '.join(differ)}; these must agree: {', '.join(agreed)}"
                )
        for r, word in enumerate(words):
            if 0 not in (word[CONTEXT], words[0][CONTEXT]) and word[CONTEXT] != words[0][CONTEXT]:
                raise PeerFailure(
                    f"{what}: ranks 0 and {r} of the context-parallel group called with different "
                    "contexts; boundaries, layout and reduce_gradients must agree"
                )

    def look(self) -> None:
        """Wait for an exchange this rank has given up, and see whether the ranks are astray."""
        self._wait()
        self._read(self._all[:, :HEADER].cpu())

    def _read(self, headers: Tensor) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Words and digests of each rank. Ranks that are astray are so from here on."""
        self._past.unread = None
        unpacked = [struct.unpack(LAYOUT, bytes(header)) for header in headers.tolist()]
        words, digests = [u[:-ITEMS] for u in unpacked], [u[-ITEMS:] for u in unpacked]
        self._past.astray = self._past.astray or self._astray(words)
        return words, digests

    def _astray(self, words: list[tuple[int, ...]]) -> str:
        """How ranks differ that are at different calls, or nothing."""
        whose, advice = "of the context-parallel group", "the ranks are at different calls: make a new group"
        for r, word in enumerate(words):
            if word[WHAT] != words[0][WHAT]:
                return f"rank {r} {whose} met rank 0 in another operation or pass, {advice}"
        missed = [word[UNHEARD] for word in words]
        if len(set(missed)) > 1:
            most, least = missed.index(max(missed)), missed.index(min(missed))
            count = f"{missed[most]} of rank {most}, {missed[least]} of rank {least}"
            return f"ranks {whose} went on after failures that no other rank heard of ({count}), {advice}"
        for r, word in enumerate(words):
            if word[OF] != words[0][OF]:
                return f"rank {r} {whose} runs the backward of another call than rank 0, {advice}"
        return ""

    def _start(self, status: int, text: int = 0) -> None:
        import torch.distributed as dist

        assert self._mine is not None
        terms, past = self._terms, self._past
        words = status, text, terms.number, self._split.fingerprint, past.unheard, self._of
        header = struct.pack(LAYOUT, *words, *terms.digests)
        self._mine[:HEADER].copy_(_pinned(bytearray(header), self._mine), non_blocking=True)
        if self._split.ranks > 1:
            library: Any = dist  # the collective has its new name since torch 2.13
            gather = getattr(library, "all_gather_single", None) or library.all_gather_into_tensor
            self._work = gather(self._all.view(-1), self._mine, group=self._split.group, async_op=True)
            self._past.unread = self
        past.exchanges += 1
        self.number = past.exchanges

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def _digest(item: tuple[str, Any]) -> int:
    """Of a name and a value, 31 bits."""
    return zlib.crc32(repr(item).encode()) >> 1


def _stops() -> tuple[type[BaseException], ...]:
    """What torch's checkpointing raises where it has recomputed enough: no failure."""
    from torch.utils import checkpoint

    stop = getattr(checkpoint, "_StopRecomputationError", None)
    return () if stop is None else (stop,)


@contextlib.contextmanager
def failing(context: Any, exchange: Callable[[Split], Exchange | Silence]) -> Generator[Split | None]:
    """Around what comes before an operation's exchange: an exception in it reaches every rank of the group.
    Gives the context as it is read.

    ``exchange`` makes the one that the other ranks wait in. Where the arguments do not tell its size it makes
    none: a message of another size would do them more harm than silence. A mistake in the context itself,
    which may be None, is raised without a word to the others: they make the same.
    """
    split = None
    try:
        split = None if context is None else context_parallel.read(context)
        yield split
    except BaseException as error:
        if split is not None:
            group, read = split.group, split
            _tell(error, group, lambda: exchange(read))
        elif context is not None:
            _unheard(getattr(context, "group", None))
        raise


def _tell(error: BaseException, group: Any, exchange: Callable[[], Exchange | Silence]) -> None:
    """Send an error to the other ranks; where that fails, say so, and leave the error as it is."""
    theirs = None
    try:
        theirs = exchange()
        if isinstance(theirs, Exchange):
            theirs.tell(error)
        elif theirs is Silence.UNKNOWN_SIZE:
            _unheard(group)
    except Exception as why:
        if not (isinstance(theirs, Exchange) and theirs.number):
            _unheard(group)
        logging.getLogger("kernel_fun").warning(
            "kernel-fun: the other ranks of the context-parallel group were not told of %s (%s: %s)",
            type(error).__name__, type(why).__name__, why,
        )  # fmt: skip


def unbound(kwargs: dict[str, Any]) -> None:
    """Count a call that Python refused: it never came to :func:`failing`."""
    _unheard(getattr(kwargs.get("cp_context"), "group", None))


def _unheard(group: Any) -> None:
    """Count a failure that the other ranks of a group do not hear of."""
    import torch.distributed as dist

    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        _past(group).unheard += 1


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


def _pinned(data: bytearray, like: Tensor) -> Tensor:
    """Bytes in the host's memory; the host need not wait for a copy to where ``like`` lies."""
    import torch

    found = torch.frombuffer(data, dtype=torch.uint8)
    return found.pin_memory() if like.is_cuda else found


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

"""The one collective of a context-parallel operation: an all-gather that also tells of failures.

A rank that raised before its turn still takes part: it sends its error instead of data, and every rank
raises. So does a call that differs between ranks. Each rank's message is a header of 64 bytes and the data.
A rank that fails after it has sent is missed only in the next collective, for as long as the group's timeout.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from kernel_fun._common import context_parallel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernel_fun._common.context_parallel import Split

HEADER = 64
"""Bytes before the data: eight int64 words, so that the data stays aligned."""
OK, FAILED = 0, 1


class PeerFailure(RuntimeError):
    """Another rank of the group raised, or called something else."""


class Exchange:
    """An all-gather of one tensor per rank, in flight between :meth:`send` and :meth:`receive`.

    ``what`` names the operation and its direction; it, the shape, the dtype, ``agreed`` and the context must
    be the same on every rank. Messages of different sizes no collective can compare: its backend refuses
    them or aborts.
    """

    def __init__(
        self,
        split: Split,
        what: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        agreed: tuple[Any, ...] = (),
    ) -> None:
        import torch

        self._split, self._what = split, what
        self._shape, self._dtype, self._device = shape, dtype, device
        self._call = zlib.crc32(repr((what, shape, str(dtype), agreed)).encode())
        self._bytes = torch.Size(shape).numel() * dtype.itemsize
        self._sent = False

    @contextlib.contextmanager
    def or_tell(self) -> Generator[None]:
        """An exception in the block, before :meth:`send`, reaches every rank, and then its caller."""
        try:
            yield
        except Exception as error:
            if not self._sent:
                self.tell(error)
            raise

    def send(self, data: Tensor) -> None:
        """Start the all-gather; does not wait for it."""
        import torch

        self._start(OK, data.contiguous().view(-1).view(torch.uint8))

    def tell(self, error: Exception) -> None:
        """Take part with an error in place of the data."""
        import torch

        text = f"{type(error).__name__}: {error}".encode()[: self._bytes]
        data = torch.zeros(self._bytes, dtype=torch.uint8)
        data[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        self._start(FAILED, data, len(text))
        self._wait()

    def receive(self) -> Tensor:
        """Wait: the data of every rank, ``[ranks, *shape]``, or the same exception on every rank."""
        self._wait()
        # the host reads the headers here: on a GPU it waits for the gather
        headers = self._all[:, :HEADER].cpu().contiguous().view(_int64()).tolist()
        failed = [r for r, header in enumerate(headers) if header[0] != OK]
        if failed:
            text = bytes(self._all[failed[0], HEADER : HEADER + headers[failed[0]][1]].cpu().tolist())
            raise PeerFailure(
                f"{self._what}: rank {failed[0]} of the context-parallel group raised "
                f"{text.decode(errors='replace')}"
            )
        for word, what in ((2, "other arguments (shapes, dtypes, gradients)"), (3, "another context")):
            values = [header[word] for header in headers]
            strange = [
                r for r, value in enumerate(values) if 0 not in (value, values[0]) and value != values[0]
            ]
            if strange:
                raise PeerFailure(
                    f"{self._what}: rank {strange[0]} of the context-parallel group called with {what} than "
                    f"rank 0, or called something else"
                )
        data = self._all[:, HEADER:].view(self._dtype).view(self._split.ranks, *self._shape)
        return data.to(self._device)

    def _start(self, status: int, data: Tensor, text: int = 0) -> None:
        import torch
        import torch.distributed as dist

        self._sent = True
        words = [status, text, self._call, self._split.fingerprint, 0, 0, 0, 0]
        header = torch.tensor(words, dtype=torch.int64).view(torch.uint8)
        carrier = _carrier(self._split, self._device)
        self._mine = torch.cat((header.to(carrier), data.to(carrier)))
        ranks = self._split.ranks
        if ranks == 1:
            self._all, self._work = self._mine[None], None
            return
        self._all = self._mine.new_empty(ranks, self._mine.numel())
        library: Any = dist  # the collective has its new name since torch 2.13
        gather = getattr(library, "all_gather_single", None) or library.all_gather_into_tensor
        self._work = gather(self._all.view(-1), self._mine, group=self._split.group, async_op=True)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


@contextlib.contextmanager
def failing(context: Any, exchange: Callable[[Split], Exchange | None]) -> Generator[None]:
    """Around what comes before an operation's exchange: an exception in it reaches every rank of the group.

    ``exchange`` makes the one that the other ranks wait in, or None where the arguments do not tell its size.
    A mistake in the context itself, which may be None, is raised without a word to the others: they make the
    same.
    """
    split = None if context is None else context_parallel.read(context)
    try:
        yield
    except Exception as error:
        theirs = None if split is None else exchange(split)
        if theirs is not None:
            theirs.tell(error)
        raise


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
    """Where messages lie: gloo's go through the host, whatever device they come from."""
    import torch
    import torch.distributed as dist

    through_host = split.ranks > 1 and dist.get_backend(split.group) == "gloo"
    return torch.device("cpu") if through_host else device


def _int64() -> torch.dtype:
    import torch

    return torch.int64

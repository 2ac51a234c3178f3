"""Calls that were bound and planned before: what depends on no value is not worked out twice.

Checks, problem and plan of a call follow from the types, shapes, dtypes and devices of its tensors, from its
other arguments, the grad mode and the environment's switches. A call that repeats all of these takes the
answer over, and with it the notes of the calls before it (:mod:`kernel_fun._common.notes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernel_fun._common import config

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

Answer = TypeVar("Answer")

LIMIT = 512
"""Signatures an operation keeps; beyond it all are forgotten, so that ever new sizes keep no memory."""

_PLAIN = frozenset({bool, int, float, str, type(None)})
_all: list[Known[Any]] = []


class Known(Generic[Answer]):
    """The answers of one operation by signature. They hold no tensor."""

    def __init__(self, policy: tuple[config.Switch, ...]) -> None:
        """``policy``: the switches its plans depend on."""
        self._policy = policy
        self._answers: dict[Hashable, Answer] = {}
        _all.append(self)

    def signature(
        self, tensors: Iterable[Any], others: tuple[Any, ...], place: Hashable = None
    ) -> Hashable | None:
        """All that a plan may depend on; None where an argument is not of a plain kind, and where
        tensors may carry tangents.

        ``tensors``: the tensors, each or None, in a fixed order. ``others``: all other arguments, likewise.
        ``place``: what of a batch the call has, where it is not all of it.
        """
        kinds = tuple([type(value) for value in others])  # True is 1, and 1 a number
        if not _PLAIN.issuperset(kinds) or forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
            return None
        facts: list[Any] = []
        try:
            for t in tensors:
                if t is None:
                    facts.append(None)
                elif isinstance(t, Tensor):
                    facts += (type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad)
                else:
                    return None
        except RuntimeError:  # a layout without strides
            return None
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return modes, kinds, others, place, config.words(self._policy), tuple(facts)

    def recall(self, signature: Hashable | None) -> Answer | None:
        """The answer of a signature seen before."""
        return None if signature is None else self._answers.get(signature)

    def keep(self, signature: Hashable | None, answer: Answer) -> None:
        """Remember an answer."""
        if signature is None:
            return
        if len(self._answers) >= LIMIT:
            self._answers.clear()
        self._answers[signature] = answer

    def __len__(self) -> int:
        return len(self._answers)

    def forget(self) -> None:
        self._answers.clear()


def forget() -> None:
    """Forget every signature of every operation."""
    for known in _all:
        known.forget()

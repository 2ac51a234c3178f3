"""Training text as bytes: a file, or the English documentation that every CPython ships."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator, Tensor

#: The last twentieth of the text is never trained on.
HELD_OUT = 0.05


@dataclass(frozen=True)
class Text:
    """A text split into a training part and a held-out part, both uint8 `[bytes]`."""

    name: str
    train: Tensor
    held_out: Tensor

    def batch(self, B: int, T: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """`B` random windows of the training part: inputs and next bytes, int64 `[B, T]`."""
        import torch

        starts = torch.randint(len(self.train) - T, (B, 1), generator=generator)
        windows = self.train[starts + torch.arange(T + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def held_out_windows(self, T: int, at_most: int) -> tuple[Tensor, Tensor]:
        """Up to `at_most` disjoint windows, spread evenly over the held-out part, `[B, T]`."""
        import torch

        available = (len(self.held_out) - 1) // T
        count = min(at_most, available)
        starts = torch.arange(count)[:, None] * (available // count * T)
        windows = self.held_out[starts + torch.arange(T + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def load(path: Path | None, *, window: int) -> Text:
    """Reads `path`, or the documentation topics of the running CPython when it is None.

    Raises ValueError if the text is too short to hold out one window of `window` bytes.
    """
    import torch

    name, raw = _python_topics() if path is None else (str(path), path.read_bytes())
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0)
    cut = len(raw) - max(int(len(raw) * HELD_OUT), window + 1)
    if cut < window + 1:
        raise ValueError(
            f"`--text` must hold at least {2 * (window + 1)} bytes (a window of {window} to train "
            f"on and one to hold out), got {len(raw)} in {name}"
        )
    return Text(name, data[:cut], data[cut:])


def _python_topics() -> tuple[str, bytes]:
    import platform
    from pydoc_data.topics import topics

    name = f"pydoc_data.topics of CPython {platform.python_version()}"
    return name, "\n\n".join(topics[key].strip() for key in sorted(topics)).encode()

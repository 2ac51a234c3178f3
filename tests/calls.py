"""Counts the calls that our own Python makes: a cost of the host that does not depend on the machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kernel_fun

OURS = str(Path(kernel_fun.__file__).parent)


def calls_of(function: Callable[[], Any]) -> Counter[str]:
    """Calls of our Python functions, and calls that they make of built-in ones."""
    seen: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            seen["python"] += 1
        elif event == "c_call" and frame.f_code.co_filename.startswith(OURS):
            seen["built in"] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen

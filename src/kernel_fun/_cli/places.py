"""Places that commands write to, as flags name them."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


def named(text: str) -> Path:
    """The type of a flag."""
    if not text:  # an unset variable of a shell, not the current directory
        raise argparse.ArgumentTypeError("must name a place, got ''")
    return Path(text)


def check(flag: str, path: Path, *, is_file: bool, replaces: bool) -> None:
    """Make the folder; ValueError where nothing can be written, or what must not be replaced is there."""
    try:
        folder = path.parent if is_file else path
        folder.mkdir(parents=True, exist_ok=True)
        if is_file and (path.is_symlink() or path.exists()) and not (replaces and path.is_file()):
            raise ValueError(f"`{flag}` must name a new file, got {path}, which is there")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"`{flag}` must be where files can be written, got {path}: {error.strerror}"
        ) from None

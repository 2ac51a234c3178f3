"""A compile cache of its own for every test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, not created yet."""
    path = tmp_path / "kernels"
    monkeypatch.setenv("KERNEL_FUN_CACHE_DIR", str(path))
    return path

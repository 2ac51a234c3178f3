"""Launch configs that a search of fla chose once on an H200: a baseline then costs seconds, not minutes."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parent / "data"


def archives() -> list[Path]:
    """What Triton's search left; none in an installed wheel."""
    return sorted(KEPT.glob("fla-*.tar.xz"))


@contextmanager
def kept_configs(kept: Sequence[Path], H: int, V: int, *, exactly: bool) -> Generator[Path]:
    """Within the block fla, which must not be imported yet, takes launch configs of the archives. Yields the
    folder it reads. Kernels that are in no archive are searched as ever.

    Args:
        exactly: every call gets what was chosen for it, and one that was not kept what was chosen for a call
            of H heads and V columns. Otherwise a kernel has one config, the best of such a call.
    """
    best: dict[str, tuple[tuple[bool, bool], dict[str, Any]]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for archive in kept:
        with tarfile.open(archive) as held:
            for member in held.getmembers():
                kernel, _, kind = Path(member.name).name.partition(".")
                content = held.extractfile(member) if kind == "autotune.json" else None
                if content is None:
                    continue
                found = json.load(content)
                likeness = H in found["key"], 2 * V not in found["key"]
                fastest, _ = min(found["configs_timings"], key=lambda pair: pair[1])
                if kernel not in best or likeness > best[kernel][0]:
                    best[kernel] = likeness, fastest
                if all(likeness):
                    entry = {"autotune_key": found["key"], "config": fastest}
                    entries.setdefault(kernel, {})[_digest(found["key"])] = entry
    before = {name: os.environ.get(name) for name in ("FLA_CONFIG_DIR", "FLA_CACHE_MODE")}
    with tempfile.TemporaryDirectory() as folder:
        for kernel, (_, chosen) in best.items():
            known = {"autotune_entries": entries.get(kernel, {})} if exactly else {}
            (Path(folder) / f"{kernel}.json").write_text(json.dumps({**known, "default_config": chosen}))
        os.environ.update(FLA_CONFIG_DIR=folder, FLA_CACHE_MODE="full" if exactly else "default")
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _digest(key: Any) -> str:
    """As fla names an entry."""
    return hashlib.md5(json.dumps(key, separators=(",", ":"), sort_keys=True).encode()).hexdigest()

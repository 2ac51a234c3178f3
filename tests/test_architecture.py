"""Rules of the tree that no other tool checks."""

from __future__ import annotations

import re
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "kernel_fun"


def files_matching(pattern: str) -> set[str]:
    found = re.compile(pattern)
    return {str(p.relative_to(SRC)) for p in SRC.rglob("*.py") if found.search(p.read_text())}


def test_environment_is_read_in_one_place():
    assert files_matching(r"os\.environ|getenv") <= {"_common/config.py"}


def test_capability_is_read_in_one_place():
    assert files_matching(r"get_device_capability|get_device_properties") <= {"_common/device.py"}


def test_fla_is_imported_only_where_calls_are_delegated():
    allowed = {"kda/fallback.py", "cconv/fallback.py", "bench/peers.py"}
    assert files_matching(r"^\s*(import fla\b|from fla\b)") <= allowed


def test_only_cute_names_the_dsl():
    names = files_matching(r"^\s*(import cutlass|from cutlass)")
    assert all(n.startswith("_cute/") or "_kernels/sm" in n for n in names), names


def test_every_package_has_a_docstring():
    bare = [str(p) for p in SRC.rglob("*.py") if not p.read_text().lstrip().startswith(('"""', 'r"""'))]
    assert not bare

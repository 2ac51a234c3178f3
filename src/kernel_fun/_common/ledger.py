"""The ledger: which GPU kernels passed the GPU tests, and from which sources they were traced then.

CI has no GPU, so what ran on one is written down. A family's ``_provenance.py`` holds one entry a stage; the
dispatcher gives a call to a stage without an entry only where the environment forces its backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernel_fun._common import cache


@dataclass(frozen=True)
class Verified:
    """One stage that passed."""

    sources: Mapping[str, str]
    """sha256 of each module its kernels are traced from, by dotted name."""
    gpu: str
    utc: str
    versions: Mapping[str, str]


def unverified(entries: Mapping[str, Verified], stage: str) -> str | None:
    """Why a stage may not serve unasked, or None."""
    if stage in entries:
        return None
    return "not verified: no entry in the ledger of kernels that passed the GPU tests"


def sources(modules: Sequence[str]) -> dict[str, str]:
    """sha256 of each module that the kernels of some modules are traced from, by dotted name."""
    found = {name: digest for module in modules for name, digest in cache.sources(module).items()}
    return dict(sorted(found.items()))


def drift(entries: Mapping[str, Verified], kernels: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Stages whose sources are not those that passed, and the modules that differ.

    ``kernels``: modules of each stage's kernels by name. A stage that never passed names all its modules.
    """
    found: dict[str, list[str]] = {}
    for stage, modules in kernels.items():
        now = sources(modules)
        then = entries[stage].sources if stage in entries else {}
        changed = sorted(n for n in {*now, *then} if now.get(n) != then.get(n))
        if changed:
            found[stage] = changed
    return found


def text(family: str, entries: Mapping[str, Verified]) -> str:
    """The source of a family's ``_provenance.py``."""
    lines = [
        f'"""{family}\'s ledger: the kernels that passed the GPU tests. Written by `kernel-fun verify`."""',
        "",
        "from __future__ import annotations",
        "",
        "from kernel_fun._common.ledger import Verified",
        "",
        "VERIFIED: dict[str, Verified] = {",
    ]
    for stage, entry in entries.items():
        lines += [f'    "{stage}": Verified(', "        sources={"]
        lines += [f'            "{name}": "{digest}",' for name, digest in sorted(entry.sources.items())]
        lines += ["        },", f'        gpu="{entry.gpu}",', f'        utc="{entry.utc}",']
        lines += ["        versions={"]
        lines += [f'            "{name}": "{version}",' for name, version in sorted(entry.versions.items())]
        lines += ["        },", "    ),"]
    return "\n".join([*lines, "}", ""]) if entries else "\n".join([*lines[:-1], lines[-1] + "}", ""])

"""Verbatim delegation to fla: the one file that imports its KDA."""

from __future__ import annotations

from typing import Any


def chunk_kda(arguments: dict[str, Any]) -> Any:
    """fla's chunk_kda on the caller's own arguments. What the installed version does not know is left out
    only where it holds its default, so nothing is lost."""
    import fla.ops.kda as ops  # pyright: ignore

    return _call(ops.chunk_kda, arguments)  # pyright: ignore


def fused_recurrent_kda(arguments: dict[str, Any]) -> Any:
    """fla's fused_recurrent_kda on the caller's own arguments."""
    import fla.ops.kda as ops  # pyright: ignore

    return _call(ops.fused_recurrent_kda, arguments)  # pyright: ignore


def _call(function: Any, arguments: dict[str, Any]) -> Any:
    from kernel_fun._common.compat import accepted_by

    return function(**accepted_by(function, arguments))

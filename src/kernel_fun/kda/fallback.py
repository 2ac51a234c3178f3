"""Verbatim delegation to fla: the one file that imports its KDA."""

from __future__ import annotations

from typing import Any

from kernel_fun._common import compat


def chunk_kda(arguments: dict[str, Any]) -> Any:
    """fla's chunk_kda on the caller's own arguments. What the installed version does not know is left out
    only where it holds its default, so nothing is lost."""
    return _call(compat.CHUNK_KDA, arguments)


def fused_recurrent_kda(arguments: dict[str, Any]) -> Any:
    """fla's fused_recurrent_kda on the caller's own arguments."""
    return _call(compat.FUSED_RECURRENT_KDA, arguments)


def _call(op: compat.FlaOp, arguments: dict[str, Any]) -> Any:
    function = compat.function_of(op)
    if function is None:
        raise RuntimeError(f"the installed fla has no {op.module}.{op.name}")
    return function(**compat.accepted_by(function, arguments))

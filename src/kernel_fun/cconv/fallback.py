"""Verbatim delegation to fla: the one file that imports its convolution."""

from __future__ import annotations

from typing import Any

from kernel_fun._common import compat
from kernel_fun.cconv.dispatch import CAUSAL_CONV1D, CAUSAL_CONV1D_UPDATE


def causal_conv1d(arguments: dict[str, Any]) -> Any:
    """fla's causal_conv1d on the caller's own arguments."""
    return _function(CAUSAL_CONV1D)(**arguments)


def causal_conv1d_update(arguments: dict[str, Any]) -> Any:
    """fla's causal_conv1d_update on the caller's own arguments. fla shifts only a contiguous cache in place,
    so another is shifted through a copy."""
    cache = arguments["cache"]
    contiguous = cache.contiguous()
    y, _ = _function(CAUSAL_CONV1D_UPDATE)(**{**arguments, "cache": contiguous})
    if contiguous is not cache:
        cache.copy_(contiguous)
    return y, cache


def _function(op: compat.FlaOp) -> Any:
    function = compat.function_of(op)
    if function is None:
        raise RuntimeError(f"the installed fla has no {op.module}.{op.name}")
    return function

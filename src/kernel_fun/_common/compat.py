"""The fla contract as data: which versions were tested, which symbols and keywords we rely on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernel_fun._common import support

FLA_TESTED = ("0.6.0",)
TORCH_TESTED = ("2.11.0", "2.13.0")


@dataclass(frozen=True)
class FlaOp:
    """One fla function a call can be delegated to."""

    module: str
    name: str
    parameters: tuple[str, ...]
    """Named parameters of the tested version, in order."""
    keywords: tuple[str, ...] = ()
    """What it reads from its ``**kwargs``."""


CHUNK_KDA = FlaOp(
    "fla.ops.kda",
    "chunk_kda",
    (
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
        "safe_gate", "lower_bound", "disable_recompute", "return_intermediate_states", "state_v_first",
        "cu_seqlens", "cu_seqlens_cpu", "cp_context", "use_graph", "max_num_seqs",
    ),
    ("A_log", "dt_bias", "chunk_size", "transpose_state_layout"),
)  # fmt: skip
FUSED_RECURRENT_KDA = FlaOp(
    "fla.ops.kda",
    "fused_recurrent_kda",
    (
        "q", "k", "v", "g", "beta", "A_log", "dt_bias", "scale", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
        "lower_bound", "state_v_first", "cu_seqlens",
    ),
    ("transpose_state_layout",),
)  # fmt: skip
FLA_OPS = (CHUNK_KDA, FUSED_RECURRENT_KDA)


ORIGINAL = "__kernel_fun_original__"
"""Attribute by which a function under a name of fla's (see ``kernel_fun.fla.patch``) holds fla's own."""


def function_of(op: FlaOp) -> Callable[..., Any] | None:
    """The installed fla function, also where its name is rebound, or None where fla lacks it. Imports fla."""
    import importlib

    try:
        function = getattr(importlib.import_module(op.module), op.name)
    except (ImportError, AttributeError):
        return None
    return getattr(function, ORIGINAL, function)


def keywords(op: FlaOp) -> frozenset[str] | None:
    """Every keyword the installed fla function knows: what it names and what it reads of its kwargs."""
    function = function_of(op)
    return None if function is None else frozenset(_named(function)) | frozenset(op.keywords)


def _named(function: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(n for n, p in inspect.signature(function).parameters.items() if p.kind in kinds)


def accepted_by(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those an older fla does not name and that hold None or False.

    TypeError where such an argument holds anything else: it would be lost without a word.
    """
    known = set(_named(function)) | {k for op in FLA_OPS for k in op.keywords}
    passed: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in known:
            passed[name] = value
        elif value is not None and value is not False:
            raise TypeError(
                f"fla-core {support.version_of('fla-core')} does not know `{name}`, got {value!r}"
            )
    return passed


def check_fla() -> str | None:
    """Compare the installed fla with the contract: None if it holds or fla is absent, else a sentence."""
    if support.missing("fla") is not None:
        return None
    return next((found for op in FLA_OPS if (found := difference(op)) is not None), None)


def difference(op: FlaOp) -> str | None:
    """Where the installed fla function departs from the one that was tested: None, or a sentence."""
    function = function_of(op)
    if function is None:
        return f"fla-core {support.version_of('fla-core')} has no {op.module}.{op.name}"
    named = _named(function)
    if named[: len(op.parameters)] == op.parameters:
        return None
    first = next((i for i, n in enumerate(op.parameters) if named[i : i + 1] != (n,)), 0)
    return (
        f"{op.module}.{op.name} of fla-core {support.version_of('fla-core')} has "
        f"{named[first] if first < len(named) else 'nothing'!r} where {op.parameters[first]!r} was "
        f"tested (versions tested: {', '.join(FLA_TESTED)})"
    )

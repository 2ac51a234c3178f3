"""What each stage launches: what its entry in the ledger stands for."""

from __future__ import annotations

from kernel_fun.kda._kernels import sm90

_PACKINGS = "kernel_fun._cute.packing"
_SEGMENTS = tuple(f"kernel_fun.kda._kernels.sm90.segment_{what}" for what in ("states", "tables"))
_BESIDE = {"fwd_state": _SEGMENTS, "bwd_state": _SEGMENTS}

KERNELS = {stage: (own, _PACKINGS, *_BESIDE.get(stage, ())) for stage, own in sm90.KERNELS.items()}
"""Modules of a stage's kernels, its own first."""

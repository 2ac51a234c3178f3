"""Kimi Delta Attention."""

from kernel_fun._common.context_parallel import ContextParallel, build_cp_context
from kernel_fun._common.exchange import PeerFailure
from kernel_fun.kda.ops import chunk_kda, fused_recurrent_kda, is_supported, warmup

__all__ = [
    "ContextParallel",
    "PeerFailure",
    "build_cp_context",
    "chunk_kda",
    "fused_recurrent_kda",
    "is_supported",
    "warmup",
]

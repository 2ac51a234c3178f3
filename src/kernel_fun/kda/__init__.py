"""Kimi Delta Attention."""

from kernel_fun.kda.ops import chunk_kda, fused_recurrent_kda, is_supported, warmup

__all__ = ["chunk_kda", "fused_recurrent_kda", "is_supported", "warmup"]

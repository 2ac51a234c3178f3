"""The short causal convolution of linear-attention layers."""

from kernel_fun.cconv.ops import causal_conv1d, causal_conv1d_update, is_supported, warmup

__all__ = ["causal_conv1d", "causal_conv1d_update", "is_supported", "warmup"]

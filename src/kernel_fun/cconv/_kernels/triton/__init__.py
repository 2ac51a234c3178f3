"""Triton kernels of the short convolution, for NVIDIA GPUs."""

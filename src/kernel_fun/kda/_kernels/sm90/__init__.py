"""CuTe kernels for Hopper."""

"""The CuTe vocabulary of the GPU kernels: the only package that names cutlass internals."""

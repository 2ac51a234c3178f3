"""Device verbs shared by the Triton kernels of every family."""

"""Kernels of the KDA stages, one package per backend."""

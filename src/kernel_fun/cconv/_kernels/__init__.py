"""Implementations of the stages, one package per backend."""

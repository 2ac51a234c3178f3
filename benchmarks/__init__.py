"""Shapes, inputs and floors of what is benchmarked, and the records in `results/`."""

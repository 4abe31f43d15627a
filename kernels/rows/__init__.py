"""Kernels that work row by row: norms, activations, cache writes, products of fixed order."""

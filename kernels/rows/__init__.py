"""Kernels that compute each row alone: norms, activations, KV writes, FP8, products with a fixed order of additions."""

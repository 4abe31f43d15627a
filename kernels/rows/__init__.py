"""Kernels that compute each row alone: norms, activations, KV writes, FP8, GEMMs with a fixed order of additions."""

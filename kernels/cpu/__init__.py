"""Kernels for the CPU: compiled C (`native/`) with its wrappers, and torch versions for machines without a compiler."""

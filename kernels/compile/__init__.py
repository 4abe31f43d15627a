"""Compilation of the kernels without a GPU, and repairs of Triton's interpreter."""

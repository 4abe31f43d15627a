"""Compiling kernels without a GPU, and Triton's interpreter."""

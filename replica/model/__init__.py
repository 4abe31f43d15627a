"""A model's modules: loading them, their attention and their forward pass."""

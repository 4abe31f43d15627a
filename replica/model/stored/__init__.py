"""Tensors of safetensors files: list, name, cut, read and decode them."""

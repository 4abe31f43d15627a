"""Checkpoint files: shape of the model and stored tensors, read before any weight is loaded. Without torch."""

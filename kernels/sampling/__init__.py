"""Kernels that turn rows of logits into tokens and log-probabilities."""

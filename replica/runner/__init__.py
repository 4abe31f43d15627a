"""Executes one step on a device: inputs, forward pass, sampling, outputs."""

"""One step on a device: inputs, work, outputs."""

"""All that only a CPU runs: compiled C with its wrappers, and the same in torch."""

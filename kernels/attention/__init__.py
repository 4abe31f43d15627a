"""Paged attention: the plan of a step's work, and the decode and prefill kernels that follow it."""

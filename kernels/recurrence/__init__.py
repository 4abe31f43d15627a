"""Kernels of recurrent layers: short convolutions and state scans, with states in slots."""

"""Faults on demand, for tests."""

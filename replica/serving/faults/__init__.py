"""Injected faults, for tests."""

"""Captured graphs of steps, and which steps have one."""

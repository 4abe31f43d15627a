"""Tests and measurements."""

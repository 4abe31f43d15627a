"""Paged attention: work lists, decode, prefill."""

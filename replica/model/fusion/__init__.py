"""Replaces a model's modules by fused ones, found by structure and kept only if results agree."""

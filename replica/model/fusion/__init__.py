"""Fused modules in the place of a model's own, found by structure and kept after proof."""

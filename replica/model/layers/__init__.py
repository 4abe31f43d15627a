"""Layers that Quire puts into a model in place of transformers' own, and what else changes a layer."""

"""Low-rank adapters: many of them in one product, by row."""

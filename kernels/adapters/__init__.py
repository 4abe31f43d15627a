"""Low-rank adapters by row: many in one product."""

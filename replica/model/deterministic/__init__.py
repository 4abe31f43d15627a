"""Batch-invariant matrix products: a row has the same bits in every batch."""

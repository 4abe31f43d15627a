"""`quire bench`: load, offline batches, comparisons."""

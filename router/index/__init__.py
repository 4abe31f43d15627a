"""Which replica holds which block, from the replicas' own reports."""

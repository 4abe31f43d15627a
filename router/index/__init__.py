"""Which replica holds which block, by the replicas' own reports."""

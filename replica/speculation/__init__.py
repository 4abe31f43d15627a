"""Sources of drafts for speculative decoding, and how many tokens they draft. No torch."""

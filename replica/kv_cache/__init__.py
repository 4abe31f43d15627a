"""Which request owns which block, and which blocks the prefix cache knows. No torch."""

"""Products whose rows have the same bits in every batch."""

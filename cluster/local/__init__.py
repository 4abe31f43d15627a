"""`quire serve`: a Ray of its own on this machine."""

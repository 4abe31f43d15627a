"""The start of an engine: sizing, measuring memory, loading."""

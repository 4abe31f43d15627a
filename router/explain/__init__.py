"""Routing decisions: kept in memory, logged to disk, replayed with another policy."""

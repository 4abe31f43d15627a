"""Scores replies to questions about one conversation."""

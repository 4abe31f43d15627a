"""Requests that generate nothing: scores of replies to questions, and embeddings."""

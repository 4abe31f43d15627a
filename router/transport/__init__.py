"""Calls to replicas and the streams that come back."""

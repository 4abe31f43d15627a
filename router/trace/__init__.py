"""Traces of requests: spans as plain data, from numbers that the router knows anyway."""

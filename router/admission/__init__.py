"""Admission: which requests wait at the router, how long, and in which order they are sent."""

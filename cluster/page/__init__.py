"""The live page of a router."""

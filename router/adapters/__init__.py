"""The names of adapters that requests may use."""

"""Routes that load and unload adapters."""

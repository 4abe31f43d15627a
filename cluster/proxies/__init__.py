"""Settings of Ray Serve's processes, and changes to its proxies."""

"""Keys, what each may do, its quotas and the bill of its requests."""

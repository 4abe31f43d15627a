"""KV blocks move from the pool of one node to the pool of another; imports no torch and no ray."""

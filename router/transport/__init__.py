"""Transport: calls to replicas, and the streams of their output. The only folder of the router that uses Ray."""

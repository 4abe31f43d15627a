"""What is asked of an engine or a server, and the clients that ask: workloads, load generator, occupancy."""

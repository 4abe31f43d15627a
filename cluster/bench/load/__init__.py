"""Workloads, load generators and clients for engines and servers."""

"""Routing policies: functions from a request and a view of the fleet to a ranking of the replicas."""

"""Columns of the running requests, as the scheduler fills them and a step reads them. No torch."""

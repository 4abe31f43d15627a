"""From the records of a run to numbers, JSON, tables and plots."""

"""The ranks of a tensor-parallel replica: a leader that plans, and followers that execute its steps."""

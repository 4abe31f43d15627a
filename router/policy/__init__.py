"""Where a request goes: pure functions over a view of the fleet."""

"""How far requests may overtake one another: the same bounds in the router's queue and the replica's."""

from __future__ import annotations

# A request is overtaken only by requests that arrive within this many times the seconds by which its prefill takes
# longer than theirs.
AGEING = 4.0
# Of this many requests that start in a row, at least one is the one that has waited longest, whatever the priorities.
OLDEST_EVERY = 8

"""Bounds on how far requests may overtake one another. The router's queue and the replica's queue share them."""

from __future__ import annotations

# A later request may overtake an earlier one only if it arrives within this many times the seconds by which the earlier
# one's prefill takes longer.
AGEING = 4.0
# Among this many consecutive starts, at least one is of the request that has waited longest, with any priorities.
OLDEST_EVERY = 8

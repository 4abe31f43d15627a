"""Chooses the replicas that only compute prompts, for the policy `disaggregated`.

```
 replicas by the hash of their names   c   a   e   b   d        share 0.4: c and a
                                       └ prefill ┘ └ decode ┘
```

All routers choose the same ones, because they see the same replicas. A replica that joins or leaves changes the role of
at most one other, or of two where the size changes too.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from quire.router.fleet.block_peers import BlockPeers
from quire.router.policy.fleet_view import PrefillRows


class PrefillPool:
    """The replicas that only compute prompts.

    Parameters
    ----------
    peers
        Knows where blocks can travel.

    Attributes
    ----------
    share
        Fraction of the replicas, but at least one, and not all; 0: none.
    """

    def __init__(self, peers: BlockPeers):
        self.share = 0.0
        self._peers = peers

    def members(self, ready: Sequence[str]) -> frozenset[str]:
        """Choose among the replicas that take requests."""
        if self.share <= 0 or len(ready) < 2:
            return frozenset()
        size = min(max(1, round(self.share * len(ready))), len(ready) - 1)
        return frozenset(sorted(ready, key=_place)[:size])

    def rows(self, names: Sequence[str], ready: Sequence[str], now_s: float) -> PrefillRows | None:
        """Which replicas of a view only compute prompts; None: none does.

        A replica whose blocks can reach no replica that decodes computes and decodes as without a pool.

        Parameters
        ----------
        names
            The replicas of the view.
        ready
            All replicas with the request's weights that take requests.
        """
        members = self.members(ready)
        others = [name for name in ready if name not in members]
        copies_s = {name: self._peers.copy_s_per_token(name, others, now_s) for name in members}
        seconds = [copies_s.get(name) for name in names]
        is_prefill = np.array([one is not None for one in seconds], bool)
        if not is_prefill.any():
            return None
        return PrefillRows(is_prefill, np.array([one or 0.0 for one in seconds]))


@functools.lru_cache(4096)
def _place(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()

"""Which slots are evicted: those of the payer that has most, the one used longest ago first.

The rule is that of `FairLeastRecentlyUsed` (`kv_cache/block_eviction.py`), computed from columns: a payer with many
prompts cannot evict the blocks of all others, and every 16th eviction takes the oldest of all.
"""

from __future__ import annotations

import heapq

import numpy as np

_OLDEST_EVERY = 16


def choose_victims(
    candidates: np.ndarray, used: np.ndarray, payer: np.ndarray, count: int, num_evicted: int
) -> np.ndarray:
    """Choose at most `count` of the candidates.

    Parameters
    ----------
    candidates
        [n] int64 slots that may be evicted.
    used, payer
        [n] last use and payer of each.
    num_evicted
        Number of evictions so far.

    Returns
    -------
    [min(n, count)] int64 slots.
    """
    if len(candidates) <= count:
        return candidates
    if payer.min() == payer.max():
        return candidates[np.argpartition(used, count - 1)[:count]]
    order = np.argsort(used, kind="stable")
    _, payer_of, counts = np.unique(payer[order], return_inverse=True, return_counts=True)
    # Indices into `order` of each payer's candidates, oldest first.
    own = np.split(np.argsort(payer_of, kind="stable"), np.cumsum(counts)[:-1])
    taken = np.zeros(len(order), bool)
    begin = [0] * len(own)
    left = [(-len(indices), p) for p, indices in enumerate(own)]
    heapq.heapify(left)
    oldest, chosen = 0, []
    for number in range(num_evicted + 1, num_evicted + count + 1):
        while taken[oldest]:
            oldest += 1
        if number % _OLDEST_EVERY == 0:
            pick = oldest
        else:
            # The heap's first payer may have lost candidates to the other rule since it was pushed.
            while -left[0][0] != len(own[left[0][1]]) - begin[left[0][1]]:
                _, p = heapq.heappop(left)
                heapq.heappush(left, (begin[p] - len(own[p]), p))
            p = left[0][1]
            pick = int(own[p][begin[p]])
        taken[pick] = True
        # Each payer's candidates are taken oldest first, by both rules.
        begin[payer_of[pick]] += 1
        chosen.append(pick)
    return candidates[order[chosen]]

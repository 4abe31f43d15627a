"""The prefixes that recent requests have shared, with their tokens: what a replica that joins should hold.

The index of prefixes knows hashes only, and a replica needs tokens to name its blocks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from quire.protos.adapter_ref import AdapterRef
from quire.protos.routing_hash import ROUTING_BLOCK_TOKENS

_HORIZON_S = 60.0
_MAX_PREFIXES = 64
_MAX_TOKENS = 1 << 20  # of all of them, 4 bytes each
# Requests within the horizon that make a prefix popular; a conversation's next turn is not.
_LEAST_COUNT = 1.5


@dataclass(slots=True)
class PopularPrefix:
    """The beginning of several prompts.

    Attributes
    ----------
    hashes
        [tokens // `ROUTING_BLOCK_TOKENS`] uint64 routing hashes.
    token_ids
        [tokens] int32.
    tenant, adapter
        Whose blocks these are.
    weights
        `Hello.weights` of the replica that has computed it.
    count
        Requests that had it cached within the horizon, exponentially weighted, at `at_s`.
    """

    hashes: np.ndarray
    token_ids: np.ndarray
    tenant: str
    adapter: AdapterRef | None
    weights: str
    count: float
    at_s: float

    def with_one_more(self) -> np.ndarray:
        """[tokens + 1] int32: a prompt that begins with it."""
        return np.append(self.token_ids, self.token_ids[-1:])

    def count_at(self, now_s: float) -> float:
        return self.count * math.exp((self.at_s - now_s) / _HORIZON_S)


class PopularPrefixes:
    """Remembers at most `_MAX_PREFIXES`; the least recently used are dropped."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[int, PopularPrefix] = OrderedDict()
        self._num_tokens = 0

    def add(
        self,
        hashes: np.ndarray,
        prompt_ids: np.ndarray,
        num_cached: int,
        tenant: str,
        adapter: AdapterRef | None,
        weights: str,
        now_s: float,
    ) -> None:
        """Count a request that had its first `num_cached` tokens cached.

        Parameters
        ----------
        hashes, prompt_ids
            Of its whole prompt.
        """
        num_blocks = min(num_cached // ROUTING_BLOCK_TOKENS, len(hashes))
        num_tokens = num_blocks * ROUTING_BLOCK_TOKENS
        if not num_blocks or num_tokens > _MAX_TOKENS:
            return
        key = int(hashes[num_blocks - 1])
        prefix = self._prefixes.pop(key, None)
        if prefix is None:
            ids = prompt_ids[:num_tokens].astype(np.int32)
            prefix = PopularPrefix(hashes[:num_blocks].copy(), ids, tenant, adapter, weights, 0, 0)
            self._num_tokens += num_tokens
        prefix.count, prefix.at_s = prefix.count_at(now_s) + 1, now_s
        self._prefixes[key] = prefix
        while len(self._prefixes) > _MAX_PREFIXES or self._num_tokens > _MAX_TOKENS:
            _, dropped = self._prefixes.popitem(last=False)
            self._num_tokens -= len(dropped.token_ids)

    def best(self, now_s: float) -> list[PopularPrefix]:
        """The prefixes that several requests have shared, those first that save the most prefill."""
        shared = [p for p in self._prefixes.values() if p.count_at(now_s) >= _LEAST_COUNT]
        return sorted(shared, key=lambda p: -p.count_at(now_s) * len(p.token_ids))

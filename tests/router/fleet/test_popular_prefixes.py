"""Which prefixes a router remembers for replicas that join."""

from __future__ import annotations

import numpy as np

from quire.router.fleet import popular_prefixes
from quire.router.fleet.popular_prefixes import PopularPrefixes

TOKENS = np.arange(1000, dtype=np.int32)


def add(prefixes: PopularPrefixes, name: int, num_cached: int, now_s: float = 0.0) -> None:
    """A request whose prompt is named by its first hash."""
    hashes = np.arange(1, 16, dtype=np.uint64) + np.uint64(1000 * name)
    prefixes.add(hashes, TOKENS, num_cached, f"tenant {name}", None, "w", now_s)


def test_shared_prefixes_come_in_the_order_of_what_they_save():
    prefixes = PopularPrefixes()
    for name, num_cached, times in ((1, 130, 3), (2, 900, 2), (3, 640, 1), (4, 63, 9)):
        for _ in range(times):
            add(prefixes, name, num_cached)
    best = prefixes.best(0.0)
    assert [(p.tenant, len(p.token_ids), len(p.hashes)) for p in best] == [
        ("tenant 2", 896, 14),
        ("tenant 1", 128, 2),
    ]
    assert best[0].with_one_more().tolist() == [*range(896), 895]
    # One that was shared long ago is not popular any longer.
    assert prefixes.best(300.0) == []
    add(prefixes, 1, 130, 300.0)
    assert prefixes.best(300.0) == []


def test_memory_is_bounded_and_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(popular_prefixes, "_MAX_PREFIXES", 3)
    monkeypatch.setattr(popular_prefixes, "_MAX_TOKENS", 1024)
    prefixes = PopularPrefixes()
    for name in (1, 2, 3, 1, 4):
        add(prefixes, name, 128)
        add(prefixes, name, 128)
    assert {p.tenant for p in prefixes.best(0.0)} == {"tenant 1", "tenant 3", "tenant 4"}
    for _ in range(2):
        add(prefixes, 5, 960)
    assert [p.tenant for p in prefixes.best(0.0)] == ["tenant 5"]
    assert prefixes._num_tokens == 960

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.replica.kv_cache.blocks import IntegrityError
from quire.replica.scheduler.preemption import ReturnQueue, choose_preempted

ROWS = st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, unique_by=lambda r: r[0])


def request(arrival_index, num_tokens=10):
    return SimpleNamespace(
        key=f"r{arrival_index}", arrival_index=arrival_index, num_tokens=num_tokens, offloaded=None
    )


@given(ROWS, st.booleans())
def test_the_rule(rows, others_wait):
    arrivals = np.array([arrival for arrival, _ in rows])
    paused = np.array([is_paused for _, is_paused in rows])
    preempted = choose_preempted(arrivals, paused, others_wait)
    if paused.any():
        assert (arrivals[preempted], paused[preempted]) == (arrivals[paused].max(), True)
    else:
        assert arrivals[preempted] == (arrivals.max() if others_wait else arrivals.min())


@given(
    blocks=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    spare=st.integers(0, 10),
    starts=st.integers(1, 3),
)
def test_everyone_comes_to_an_end(blocks, spare, starts):
    """Requests that grow by a block a step in a pool that holds the largest of them, evicted and returned by the
    rule alone, without a margin: the worst case. What an evicted one had computed it keeps."""
    capacity = max(blocks) + spare
    have = dict.fromkeys(range(len(blocks)), 0)  # blocks computed
    waiting, returning, running = sorted(have), [], []
    for _ in range(20 * sum(blocks) + 20):
        room = capacity - sum(have[r] for r in running)
        growing = [r for r in running if have[r] < blocks[r]]
        evicted = False
        while len(growing) > capacity - sum(have[r] for r in running):
            at = choose_preempted(np.array(running), np.zeros(len(running), bool), bool(returning))
            assert not returning or running[at] != min(running) or len(running) == 1
            returning = sorted([*returning, running.pop(at)])
            growing = [r for r in running if have[r] < blocks[r]]
            evicted = True
        assert not evicted or growing, "an eviction for nothing"
        for r in growing:
            have[r] += 1
        running = [r for r in running if have[r] < blocks[r]]
        while not evicted and (queue := returning or waiting):
            room = capacity - sum(have[r] for r in running)
            if max(have[queue[0]], starts if not running else 1) > room and running:
                break
            running.append(queue.pop(0))
        if not (waiting or returning or running):
            return
    raise AssertionError(f"no end: {have} of {blocks} in {capacity}")


def test_preempted_requests_return_oldest_first_whatever_order_they_went_in():
    queue = ReturnQueue()
    requests = {i: request(i, num_tokens=10 + i) for i in (5, 1, 9, 3)}
    for r in requests.values():
        queue.append(r)
    assert [r.arrival_index for r in queue] == [1, 3, 5, 9]
    assert (queue.head(), len(queue), queue.num_tokens) == (requests[1], 4, 58)
    queue.remove(requests[3])
    assert [r.arrival_index for r in queue] == [1, 5, 9]
    assert queue.keys() == {"r1", "r5", "r9"}
    queue.check()
    queue._requests.reverse()
    with pytest.raises(IntegrityError, match="not in order of arrival"):
        queue.check()
    queue._requests.reverse()
    requests[5].num_tokens += 1
    with pytest.raises(IntegrityError, match="45 returning tokens"):
        queue.check()

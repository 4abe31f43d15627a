"""The load generator counts latency from the due time, and reports its own delay."""

from __future__ import annotations

import asyncio
import time

import pytest

from quire.cluster.bench.load.clients import Answer, RequestFailed
from quire.cluster.bench.load.load_generator import (
    Record,
    Run,
    closed_loop,
    open_loop,
    session_loop,
)
from quire.cluster.bench.load.workloads import TimedRequest
from quire.cluster.bench.results.measures import (
    Slo,
    hit_rate_over_time,
    max_in_flight,
    percentile,
    summarise,
)

SERVICE_S = 0.05


class SerialServer:
    """A server that answers one request at a time, with two tokens in a fixed time."""

    def __init__(self, token_ids: bool = True):
        self._lock = asyncio.Lock()
        self._token_ids = token_ids
        self.prompts: list[list[int]] = []
        self.retained: list[bool] = []
        self.most_at_once = self._now = 0

    async def complete(self, prompt_ids, max_tokens, session="", retain=False):
        self.prompts.append(list(prompt_ids))
        self.retained.append(retain)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        async with self._lock:
            await asyncio.sleep(SERVICE_S)
        self._now -= 1
        if prompt_ids[0] == 13:
            raise RequestFailed("status 429: full")
        now_s = time.perf_counter()
        ids = [7, 8] if self._token_ids else []
        return Answer([now_s, now_s + 0.01], [1, 1], ids, len(prompt_ids), 0)

    async def close(self):
        pass


def requests(*times_s, prompt=(1,)):
    return [TimedRequest(at_s, prompt, 2) for at_s in times_s]


def test_waiting_behind_others_counts_from_the_time_the_request_was_due():
    """All requests are due at once; a generator that waits for answers would report one service time for each."""
    run = asyncio.run(open_loop(SerialServer(), requests(*[0.0] * 6)))
    waits = sorted(record.ttft_s for record in run.records)
    for i, wait_s in enumerate(waits, 1):
        assert wait_s >= i * SERVICE_S * 0.95
    assert max(record.lag_s for record in run.records) < SERVICE_S


def test_a_stalled_generator_hides_nothing_and_says_so():
    class Blocking(SerialServer):
        async def complete(self, *args, **kwargs):
            if not self.prompts:
                time.sleep(0.3)  # the whole process stands still
            return await super().complete(*args, **kwargs)

    run = asyncio.run(open_loop(Blocking(), requests(0.0, 0.1)))
    second = max(run.records, key=lambda record: record.due_s)
    assert second.due_s == 0.1
    assert second.lag_s > 0.15
    assert second.ttft_s > second.arrivals_s[0] - second.sent_s + 0.15


def test_a_request_is_sent_at_its_time_and_not_before():
    run = asyncio.run(open_loop(SerialServer(), requests(0.2, 0.0, 0.1)))
    assert sorted(record.due_s for record in run.records) == [0.0, 0.1, 0.2]
    assert all(record.lag_s >= 0 for record in run.records)


def test_a_closed_loop_has_so_many_users():
    server = SerialServer()
    run = asyncio.run(closed_loop(server, requests(*[0.0] * 9), 3))
    assert len(run.records) == 9 and server.most_at_once == 3
    with pytest.raises(ValueError, match="concurrency: must be >= 1, got 0"):
        asyncio.run(closed_loop(server, requests(0.0), 0))


def test_a_session_sends_what_was_said():
    server = SerialServer()
    turns = [TimedRequest(0.0, (1, 2), 2, "a", 0), TimedRequest(0.03, (3,), 2, "a", 1)]
    run = asyncio.run(session_loop(server, [turns]))
    assert server.prompts == [[1, 2], [1, 2, 7, 8, 3]]
    first, second = run.records
    assert second.due_s >= first.arrivals_s[0] + 0.03
    with pytest.raises(ValueError, match="sessions need the answers' token ids"):
        asyncio.run(session_loop(SerialServer(token_ids=False), [turns]))


def test_a_user_begins_new_sessions_and_stops_at_the_end():
    server = SerialServer()
    turns = [
        TimedRequest(0.0, (1, 2), 2, "a", 0, retain=True),
        TimedRequest(0.0, (3,), 2, "a", 1),
        TimedRequest(0.0, (4,), 2, "b", 0, retain=True),
        TimedRequest(9.0, (5,), 2, "b", 1),
    ]
    run = asyncio.run(session_loop(server, [turns], until_s=8.0))
    assert server.prompts == [[1, 2], [1, 2, 7, 8, 3], [4]]
    assert server.retained == [True, False, True]
    assert [(record.session, record.turn) for record in run.records] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
    ]


def test_a_branch_goes_on_from_the_answer_beside_its_session():
    server = SerialServer()
    branch = (
        TimedRequest(0.03, (4,), 2, "a-branch", 1, retain=True),
        TimedRequest(0.0, (5,), 2, "a-branch", 2),
    )
    turns = [
        TimedRequest(0.0, (1, 2), 2, "a", 0, branch=branch),
        TimedRequest(0.0, (3,), 2, "a", 1),
    ]
    run = asyncio.run(session_loop(server, [turns]))
    assert len(run.records) == 4
    assert [1, 2, 7, 8, 3] in server.prompts
    assert server.prompts[-1] == [1, 2, 7, 8, 4, 7, 8, 5]


def test_a_session_ends_at_its_first_error():
    turns = [TimedRequest(0.0, (13,), 2, "a", 0), TimedRequest(0.0, (3,), 2, "a", 1)]
    run = asyncio.run(session_loop(SerialServer(), [turns]))
    assert [record.error for record in run.records] == ["status 429: full"]


# --------------------------------------------------------------------------------------------------
# Numbers
# --------------------------------------------------------------------------------------------------


def test_a_percentile_is_a_value_that_was_measured():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, p) for p in (1, 25, 26, 50, 75, 99, 100)] == [1, 1, 2, 2, 3, 4, 4]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match=r"percent: must be in \(0, 100\], got 0"):
        percentile(values, 0)


def record(due_s, first_s, last_s, tokens=11, cached=0, error=""):
    return Record(due_s, due_s, (first_s, last_s), (1, tokens - 1), 100, cached, error=error)


def test_goodput_counts_requests_within_both_bounds():
    slo = Slo(ttft_ms=500, tpot_ms=20)
    run = Run(
        [
            record(0.0, 0.4, 0.5),  # good
            record(0.0, 0.6, 0.7),  # late
            record(0.0, 0.4, 0.7),  # slow: 300 ms for 10 tokens
            record(0.0, 0.4, 0.5, error="status 500"),
        ],
        duration_s=2.0,
    )
    row = summarise(run, slo)
    assert row["goodput_requests_per_s"] == 0.5 and row["good_percent"] == 25.0
    assert (row["num_requests"], row["num_failed"], row["requests_per_s"]) == (4, 1, 1.5)
    assert row["first_error"] == "status 500"
    assert row["output_tokens"] == 33
    assert row["ttft_ms"] == {"p50": 400, "p90": 600, "p99": 600}
    assert row["tpot_ms"]["p99"] == pytest.approx(30)


def test_hits_are_those_of_the_window_in_which_the_answer_began():
    records = [record(0, 0.4, 1, cached=50), record(0, 0.9, 1), record(0, 2.5, 3, cached=100)]
    assert hit_rate_over_time(records, 1.0) == [(1.0, 25.0), (3.0, 100.0)]


def test_requests_in_flight_are_counted():
    assert max_in_flight([record(0, 1, 2), record(1, 1.5, 3), record(2.5, 3, 4)]) == 2
    assert max_in_flight([]) == 0

"""The truth benchmark: wrong credit in decisions, the request of each record, and the bars."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from quire.cluster.bench.load.load_generator import Record
from quire.cluster.bench.load.workloads import TimedRequest
from quire.protos.routing_hash import RoutingHasher
from quire.protos.wire import CacheEvents, Frame
from quire.router.explain.decision_log import DecisionLog, LoggedDecision, read
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import RouteRequest
from tests.perf.cluster import truth
from tests.perf.cluster.truth import WrongCredit, in_order_of_due, pooled_tokens

PROMPT = np.arange(300, 440, dtype=np.int32)
EVENT_S = 1000.0
NONE = np.empty(0, np.uint64)


class LoggingRouter:
    """A replica table with two replicas, and its decisions on disk."""

    def __init__(self, folder, monkeypatch):
        self.now_s = EVENT_S
        monkeypatch.setattr("quire.router.explain.decision_log.time.time", lambda: self.now_s)
        self._folder = folder
        self._log = DecisionLog(folder, "router-1", 1 << 20)
        self._table = ReplicaTable(PrefixIndex())
        self._hashes = RoutingHasher("m", "", "").hashes(PROMPT)
        for name in "ab":
            self._table.add(name, f"epoch-{name}")
            self._table.on_frame(name, Frame(f"epoch-{name}", snapshot=NONE), 0.0)
        self.tell("a", CacheEvents(1, self._hashes, NONE))

    def tell(self, replica: str, events: CacheEvents) -> None:
        self._table.on_frame(replica, Frame(f"epoch-{replica}", events=[events]), 0.0)

    def lose(self, replica: str) -> None:
        self._table.set_lost(replica)

    def decide(self, at_s: float) -> None:
        self.now_s = at_s
        fleet = self._table.fleet(self._hashes, len(PROMPT), 0.0)
        request = RouteRequest(len(PROMPT))
        ranking = make_policy("slo").choose(request, fleet, 0.0, random.Random(1))
        self._log.decided(request, ranking, 1, 0.0)

    def decisions(self) -> list[LoggedDecision]:
        self._log.close()
        return list(read(self._folder / "router-1.jsonl"))


@pytest.fixture
def router(tmp_path, monkeypatch) -> LoggingRouter:
    return LoggingRouter(tmp_path, monkeypatch)


@pytest.mark.parametrize("how", ["clear", "lost"])
def test_wrong_credit_lasts_until_the_last_decision_that_counts_what_is_gone(router, how):
    for ms in (-200, -100, 5, 10, 22):
        router.decide(EVENT_S + ms / 1000)
    if how == "clear":
        router.tell("a", CacheEvents(2, NONE, NONE, True))
    else:
        router.lose("a")
    for ms in (30, 70, 200):
        router.decide(EVENT_S + ms / 1000)
    found = WrongCredit.of(router.decisions(), "a", EVENT_S)
    assert found.seconds == pytest.approx(0.022)
    assert (found.num_wrong, found.num_decisions) == (3, 6)
    assert found.resolution_s == pytest.approx(0.13)
    assert found.to_json()["ms"] == 22.0


def test_what_was_forgotten_in_time_is_no_wrong_credit(router):
    router.decide(EVENT_S - 0.01)
    router.lose("a")
    router.decide(EVENT_S + 0.01)
    found = WrongCredit.of(router.decisions(), "a", EVENT_S)
    assert (found.seconds, found.num_wrong, found.num_decisions) == (0.0, 0, 1)


def test_tokens_elsewhere_are_those_that_the_chosen_replica_lacks(router):
    router.decide(EVENT_S)
    (decision,) = router.decisions()
    held = float(decision.fleet.gpu_tokens.max())
    for chosen, elsewhere in (("a", 0), ("b", held)):
        decisions = [dataclasses.replace(decision, chosen=chosen)] * 2
        assert truth.tokens_elsewhere(decisions) == 2 * elsewhere
    assert held == 128


def test_without_credit_before_or_decisions_after_nothing_was_measured(router):
    router.decide(EVENT_S - 0.01)
    router.decide(EVENT_S + 1.0)
    decisions = router.decisions()
    with pytest.raises(RuntimeError, match="nobody counted the blocks of b in 1 decisions"):
        WrongCredit.of(decisions, "b", EVENT_S)
    with pytest.raises(RuntimeError, match=r"no decision within 0\.3 s after a lost its cache"):
        WrongCredit.of(decisions, "a", EVENT_S)


def record(due_s: float, sent_s: float, prompt: int, cached: int, predicted: int) -> Record:
    return Record(due_s, sent_s, (9.0,), (1,), prompt, cached, predicted_tokens=predicted)


def test_the_pooled_cache_serves_in_the_order_in_which_requests_were_sent():
    long, short = tuple(range(300, 400)), tuple(range(300, 370))
    requests = [TimedRequest(1.0, long, 4), TimedRequest(1.0, short, 4), TimedRequest(2.0, long, 4)]
    records = [record(2.0, 2.0, 100, 0, 0), record(1.0, 1.2, 100, 0, 0), record(1.0, 1.1, 70, 0, 0)]
    assert in_order_of_due(requests, records) == [requests[2], requests[0], requests[1]]
    # First the short prompt: no hit. Then two blocks of 32 of the long prompt, then three.
    assert pooled_tokens(requests, records) == 64 + 96
    earlier = [records[0], record(1.0, 1.0, 100, 0, 0), records[2]]
    assert pooled_tokens(requests, earlier) == 64 + 96
    assert pooled_tokens(requests[:1], records[1:2]) == 0


def test_bars_count_what_was_expected_and_not_there():
    records = [record(i, i, 100, 64, 64) for i in range(98)]
    records += [record(0, 0, 100, 32, 64), record(0, 0, 100, 96, 64)]
    found = WrongCredit(0.2, 4, 50, 0.01)
    bars = {
        bar.name: bar
        for bar in truth.bars_of(
            records, 6500, {"clear": [found, WrongCredit(0.0, 0, 5, 0.1)], "kill": []}
        )
    }
    over = bars["router/truth_over_predicted"]
    assert (over.value, over.holds) == (1.0, True)
    assert over.details["over_predicted_tokens"] == 32 and over.details["under_predicted"] == 1
    assert bars["router/truth_hit_rate_of_pooled"].value == pytest.approx(6400 / 6500)
    assert bars["router/truth_wrong_credit_after_clear"].value == 200.0
    assert bars["router/truth_wrong_credit_after_clear"].holds is False
    assert bars["router/truth_wrong_credit_after_kill"].holds is None
    slower = truth.bars_of(records, 6500, {}, speed=4.0)
    assert [bar.name for bar in slower] == [
        "router/truth_over_predicted_at_speed_4",
        "router/truth_hit_rate_of_pooled_at_speed_4",
    ]


def test_the_cluster_of_the_benchmark_is_one_that_quire_takes(tmp_path):
    from quire.cluster.config.app_config import AppConfig

    (application,) = truth.serve_config(tmp_path)["applications"]
    config = AppConfig.from_args(application["args"])
    assert (config.replicas, config.routers, config.engine.num_blocks) == (4, 2, 4096)
    assert truth.SCALE.block_tokens % truth.BLOCK_SIZE == 0

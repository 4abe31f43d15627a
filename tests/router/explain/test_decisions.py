"""The ring of the last decisions."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from routing_fleets import fleet_of, idle

from quire.protos.wire import Frame, Load
from quire.router.explain.decisions import DecisionRing
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import POLICY_NAMES, make_policy
from quire.router.policy.policy import RouteRequest
from quire.router.types import Explain


def ranking_of(rows, num_tokens=1000, policy="slo"):
    fleet = fleet_of(rows, num_tokens)
    return make_policy(policy).choose(RouteRequest(num_tokens), fleet, 0.0, random.Random(0))


def remember(ring, request_id, attempts=1, now_s=0.0, rows=None):
    explain = Explain(attempts=attempts)
    ring.add(
        request_id,
        "answer-of-" + request_id,
        ranking_of(rows or [idle(), idle()]),
        1000,
        explain,
        now_s,
    )
    return explain


def test_a_decision_contains_the_terms_of_every_replica_best_first():
    ring = DecisionRing("router-1", 8, clock=lambda: 5.0)
    rows = [idle(reported_work=5000), idle(gpu_tokens=640), idle(host_tokens=640)]
    remember(ring, "asked", rows=rows)
    (told,) = ring.find("asked")
    assert json.loads(json.dumps(told)) == told  # plain data: it crosses Serve and HTTP
    assert [score["replica"] for score in told["ranking"]] == ["1", "2", "0"]
    assert (told["router"], told["policy"], told["num_replicas"]) == ("router-1", "slo", 3)
    for score in told["ranking"]:
        assert score["cost_s"] == pytest.approx(sum(score["terms"].values()))
    assert told["ranking"][2]["terms"]["wait_s"] == pytest.approx(0.5)
    assert told["ranking"][0]["cached_tokens"] == told["ranking"][1]["host_cached_tokens"] == 640


def test_the_oldest_is_forgotten_and_the_newest_comes_first():
    ring = DecisionRing("router-1", 3)
    for i in range(5):
        remember(ring, f"r{i}", now_s=float(i))
    assert [d["request_id"] for d in ring.last(10)] == ["r4", "r3", "r2"]
    assert [d["request_id"] for d in ring.last(2)] == ["r4", "r3"]
    assert ring.find("r1") == []
    assert [d["request_id"] for d in ring.find("answer-of-r3")] == ["r3"]
    ring.resize(2)
    assert ring.size == 2 and [d["request_id"] for d in ring.last(10)] == ["r4", "r3"]
    ring.resize(4)
    for i in range(5, 7):
        remember(ring, f"r{i}", now_s=float(i))
    assert [d["request_id"] for d in ring.last(10)] == ["r6", "r5", "r4", "r3"]
    none = DecisionRing("router-1", 0)
    remember(none, "r")
    assert none.last(1) == []


def test_the_outcome_belongs_to_the_last_attempt():
    ring = DecisionRing("router-1", 8)
    explain = remember(ring, "moved")
    assert ring.find("moved")[0]["outcome"] is None  # not answered yet
    explain.attempts = 2
    ring.add("moved", "answer-of-moved", ranking_of([idle()]), 1000, explain, 1.0)
    explain.answered_attempt, explain.cached_tokens = 1, 7
    assert ring.find("moved")[1]["outcome"] is None  # the first attempt's is not its own
    explain.answered_attempt, explain.replica, explain.cached_tokens = 2, "0", 64
    first, second = ring.find("moved")
    assert (first["attempt"], first["outcome"]) == (1, None)
    assert second["attempt"] == 2
    assert second["outcome"] == {"replica": "0", "cached_tokens": 64, "queue_s": 0, "ttft_s": 0}


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_decision_does_not_change_with_the_table(policy):
    """The ring keeps arrays, so the table must not write to any of the arrays."""
    table = ReplicaTable(PrefixIndex(), lost_after_s=1e9)
    for name in "abc":
        table.add(name, "e", 64)
        table.on_frame(name, Frame("e", load=Load(num_running=1)), 0.0)
    hashes = np.arange(1, 11, dtype=np.uint64)
    chooser = make_policy(policy)

    def decide(now_s):
        fleet = table.fleet(hashes, 700, now_s)
        return chooser.choose(RouteRequest(700), fleet, now_s, random.Random(0))

    ring = DecisionRing("router-1", 8, clock=lambda: 0.0)
    ranking = decide(0.1)
    ring.add("asked", "a", ranking, 700, Explain(attempts=1), 0.0)

    def told():
        (decision,) = ring.find("asked")
        return {**decision, "decided": None}

    before = told()
    for i in range(5):
        table.book(decide(0.2 + i), hashes, 700, 0.2 + i)
        busy = Load(
            num_running=9, num_waiting=4, queued_prefill_tokens=9999, num_decode_tokens=5000
        )
        table.on_frame("abc"[i % 3], Frame("e", load=busy), 0.3 + i)
    table.remove("a")
    assert told() == before

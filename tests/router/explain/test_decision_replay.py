"""The decision log: written, read back, and decided again."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_fleets import FLEETS, fleet_of, idle

from quire.cluster.cli import main
from quire.router.explain.decision_log import DecisionLog, DecisionLogError, read
from quire.router.explain.decision_replay import replay, report
from quire.router.policy.by_name import POLICY_NAMES, make_policy
from quire.router.policy.fleet_view import COLUMN_NAMES, Demand, PeerPrefixes, PrefillRows
from quire.router.policy.policy import RouteRequest
from quire.router.types import Explain


def record(folder, fleets, policy="slo", num_tokens=1000, max_bytes=10**8, seed=0):
    """Decide for each fleet as a router does, log the decisions, and return the chosen replicas."""
    log = DecisionLog(folder, "router-1", max_bytes)
    rng, chooser = random.Random(seed), make_policy(policy)
    chosen = []
    for i, fleet in enumerate(fleets):
        request = RouteRequest(num_tokens, session="never written")
        ranking = chooser.choose(request, fleet, float(i), rng)
        log.decided(request, ranking, 1, float(i))
        chosen.append(ranking.names()[0])
    log.close()
    assert log.num_dropped == 0
    return chosen


@given(
    st.lists(FLEETS.filter(bool), min_size=1, max_size=5),
    st.sampled_from(POLICY_NAMES),
    st.integers(1, 50_000),
)
def test_a_log_returns_the_inputs_of_the_decisions(tmp_path_factory, rows, policy, num_tokens):
    folder = tmp_path_factory.mktemp("log")
    demand = Demand(2.0, 0.5, 0.25, 0.1, 200.0, 1e-7)
    fleets = [fleet_of(r, num_tokens, demand=demand, longest_prefix=2**63 + 7) for r in rows]
    chosen = record(folder, fleets, policy, num_tokens)
    decisions = list(read(folder / "router-1.jsonl"))
    assert [d.chosen for d in decisions] == chosen
    for decision, fleet in zip(decisions, fleets, strict=True):
        assert decision.request == RouteRequest(num_tokens)
        assert decision.fleet.replicas == fleet.replicas
        facts = ("demand", "longest_prefix", "followers", "session_row", "prior_s_per_work")
        for name in (*facts, "attention_context_tokens"):
            assert getattr(decision.fleet, name) == getattr(fleet, name)
        recorded, given = decision.fleet.named(), fleet.named()
        assert recorded.keys() == given.keys() == set(COLUMN_NAMES)
        for name, values in given.items():
            np.testing.assert_array_equal(recorded[name], values)
    # The same policy with the same random numbers makes the same decisions.
    again = replay(decisions, make_policy(policy), policy)
    assert [one.replayed.replica for one in again.redecisions] == chosen
    assert again.num_changed == again.num_ties == 0


def test_a_log_keeps_what_could_be_pulled(tmp_path):
    peers = PeerPrefixes(np.array([0.0, 960.0]), np.array([1, 0]), 1e-7)
    fleet = fleet_of([idle(gpu_tokens=960, reported_work=50_000), idle()], peers=peers)
    assert record(tmp_path, [fleet]) == ["1"]
    (decision,) = read(tmp_path / "router-1.jsonl")
    read_back = decision.fleet.peers
    assert read_back.tokens.tolist() == [0.0, 960.0] and read_back.rows.tolist() == [1, 0]
    assert read_back.s_per_token == 1e-7
    (again,) = replay([decision], make_policy("slo"), "slo").redecisions
    assert (again.replayed.replica, again.replayed.cached_tokens) == ("1", 960)


def test_a_log_keeps_which_replicas_only_computed_prompts(tmp_path):
    decode = idle(num_requests=20)
    fleet = fleet_of([idle(), decode], 10_000)
    fleet.prefill = PrefillRows(np.array([True, False]), np.array([1e-6, 0.0]))
    assert record(tmp_path, [fleet], "disaggregated", 10_000) == ["0"]
    (decision,) = read(tmp_path / "router-1.jsonl")
    read_back = decision.fleet.prefill
    assert read_back.is_prefill.tolist() == [True, False]
    assert read_back.s_per_token.tolist() == [1e-6, 0.0]
    assert replay([decision], make_policy("disaggregated"), "disaggregated").num_changed == 0


def test_a_log_keeps_the_seconds_of_the_adapter(tmp_path):
    fleet = fleet_of([idle(), idle(reported_work=1000)], adapter_s=np.array([0.5, 0.0]))
    assert record(tmp_path, [fleet, fleet_of([idle()])]) == ["1", "0"]
    first, second = read(tmp_path / "router-1.jsonl")
    assert first.fleet.adapter_s.tolist() == [0.5, 0.0] and second.fleet.adapter_s is None
    (again,) = replay([first], make_policy("slo"), "slo").redecisions
    assert again.replayed.replica == "1"
    (moved,) = replay([first], make_policy("least_loaded"), "least_loaded").redecisions
    assert moved.replayed.ttft_s == pytest.approx(
        0.5 + 0.1 if moved.replayed.replica == "0" else 0.2
    )


def test_another_policy_shows_what_it_would_have_cost(tmp_path):
    holder = idle(gpu_tokens=960, num_requests=3)
    busy = idle(gpu_tokens=960, reported_work=50_000, num_requests=9)
    fleets = [fleet_of([holder, idle()]), fleet_of([busy, idle()]), fleet_of([idle(), idle()])]
    record(tmp_path, fleets)
    decisions = list(read(tmp_path / "router-1.jsonl"))
    loaded = replay(decisions, make_policy("least_loaded"), "least_loaded")
    assert (loaded.num_changed, loaded.num_ties) == (1, 0)
    (change,) = loaded.largest_changes(10)
    assert (change.recorded.replica, change.replayed.replica) == ("0", "1")
    assert (change.recorded.cached_tokens, change.replayed.cached_tokens) == (960, 0)
    # Priced by the cost's terms, since the other policy has none: 40 and 1000 tokens of 0.1 ms.
    assert change.recorded.ttft_s == pytest.approx(0.004)
    assert change.replayed.ttft_s == pytest.approx(0.1)
    text = report(loaded)
    assert "1 (33.3 %)" in text and "estimate" in text
    assert "0 (960 cached, 4.0 ms) -> 1 (0 cached, 100.0 ms)" in text
    affinity = replay(decisions, make_policy("prefix_affinity"), "prefix_affinity")
    assert affinity.redecisions[1].replayed.ttft_s == pytest.approx(5.004)


def test_equal_costs_drawn_otherwise_are_ties(tmp_path):
    record(tmp_path, [fleet_of([idle(), idle(), idle()])] * 60)
    decisions = list(read(tmp_path / "router-1.jsonl"))
    again = replay(decisions, make_policy("slo"), "slo", seed=1)
    assert again.num_changed == 0 and 20 <= again.num_ties <= 60


def test_outcomes_join_their_decisions_and_the_log_holds_no_words(tmp_path):
    log = DecisionLog(tmp_path / "made", "router-1", 10**6)
    rng = random.Random(0)
    request = RouteRequest(1000, session="a session of somebody")
    numbers = []
    for _ in range(2):
        ranking = make_policy("slo").choose(request, fleet_of([idle()]), 0.0, rng)
        numbers.append(log.decided(request, ranking, 1, 0.0))
    log.answered(
        numbers[1],
        Explain(replica="0", cached_tokens=64, queue_s=0.5, ttft_s=0.75, answered_attempt=1),
    )
    log.close()
    path = tmp_path / "made" / "router-1.jsonl"
    first, second = read(path)
    assert first.outcome is None
    assert (second.outcome["cached_tokens"], second.outcome["ttft_s"]) == (64, 0.75)
    assert b"somebody" not in path.read_bytes()
    assert first.fleet.columns.cache_age_s[0] == math.inf


def test_the_log_is_bounded_and_keeps_the_newest(tmp_path):
    bound = 64 * 1024
    record(tmp_path, [fleet_of([idle()] * 4)] * 500, max_bytes=bound)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["router-1.1.jsonl", "router-1.jsonl"]
    one_line = 4096
    assert sum(path.stat().st_size for path in paths) <= bound + 2 * one_line
    older, newer = (list(read(path)) for path in paths)
    times = [decision.now_s for decision in (*older, *newer)]
    assert times == [float(i) for i in range(500 - len(times), 500)] and len(times) > 20


def test_another_bound_of_the_log_holds_from_the_next_line(tmp_path):
    log = DecisionLog(tmp_path, "router-1", 10**8)
    fleet, request = fleet_of([idle()] * 4), RouteRequest(1000)
    ranking = make_policy("slo").choose(request, fleet, 0.0, random.Random(0))

    def write(num_decisions, until):
        for _ in range(num_decisions):
            log.decided(request, ranking, 1, 0.0)
        for _ in range(1000):
            if until():
                return
            time.sleep(0.01)
        raise AssertionError("the log was not written")

    path, older = tmp_path / "router-1.jsonl", tmp_path / "router-1.1.jsonl"
    write(200, lambda: path.exists() and path.read_bytes().count(b"\n") == 201)
    assert path.stat().st_size > 64 * 1024 and not older.exists()
    log.resize(64 * 1024)
    write(1, older.exists)  # the first line after the file exceeds the bound
    assert len(list(read(older))) == 201
    for _ in range(200):
        log.decided(request, ranking, 1, 0.0)
    log.close()
    assert log.num_dropped == 0
    one_line = 4096
    assert path.stat().st_size + older.stat().st_size <= 64 * 1024 + 2 * one_line


def test_a_log_that_was_cut_off_is_read_to_there(tmp_path):
    record(tmp_path, [fleet_of([idle()])] * 3)
    path = tmp_path / "router-1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert len(list(read(path))) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: lines[1:], "line 1 must be the header"),
        (
            lambda lines: [lines[0].replace(b":2,", b":9,", 1), *lines[1:]],
            "line 1 must be the header",
        ),
        (lambda lines: [lines[0], b"{nonsense", *lines[1:]], "line 2 is not a JSON object"),
        (
            lambda lines: [lines[0], lines[1].replace(b"kv_tokens", b"kv_tkens"), lines[2]],
            "kv_tkens",
        ),
    ],
)
def test_a_file_that_is_not_a_log_is_refused_with_the_line(tmp_path, capsys, damage, message):
    record(tmp_path, [fleet_of([idle()])])
    path = tmp_path / "router-1.jsonl"
    path.write_bytes(b"\n".join(damage(path.read_bytes().split(b"\n"))))
    with pytest.raises(DecisionLogError, match=message):
        list(read(path))
    assert main(["router", "replay", str(path), "--policy", "slo"]) == 1
    assert message in capsys.readouterr().err


def test_the_command_reads_the_logs_of_all_routers(tmp_path, capsys):
    busy = idle(gpu_tokens=960, reported_work=50_000)
    record(tmp_path, [fleet_of([busy, idle()])] * 5)
    command = ["router", "replay", str(tmp_path), "--policy", "prefix_affinity"]
    assert main(command) == 0
    assert "5 (100.0 %)" in capsys.readouterr().out
    assert main([*command[:-1], "slo", "--weight", "eta=0.5", "--weight", "kappa=3"]) == 0
    assert "0 (0.0 %)" in capsys.readouterr().out
    assert main([*command[:-1], "slo", "--weight", "etta=0.5"]) == 1
    assert "etta" in capsys.readouterr().err
    assert main(["router", "replay", str(tmp_path / "none"), "--policy", "slo"]) == 1
    assert "cannot be read" in capsys.readouterr().err

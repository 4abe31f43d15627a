"""Why a request went where it went: asked of any router, whoever decided."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from live import wait_until

from quire.cluster.cli import main
from quire.cluster.scrape import MAX_AGE_S
from quire.protos import generation_pb2
from quire.router.explain.decision_log import read
from quire.router.explain.decision_replay import replay
from quire.router.policy.by_name import make_policy

pytestmark = pytest.mark.system
PROMPT = "The bookbinder folded every sheet twice and counted again. " * 12


def complete(client: httpx.Client, **headers: str) -> httpx.Response:
    body = {"model": "embedded", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    response = client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def explain(client: httpx.Client, **query: str | int) -> dict:
    response = client.get("/v1/router/explain", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_any_router_explains_what_another_decided(cluster, generation):
    """New connections reach both routers; each question is answered for all of them."""
    answers = {}
    deciders = set()
    for i in range(40):
        with httpx.Client(base_url=cluster.url, timeout=30) as client:
            answer = complete(client, **{"x-request-id": f"asked-{i}"})
        answers[f"asked-{i}"] = answer
        deciders.add(answer.headers["x-quire-router"])
        if len(deciders) == 2 and i >= 4:
            break
    assert len(deciders) == 2
    for request_id, answer in answers.items():
        with httpx.Client(base_url=cluster.url, timeout=30) as client:
            told = explain(client, request_id=request_id)
        assert set(told["routers"]) == deciders and told["silent_routers"] == 0
        (decision,) = told["data"]
        assert decision["router"] == answer.headers["x-quire-router"]
        assert decision["policy"] == "slo" and decision["num_replicas"] == 2
        assert [score["replica"] for score in decision["ranking"]] == [
            answer.headers["x-quire-replica"],
            answer.headers["x-quire-runner-up"],
        ]
        best = decision["ranking"][0]
        assert best["cost_s"] == pytest.approx(sum(best["terms"].values()))
        predicted = best["cached_tokens"] + best["host_cached_tokens"]
        assert predicted == int(answer.headers["x-quire-predicted-cached-tokens"])
        outcome = decision["outcome"]
        assert outcome["cached_tokens"] == int(answer.headers["x-quire-cached-tokens"])
    with httpx.Client(base_url=cluster.url, timeout=30) as client:
        newest = explain(client, limit=3)["data"]
        assert len(newest) == 3
        assert [d["decided"] for d in newest] == sorted(
            (d["decided"] for d in newest), reverse=True
        )
        # A client that gave no id finds it in the answer, twice.
        answer = complete(client)
        for request_id in (answer.json()["id"], answer.headers["x-request-id"]):
            (decision,) = explain(client, request_id=request_id)["data"]
            assert decision["router"] == answer.headers["x-quire-router"]
        unknown = client.get("/v1/router/explain", params={"request_id": "never"})
        assert unknown.status_code == 404 and "2 routers" in unknown.json()["error"]["message"]
    request = generation_pb2.GenerateRequest(
        prompt=PROMPT, sampling=generation_pb2.SamplingOptions(max_tokens=2)
    )
    once, call = generation.GenerateOnce.with_call(request)
    trailers = dict(call.trailing_metadata())
    with httpx.Client(base_url=cluster.url, timeout=30) as client:
        (decision,) = explain(client, request_id=once.request_id)["data"]
    assert decision["router"] == trailers["x-quire-router"] in deciders
    assert decision["ranking"][0]["replica"] == trailers["x-quire-replica"]


def test_predicted_minus_actual_is_in_the_metrics(cluster):
    def counts(sign: str) -> float:
        return cluster.metric(f"quire_router_{sign}_predicted_cached_tokens_count")

    before = counts("over")
    with httpx.Client(base_url=cluster.url, timeout=30) as client:
        for _ in range(3):
            complete(client)
    time.sleep(MAX_AGE_S)
    assert counts("over") == counts("under") == before + 3


def test_the_recorded_decisions_are_made_again_by_the_same_policy(cluster, capsys):
    (application,) = cluster.config["applications"]
    folder = Path(application["args"]["router"]["decision_log_folder"])
    with httpx.Client(base_url=cluster.url, timeout=30) as client:
        answer = complete(client)
    path = folder / f"{answer.headers['x-quire-router']}.jsonl"

    def recorded() -> list:
        return list(read(path))

    # The writer is a thread: the answer may be here first.
    wait_until(lambda: bool(recorded()) and recorded()[-1].outcome is not None, 10, "the outcome")
    last = recorded()[-1]
    assert last.chosen == answer.headers["x-quire-replica"]
    assert last.outcome["cached_tokens"] == int(answer.headers["x-quire-cached-tokens"])
    assert b"bookbinder" not in path.read_bytes()
    decisions = [decision for file in folder.glob("*.jsonl") for decision in read(file)]
    again = replay(decisions, make_policy("slo"), "slo")
    assert again.num_changed == 0
    assert main(["router", "replay", str(folder), "--policy", "round_robin"]) == 0
    assert f"{len(decisions)} decisions of" in capsys.readouterr().out

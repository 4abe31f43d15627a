"""No stream fails while replicas and routers come and go on purpose; what is light changes in place.

Real Ray: sixty streams of every kind run without a pause while Serve scales the replicas 3 -> 1 -> 3, restarts all of
the application for another argument, and takes a `user_config`. `CHAOS_SIZE=long` does ten rounds (`make chaos`).
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import time

import httpx
import openai
import pytest
from chaos_load import NUM_STREAMS, Load, until_changed
from live import SIZE, Cluster, write_bars

from quire.cluster.bench.results.report import Bar

NUM_ROUNDS = {"ci": 1, "long": 10}[SIZE]
MAX_TOLD = 20  # failures
# Of a stream. Those of 48 tokens take so little time on a fast machine that a replica which goes away has none.
LEAST_TOKENS = 300
MIN_RUNNING = 5  # streams of each replica before some go away

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.timeout(900 if SIZE == "ci" else 7200),
]


def pids(cluster: Cluster, deployment: str) -> set[int]:
    """Of the processes that run and have the newest version, as Serve says; empty while a change is under way."""
    application = cluster.serve_status()["applications"]["quire"]
    details = application["deployments"].get(deployment)
    if details is None or application["status"] != "RUNNING" or details["status"] != "HEALTHY":
        return set()
    return {r["pid"] for r in details["replicas"] if r["state"] == "RUNNING"}


def settled_pids(cluster: Cluster) -> tuple[set[int], set[int]]:
    """Of replicas and of routers, once Serve has finished with the last change."""
    found: list[set[int]] = []

    def is_settled() -> bool:
        found[:] = [pids(cluster, "Replica"), pids(cluster, "Router")]
        return all(found)

    until_changed(is_settled, "Serve has finished")
    return found[0], found[1]


def with_deployments(config: dict, **deployments: dict) -> dict:
    """`config` with these fields of its deployments changed."""
    config = copy.deepcopy(config)
    application = config["applications"][0]
    fields = {d["name"]: d for d in application.get("deployments", [])}
    for name, changed in deployments.items():
        fields.setdefault(name, {"name": name}).update(changed)
    application["deployments"] = list(fields.values())
    return config


def test_no_stream_fails_while_processes_come_and_go(chaos_cluster):
    cluster, batch_tokens = chaos_cluster, itertools.count(300)

    def one_round() -> None:
        until_changed(
            lambda: min(told.num_running for told in cluster.loads()) >= MIN_RUNNING,
            "every replica has streams",
        )
        for count in (1, 3):
            cluster.deploy(with_deployments(cluster.config, Replica={"num_replicas": count}))
            until_changed(
                lambda count=count: len(pids(cluster, "Replica")) == count, f"{count} replicas run"
            )
        before = pids(cluster, "Replica") | pids(cluster, "Router")
        cluster.config["applications"][0]["args"]["engine"]["max_batch_tokens"] = next(batch_tokens)
        cluster.deploy(cluster.config)
        until_changed(
            lambda: (
                len(pids(cluster, "Replica") - before) == 3
                and len(pids(cluster, "Router") - before) == 2
            ),
            "every process was replaced",
        )

    num_rounds = 0

    def rounds() -> None:
        nonlocal num_rounds
        for _ in range(NUM_ROUNDS):
            one_round()
            num_rounds += 1

    load = Load(cluster, LEAST_TOKENS)
    began_s = time.monotonic()
    try:
        asyncio.run(load.run(rounds))
    finally:
        details = {"seconds": round(time.monotonic() - began_s), "moved": load.num_moved}
        details |= {"said": [line[:200] for line in load.bad[:MAX_TOLD]]}
        write_bars(
            "chaos_rolling.json",
            [
                Bar("chaos/rolling_failures", len(load.bad), "streams", 0, details=details),
                Bar(
                    "chaos/rolling_not_ready",
                    len(load.not_ready),
                    "answers",
                    0,
                    details={"of": load.num_ready_asked, "said": load.not_ready[:MAX_TOLD]},
                ),
                Bar("chaos/rolling_rounds", num_rounds, "rounds", NUM_ROUNDS, at_most=False),
                Bar(
                    "chaos/rolling_streams", load.num_streams, "streams", NUM_STREAMS, at_most=False
                ),
            ],
        )
    told = [line[:300] for line in load.bad[:MAX_TOLD]]
    assert not load.bad, f"{len(load.bad)} of {load.num_streams}: {told}"
    assert not load.not_ready, load.not_ready[:MAX_TOLD]
    assert load.num_moved, "no stream outlived the drain of its replica"


def burst(cluster: Cluster) -> str:
    """What was said to those of many requests at once that were refused as overloaded."""

    async def run() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits) as client:
            body = {"model": "embedded", "max_tokens": 2, "temperature": 0}
            prompts = [f"{i}: The harbour was quiet. " + "A boat came in. " * 60 for i in range(24)]
            return await asyncio.gather(
                *(client.post("/v1/completions", json={**body, "prompt": p}) for p in prompts)
            )

    answers = asyncio.run(run())
    assert {answer.status_code for answer in answers} <= {200, 429}
    return " ".join(answer.text for answer in answers if answer.status_code == 429)


def test_light_fields_change_in_place(chaos_cluster):
    cluster = chaos_cluster
    before = settled_pids(cluster)
    assert list(map(len, before)) == [3, 2]
    ask = cluster.openai().completions.create
    ask(model="embedded", prompt="The harbour", max_tokens=2, stop=["a", "b"])
    cluster.deploy(
        with_deployments(
            cluster.config,
            Replica={"user_config": {"max_prefill_ms": 50.0, "step_timeout_s": 20.0}},
            Router={
                "user_config": {
                    "max_stop_strings": 1,
                    "dispatch_window_s": 1e-6,
                    "max_queued_requests": 0,
                    "max_explained_decisions": 1,
                }
            },
        )
    )

    def refuses() -> bool:
        try:
            ask(model="embedded", prompt="The harbour", max_tokens=2, stop=["a", "b"])
        except openai.BadRequestError as error:
            assert error.param == "stop"
            return True
        return False

    # Two routers, one after the other: HAProxy asks them in turn.
    until_changed(lambda: all(refuses() for _ in range(4)), "both routers have the other bound")
    assert settled_pids(cluster) == before
    # Three replicas take one request each; who comes before those have a token may not wait.
    until_changed(lambda: "max_queued_requests" in burst(cluster), "some of a burst were refused")
    told = httpx.get(f"{cluster.url}/v1/router/explain", params={"limit": 100}, timeout=60).json()
    assert len(told["routers"]) == 2 and 1 <= len(told["data"]) <= 2  # one of each router
    cluster.deploy(cluster.config)
    until_changed(lambda: not any(refuses() for _ in range(4)), "the arguments hold again")
    assert not burst(cluster)
    assert settled_pids(cluster) == before

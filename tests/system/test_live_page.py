"""The live page of a real cluster, through HAProxy."""

from __future__ import annotations

import json

import httpx
import pytest
from browser import NEEDS, chromium

from quire.cluster.local.ports import free_ports

pytestmark = pytest.mark.system
BODY = {"model": "embedded", "prompt": "The harbour at night", "max_tokens": 3, "temperature": 0}


def decided_by(url: str, router: str) -> str:
    """Send requests until this router has decided one; return its id."""
    for i in range(60):
        with httpx.Client(base_url=url, timeout=60) as client:
            answer = client.post("/v1/completions", json=BODY | {"seed": i})
        assert answer.status_code == 200, answer.text
        if answer.headers["x-quire-router"] == router:
            return answer.headers["x-request-id"]
    raise AssertionError(f"none of 60 requests came to {router}")


def test_the_stream_shows_replicas_and_requests_of_its_router(cluster):
    with httpx.stream(
        "GET", f"{cluster.url}/ui/state", headers={"accept": "text/event-stream"}, timeout=60
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        states = (json.loads(line[6:]) for line in answer.iter_lines() if line)
        state = next(states)
        assert state["num_routers"] == 2
        assert sorted(state["replicas"]["name"]) == sorted(one.replica for one in cluster.loads())
        totals = {one.replica: one.cache.tiers[0].blocks_total for one in cluster.loads()}
        shown = zip(state["replicas"]["name"], state["replicas"]["device"], strict=True)
        assert {name: sum(tier) for name, tier in shown} == totals
        request_id = decided_by(cluster.url, state["router"])
        for _ in range(40):
            state = next(states)
            found = {request["request_id"]: request for request in state["requests"]}
            if request_id in found and found[request_id]["outcome"]:
                break
        request = found[request_id]
        assert len(request["ranking"]) == 2 and request["outcome"]["ttft_s"] > 0
        assert state["num_deltas"] > 0 and sum(state["replicas"]["answered"]) > 0


@pytest.mark.skipif(bool(NEEDS), reason=f"needs {' and '.join(NEEDS)}")
def test_a_browser_draws_the_cluster(cluster):
    with chromium(free_ports(1)[0]) as browser:
        browser.open(f"{cluster.url}/ui")
        browser.until("document.querySelectorAll('.tile').length === 2")
        shown = browser.run("return document.querySelector('#router').textContent")
        request_id = decided_by(cluster.url, shown.partition(",")[0])
        has_row = "[...document.querySelectorAll('#requests .link')].some((e) => e.textContent === arguments[0])"
        browser.until(has_row, request_id)
        browser.run("document.querySelector('#requests .link').click()")
        browser.until("document.querySelectorAll('#detail-body tbody tr').length === 2")
        assert browser.complaints() == []

"""The live page of a real cluster, through HAProxy."""

from __future__ import annotations

import json

import httpx
import pytest
from browser import NEEDS, chromium

from quire.cluster.cli import main
from quire.cluster.local.ports import free_ports

pytestmark = pytest.mark.system
BODY = {"model": "embedded", "prompt": "The harbour at night", "max_tokens": 3, "temperature": 0}


def ask(url: str) -> str:
    """Send a request, to any router; return its id."""
    with httpx.Client(base_url=url, timeout=60) as client:
        answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


def test_any_router_shows_all_replicas_and_the_requests_of_all_routers(cluster):
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
        # HAProxy prefers the router with fewer connections: the other one gets these requests.
        asked = {ask(cluster.url) for _ in range(4)}
        found: dict[str, dict] = {}
        for _ in range(60):
            state = next(states)
            found = {request["request_id"]: request for request in state["requests"]}
            if asked <= found.keys() and all(found[one]["outcome"] for one in asked):
                break
        assert asked <= found.keys()
        assert len(state["routers"]) == 2 and {found[one]["router"] for one in asked} <= {
            *state["routers"]
        }
        for one in asked:
            assert len(found[one]["ranking"]) == 2 and found[one]["outcome"]["ttft_s"] > 0
        assert state["num_deltas"] > 0 and sum(state["replicas"]["answered"]) > 0


@pytest.mark.skipif(bool(NEEDS), reason=f"needs {' and '.join(NEEDS)}")
def test_a_browser_draws_the_cluster(cluster):
    with chromium(free_ports(1)[0]) as browser:
        browser.open(f"{cluster.url}/ui")
        browser.until("document.querySelectorAll('.tile').length === 2")
        browser.until("document.querySelector('#router').textContent.startsWith('2 routers')")
        request_id = ask(cluster.url)
        has_row = "[...document.querySelectorAll('#requests .link')].some((e) => e.textContent === arguments[0])"
        browser.until(has_row, request_id)
        browser.run("document.querySelector('#requests .link').click()")
        browser.until("document.querySelectorAll('#detail-body tbody tr').length === 2")
        assert browser.complaints() == []


def test_top_shows_the_cluster(cluster, capsys):
    request_id = ask(cluster.url)
    assert main(["top", f"127.0.0.1:{cluster.grpc_port}", "--once"]) == 0
    told = capsys.readouterr().out
    assert "2 routers" in told and request_id[:16] in told
    assert all(load.replica in told for load in cluster.loads())

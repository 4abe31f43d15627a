"""The page's files and its stream of states, over real sockets."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

import httpx
import pytest
from live_app import serving
from page_fleets import FleetService

from quire.cluster.api_common.watchers import Watchers
from quire.cluster.page import page_routes

APIS = (page_routes.add_routes,)
STREAM = {"accept": "text/event-stream"}


@pytest.fixture
def fleet() -> FleetService:
    return FleetService(2)


def next_state(lines) -> dict:
    return json.loads(next(line for line in lines if line).removeprefix("data: "))


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_runs_its_own_script_only(fleet):
    with serving(fleet, apis=APIS) as http:
        page = http.get("/ui")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        tags = Tags()
        tags.feed(page.text)
        linked = [a[k] for _, a in tags.found for k in ("src", "href") if k in a]
        assert linked == ["data:,", "ui/page.css", "ui/page.js"]
        assert not [a for _, a in tags.found if "style" in a or any(k.startswith("on") for k in a)]
        assert not re.search(r"<script[^>]*>(?!</script>)", page.text) and "<style" not in page.text
        types = {}
        for path in linked[1:]:
            answer = http.get(path)
            assert answer.headers["x-content-type-options"] == "nosniff"
            types[path] = answer.headers["content-type"]
        assert types == {
            "ui/page.css": "text/css; charset=utf-8",
            "ui/page.js": "text/javascript; charset=utf-8",
        }
        script = http.get("/ui/page.js").text
        # Ids and names come from clients: nothing turns text into elements or code.
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in script
        assert "http:" not in script + http.get("/ui/page.css").text


def test_the_state_is_json_or_a_stream(fleet):
    with serving(fleet, apis=APIS) as http:
        once = http.get("/ui/state")
        assert once.headers["content-type"] == "application/json"
        assert once.headers["cache-control"] == "no-store"
        assert once.json()["router"] == fleet.ring.router_id
        with http.stream("GET", "/ui/state", headers=STREAM) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = answer.iter_lines()
            before = next_state(lines)
            fleet.ask("the-new-one")
            after = next_state(lines)
            if not after["requests"]:  # this one was made before the request
                after = next_state(lines)
        assert before["requests"] == []
        assert [request["request_id"] for request in after["requests"]] == ["the-new-one"]


def test_a_large_state_is_sent_more_rarely(fleet, monkeypatch):
    monkeypatch.setattr(page_routes, "PERIOD_S", 0.0)
    monkeypatch.setattr(page_routes, "MAX_BYTES_PER_S", 4096)
    with serving(fleet, apis=APIS) as http:
        size = len(http.get("/ui/state").content)
        with http.stream("GET", "/ui/state", headers=STREAM) as answer:
            lines, began_s = answer.iter_lines(), time.monotonic()
            for _ in range(3):
                next_state(lines)
        assert time.monotonic() - began_s >= 2 * size / 4096


def test_viewers_are_bounded_and_leave_their_places(fleet):
    watchers = Watchers(most=3, most_of_client=2)
    with serving(fleet, apis=APIS, get_watchers=lambda: watchers) as http:
        with (
            http.stream("GET", "/ui/state", headers=STREAM) as one,
            http.stream("GET", "/ui/state", headers=STREAM) as two,
        ):
            # A dropped iterator would close its stream.
            streams = [one.iter_lines(), two.iter_lines()]
            for lines in streams:
                next_state(lines)
            with http.stream("GET", "/ui/state", headers=STREAM) as refused:
                assert refused.status_code == 429 and "retry-after" in refused.headers
                assert "router.max_watchers_per_client is 2" in refused.read().decode()
            assert http.get("/ui/state").is_success  # one answer needs no place
        end_s = time.monotonic() + 10
        while watchers.num_open and time.monotonic() < end_s:
            time.sleep(0.01)
        assert watchers.num_open == 0


def test_a_stream_ends_after_its_time(fleet, monkeypatch):
    """The page opens another one, with a key that must still be valid."""
    monkeypatch.setattr(page_routes, "MAX_STREAM_S", 0.1)
    monkeypatch.setattr(page_routes, "PERIOD_S", 0.02)
    with (
        serving(fleet, apis=APIS) as http,
        http.stream("GET", "/ui/state", headers=STREAM) as answer,
    ):
        states = [line for line in answer.iter_lines() if line]
    assert 1 <= len(states) <= 6


def test_a_slow_viewer_is_disconnected_by_name_and_delays_nobody(fleet, keys, monkeypatch, caplog):
    monkeypatch.setattr(page_routes, "SLOW_VIEWER_S", 0.3)
    monkeypatch.setattr(page_routes, "PERIOD_S", 0.001)
    monkeypatch.setattr(page_routes, "MAX_BYTES_PER_S", 1 << 40)
    access, watchers = keys.access(), Watchers(8, 8)
    with serving(
        fleet, apis=APIS, get_access=lambda: access, get_watchers=lambda: watchers
    ) as http:
        secret = keys.secrets["observe"]
        address = (http.base_url.host, http.base_url.port)
        with socket.socket() as slow, caplog.at_level(logging.WARNING, "ray.serve"):
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(address)
            slow.sendall(
                b"GET /ui/state HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n"
                b"Authorization: Bearer %s\r\n\r\n" % secret.encode()
            )

            def watch() -> int:
                with http.stream(
                    "GET", "/ui/state", headers=STREAM | keys.header("observe")
                ) as answer:
                    lines, end_s, num = answer.iter_lines(), time.monotonic() + 60, 0
                    while not caplog.messages and time.monotonic() < end_s:
                        next_state(lines)
                        num += 1
                    return num

            with ThreadPoolExecutor() as pool:
                num_states = pool.submit(watch).result()
            assert num_states > 10, "a viewer that reads gets its states meanwhile"
            (message,) = caplog.messages
            assert "the key 'observe' at '127.0.0.1' left the page's events unread" in message
            assert secret not in message
        end_s = time.monotonic() + 10
        while watchers.num_open and time.monotonic() < end_s:
            time.sleep(0.01)
        assert watchers.num_open == 0
        assert httpx.get(f"{http.base_url}/health", timeout=60).is_success

"""The live page in headless Chromium: drawn, renewed, connected again, accessible, and safe with hostile text."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from browser import NEEDS, Browser, chromium, wait_for
from page_fleets import FleetService

from quire.cluster.app import APIS
from quire.cluster.http.http_api import build_app
from quire.cluster.local.ports import free_ports

pytestmark = [
    pytest.mark.skipif(bool(NEEDS), reason=f"needs {' and '.join(NEEDS)}"),
    pytest.mark.alone,  # one test measures, and a browser takes a core
]

AXE = (Path(__file__).parent / "axe_core" / "axe.min.js").read_text()
LIVE = "document.querySelector('#connection').dataset.state === 'live'"
SIZES = [(1440, 900), (390, 844)]


@contextmanager
def serving(service: Any, port: int, **options: Any) -> Iterator[None]:
    app = build_app(lambda: service, max_body_bytes=1 << 16, apis=APIS, **options)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", port))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium(free_ports(1)[0]) as window:
        yield window


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


def fleet_of(num_replicas: int) -> FleetService:
    service = FleetService(num_replicas, 10_000)
    service.pass_time(3.0, requests_per_s=4 * num_replicas)
    return service


def open_page(browser: Browser, port: int, num_replicas: int) -> None:
    browser.look(*SIZES[0])
    browser.open("about:blank")
    browser.complaints()  # of the page before
    browser.open(f"http://127.0.0.1:{port}/ui")
    browser.until(f"document.querySelectorAll('.tile').length === {num_replicas}")


def texts(browser: Browser, selector: str) -> list[str]:
    found = "[...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return browser.run(f"return {found}", selector)


def colours_of_cells(browser: Browser) -> set[str]:
    """The colours of the first replica's cells."""
    return set(
        browser.run("""
            const canvas = document.querySelector(".tile canvas"), found = new Set();
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            for (let i = 0; i < data.length; i += 4) {
              if (data[i + 3] === 255) found.add([...data.slice(i, i + 3)].join());
            }
            return [...found];""")
    )


def test_it_draws_a_fleet(browser, port):
    service = fleet_of(2)
    with serving(service, port):
        open_page(browser, port, 2)
        assert texts(browser, "#model") == ["Qwen/Qwen3-8B"]
        assert service.ring.router_id in texts(browser, "#router")[0]
        assert "1 of 2 routers answered" in texts(browser, "#router")[0]
        assert sorted(texts(browser, ".tile .name")) == sorted(service.replicas)
        assert len(texts(browser, "#requests tr")) == 20
        newest = service.ring.last(1)[0]
        first = texts(browser, "#requests tr:first-child td")
        assert first[1] == newest["request_id"] and first[4] == newest["ranking"][0]["replica"]
        assert first[6].startswith("+") and first[6].endswith(newest["ranking"][1]["replica"])
        # The cells are drawn in the browser's next frame.
        wait_for(lambda: len(colours_of_cells(browser)) >= 3, "cells in use, cached and free")
        light = colours_of_cells(browser)
        browser.look(*SIZES[0], dark=True)
        wait_for(lambda: not colours_of_cells(browser) & light, "the cells in the dark scheme")
        assert browser.complaints() == []  # the policy refused nothing, and nothing failed


def test_a_change_is_shown_within_a_second(browser, port):
    """The best of some: the machine may be busy."""
    service = fleet_of(2)
    took = []
    with serving(service, port):
        open_page(browser, port, 2)
        for i in range(5):
            service.ask(f"new-{i}")
            shown = "document.querySelector('#requests .link').textContent === arguments[0]"
            took.append(browser.until(shown, f"new-{i}"))
        name, other = service.replicas
        service.table.set_lost(name)
        browser.until(f"document.querySelector('.tile[title=\"{name}\"]').dataset.state === 'lost'")
        service.ask("moved", left=name, attempts=2)
        browser.until("document.querySelectorAll('#moves li').length === 1")
        assert f"{name} → {other}" in texts(browser, "#moves li")[0]
    assert sorted(took)[2] < 1.0, took


def test_it_survives_a_restart_of_its_router(browser, port):
    with serving(fleet_of(2), port):
        open_page(browser, port, 2)
    browser.until("document.querySelector('#connection').dataset.state === 'lost'")
    assert "connecting again" in texts(browser, "#connection")[0]
    other = fleet_of(3)
    other.ring.router_id = "router-after"
    with serving(other, port):
        browser.until("document.querySelectorAll('.tile').length === 3")
        browser.until(LIVE)
        assert "router-after" in texts(browser, "#router")[0]


def test_it_says_why_it_is_refused(browser, port):
    from quire.cluster.api_common.watchers import Watchers

    watchers = Watchers(1, 1)
    with serving(fleet_of(1), port, get_watchers=lambda: watchers):
        open_page(browser, port, 1)
        watchers.most = 0
        browser.open(f"http://127.0.0.1:{port}/ui")
        browser.until("document.querySelector('#connection').textContent.includes('max_watchers')")


@pytest.mark.parametrize("num_replicas", [2, 100])
def test_axe_finds_nothing_in_either_scheme_and_at_any_width(browser, port, num_replicas: int):
    service = fleet_of(num_replicas)
    service.lose(next(iter(service.replicas)))
    with serving(service, port):
        open_page(browser, port, num_replicas)
        browser.run(AXE)
        check = "return axe.run().then((found) => found.violations.map((v) => [v.id, v.nodes.map((n) => n.html)]))"
        for dark in (False, True):
            for width, height in SIZES:
                browser.look(width, height, dark=dark)
                browser.until(LIVE)
                assert browser.run(check) == [], (dark, width)
                assert browser.run("return document.documentElement.scrollWidth") <= width
        for selector in (".tile", "#requests .link"):
            browser.run("document.querySelector(arguments[0]).click()", selector)
            browser.until("document.querySelector('#detail-body').childElementCount > 0")
            assert browser.run(check) == [], selector
            browser.run("document.querySelector('#close').click()")


def test_the_keyboard_reaches_a_request_and_its_explanation(browser, port):
    service = fleet_of(2)
    service.ask("asked-by-keyboard")
    tab, enter, escape = "\ue004", "\ue007", "\ue00c"
    with serving(service, port):
        open_page(browser, port, 2)
        for _ in range(12):
            browser.press(tab)
            if browser.run("return document.activeElement.closest('#requests') !== null"):
                break
        assert browser.run("return document.activeElement.textContent") == "asked-by-keyboard"
        browser.press(enter)
        browser.until("document.querySelectorAll('#detail-body tbody tr').length === 2")
        told = texts(browser, "#detail-body")[0]
        (decision,) = service.ring.find("asked-by-keyboard")
        assert all(score["replica"] in told for score in decision["ranking"])
        assert "wait" in told and "prefill" in told and "policy slo" in told
        browser.press(escape)
        browser.until("!document.querySelector('#detail').open")
        # The list moves on below the focus, which stays on its request.
        for _ in range(3):
            service.ask()
        browser.until(
            "document.querySelectorAll('#requests tr')[3].contains(document.activeElement)"
        )


def test_hostile_names_are_text(browser, port):
    evil = "<img src=x onerror=\"document.title='evil'\">"
    service = fleet_of(2)
    service.table.add(evil, "e")
    service.ring.router_id = f"{evil}<script>document.title='evil'</script>"
    service.ask(evil)
    service.ask(evil, left=evil, attempts=2)
    with serving(service, port):
        open_page(browser, port, 3)
        assert evil in texts(browser, ".tile .name") and evil in texts(browser, "#requests .link")
        browser.run("document.querySelector('#requests .link').click()")
        browser.until("document.querySelectorAll('#detail-body table').length >= 1")
        assert evil in texts(browser, "#detail-title")[0]
        assert browser.run("return document.querySelectorAll('img, script:not([src])').length") == 0
        assert browser.run("return document.title") == "Quire: Qwen/Qwen3-8B"
        assert browser.complaints() == []


def test_a_browser_with_a_key_as_its_password_sees_the_page(browser, port, keys):
    access = keys.access()
    with serving(fleet_of(2), port, get_access=lambda: access):
        browser.open(f"http://anyone:{keys.secrets['admin']}@127.0.0.1:{port}/ui")
        browser.open(f"http://127.0.0.1:{port}/ui")  # the browser remembers the password
        browser.until("document.querySelectorAll('.tile').length === 2")
        browser.run("document.querySelector('#requests .link').click()")
        browser.until("document.querySelectorAll('#detail-body table').length === 1")
        assert browser.run("return fetch('/v1/models').then((answer) => answer.status)") == 401


def test_a_pause_keeps_the_page_as_it_is(browser, port):
    service = fleet_of(2)
    with serving(service, port):
        open_page(browser, port, 2)
        browser.run("document.querySelector('#pause').click()")
        service.ask("while-paused")
        browser.until("document.querySelector('#connection').textContent === 'paused'")
        time.sleep(1.0)
        assert "while-paused" not in texts(browser, "#requests .link")
        browser.run("document.querySelector('#pause').click()")
        browser.until("document.querySelector('#requests .link').textContent === 'while-paused'")

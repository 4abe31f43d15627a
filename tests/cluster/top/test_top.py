"""`quire top`, over gRPC from a real socket: the same fleet as on the page, as text."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from live_grpc import serving
from page_fleets import FleetService
from rich.console import Console

from quire.cluster.cli import main
from quire.cluster.grpc.grpc_answers import router_state
from quire.cluster.top.top_screen import TopScreen

# A job in the background ignores Ctrl-C, and its children do too, unless they ask for it.
TOP = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from quire.cluster.cli import main
sys.exit(main(["top", *sys.argv[1:]]))
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def fleet_of(num_replicas: int) -> FleetService:
    service = FleetService(num_replicas, 10_000)
    service.pass_time(2.0, requests_per_s=4 * num_replicas)
    return service


@contextmanager
def grpc_port(service: Any, **options: Any) -> Iterator[int]:
    """The port of a gRPC server in a thread."""
    ready, ports, loop = threading.Event(), [], asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        async with serving(service, "direct", **options) as clients:
            ports.append(clients.port)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def drawn(service: FleetService, width: int = 200, height: int = 50) -> list[str]:
    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        state = router_state(asyncio.run(service.live_state()))
        console.print(TopScreen().draw(state, height, width))
    return captured.get().splitlines()


def test_once_prints_the_state_of_a_router_elsewhere(capsys):
    service = fleet_of(2)
    service.ask("the-newest")
    with grpc_port(service) as port:
        assert main(["top", f"127.0.0.1:{port}", "--once"]) == 0
    told = capsys.readouterr().out
    assert "Qwen/Qwen3-8B" in told and service.ring.router_id in told
    for name in ("the-newest", *service.replicas):
        assert name in told


def test_a_key_without_the_right_is_refused_with_the_reason(keys, capsys, monkeypatch):
    access = keys.access()
    with grpc_port(fleet_of(1), access=access) as port:
        for key, told in (
            ("generate", "lacks the right 'observe'"),
            ("observe", "Qwen/Qwen3-8B"),
        ):
            monkeypatch.setenv("QUIRE_API_KEY", keys.secrets[key])
            assert main(["top", f"127.0.0.1:{port}", "--once"]) == (key == "generate")
            assert told in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("num_replicas", [0, 1, 2, 100])
@pytest.mark.parametrize("height", [24, 60])
def test_a_screen_is_never_higher_than_the_terminal(num_replicas: int, height: int):
    service = fleet_of(max(1, num_replicas))
    if not num_replicas:
        service.table.remove(next(iter(service.replicas)))
    if num_replicas > 1:
        service.lose(next(iter(service.replicas)))
    lines = drawn(service, height=height)
    assert len(lines) <= height
    if num_replicas == 100:
        assert any("more" in line for line in lines)


def test_a_narrow_terminal_shows_whole_names():
    service = fleet_of(3)
    service.ask("the-newest-one")
    lines = drawn(service, width=80, height=24)
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
    for name in ("the-newest-one", *service.replicas):
        assert any(name in line for line in lines)
    assert "…" not in lines[-1].replace("  …", "")


def test_a_lost_replica_comes_first_and_its_requests_are_migrations():
    service = fleet_of(100)
    lost = sorted(service.replicas)[70]
    service.lose(lost)
    lines = drawn(service)
    first = next(i for i, line in enumerate(lines) if line.startswith("Replica"))
    assert lines[first + 1].startswith(f"{lost} lost")
    moved = [line for line in lines if line.startswith("migrated")]
    assert len(moved) == 3 and all(f"{lost} → " in line for line in moved)


def test_bars_have_every_state_and_one_width():
    service = fleet_of(1)
    (name,) = service.replicas
    (line,) = (line for line in drawn(service) if line.startswith(name))
    device, host = re.findall(r"[█░]+", line)
    assert len(device) == len(host) == 24


def test_rates_are_those_of_the_last_states():
    service, screen = fleet_of(1), TopScreen()
    state = router_state(asyncio.run(service.live_state()))
    screen.draw(state, 40)
    later = router_state(asyncio.run(service.live_state()))
    later.now_s, later.num_decisions = state.now_s + 2, state.num_decisions + 10
    screen.draw(later, 40)
    assert screen._rate("num_decisions") == "5.0"
    other = router_state(asyncio.run(service.live_state()))
    other.routers[:], other.now_s = ["another"], later.now_s + 1
    screen.draw(other, 40)
    assert screen._rate("num_decisions") == "–"


def test_the_regret_is_an_interval():
    service = fleet_of(2)
    assert "regret –" in "".join(drawn(service))
    for _ in range(6):
        service.pass_time(2.0, requests_per_s=8)
        service.regret.step()
    (regret,) = service.regret.regrets
    assert 0 <= regret.low_s < regret.high_s < 1
    text = "".join(drawn(service))
    found = re.search(r"regret ([0-9.]+) ms to ([0-9.]+) ms", text)
    assert found, text
    shown_ms = float(found[1]), float(found[2])
    assert shown_ms == pytest.approx((1e3 * regret.low_s, 1e3 * regret.high_s), abs=0.5, rel=0.05)


def test_names_cannot_command_the_terminal():
    service = fleet_of(2)
    evil = "\x1b]0;evil\x07[red]x[/red]"
    service.table.add(evil, "e")
    service.ask(evil)
    service.ask(evil, left=evil, attempts=2)
    told = "\n".join(drawn(service))
    assert "\x1b" not in told and "\x07" not in told
    # The replica, two requests, and both in the migration: no part was read as a style.
    assert told.count("?]0;evil?[red]x[/red]") >= 4


def test_it_follows_a_router_and_survives_its_restart(tmp_path):
    """In a terminal of its own: the screen changes with the router, and Ctrl-C ends it."""
    service = fleet_of(2)
    ours, theirs = pty.openpty()
    screen: list[str] = [""]

    def shows(text: str) -> bool:
        while select.select([ours], [], [], 0.1)[0]:
            screen[0] = (screen[0] + os.read(ours, 1 << 16).decode(errors="replace"))[-60_000:]
        return text in ESCAPES.sub("", screen[0])

    def wait_for(text: str) -> None:
        end_s = time.monotonic() + 60
        while not shows(text):
            assert time.monotonic() < end_s, (text, screen[0][-3000:])

    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"}
    with grpc_port(service) as port:
        command = [sys.executable, "-c", TOP, f"127.0.0.1:{port}"]
        process = subprocess.Popen(
            [*command, "--period-s", "0.1"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        try:
            wait_for(next(iter(service.replicas)))
            service.ask("asked-later")
            wait_for("asked-later")
        except BaseException:
            process.kill()
            raise
    try:
        wait_for("connecting again")
        process.send_signal(signal.SIGINT)
        end_s = time.monotonic() + 60
        while process.poll() is None:
            shows("")  # a terminal reads
            assert time.monotonic() < end_s
        assert process.returncode == 0
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)

"""grpcio's polling thread gets SCHED_BATCH, and no other thread does."""

from __future__ import annotations

import asyncio
import os
import threading

import grpc
import pytest

from quire.cluster.grpc.grpc_poller import batch_pollers

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH"
)


def policies() -> dict[str, int]:
    """Scheduling policies by the name of the thread."""
    return {t.name: os.sched_getscheduler(t.native_id) for t in threading.enumerate()}


def test_the_poller_of_a_real_server_waits_for_its_turn_and_the_event_loop_does_not():
    async def run() -> tuple[int, int, dict[str, int]]:
        server = grpc.aio.server()
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
        found = batch_pollers(), batch_pollers(), policies()
        await server.stop(None)
        return found

    first, again, found = asyncio.run(run())
    assert first >= 1  # fails if grpcio renames its thread: the policy would then have no effect
    assert again == first
    pollers = {name: policy for name, policy in found.items() if "_poll_wrapper" in name}
    assert set(pollers.values()) == {os.SCHED_BATCH}
    others = {name: policy for name, policy in found.items() if name not in pollers}
    assert "MainThread" in others and set(others.values()) == {os.SCHED_OTHER}


def test_a_policy_that_somebody_else_has_chosen_stays():
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, name="Thread-1 (_poll_wrapper)")
    thread.start()
    try:
        os.sched_setscheduler(thread.native_id, os.SCHED_IDLE, os.sched_param(0))
        batch_pollers()
        assert os.sched_getscheduler(thread.native_id) == os.SCHED_IDLE
    finally:
        may_end.set()
        thread.join()


def test_a_system_that_forbids_it_is_no_error(monkeypatch):
    def forbidden(*_: object) -> None:
        raise PermissionError("seccomp")

    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, name="Thread-1 (_poll_wrapper)")
    thread.start()
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    try:
        assert batch_pollers() == 0
    finally:
        may_end.set()
        thread.join()

"""Routers ask each other: a silent router does not hide the answers of the others."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse

from quire.protos.errors import Unavailable
from quire.router.transport import peers as peers_module
from quire.router.transport.peers import Peers


class Result:
    """Serve's result of one router: an answer, an error, or None for never."""

    def __init__(self, answer: Any):
        self.answer = answer
        self.cancelled = False

    async def get_async(self) -> Any:
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A `DeploymentHandle`; its broadcast reaches these routers, with Serve's own response object."""

    def __init__(self, *answers: Any, num_unavailable: int = 0):
        self.results = [Result(answer) for answer in answers]
        self.num_unavailable = num_unavailable
        self.calls: list[tuple[Any, ...]] = []

    def broadcast(self, *call: Any) -> DeploymentBroadcastResponse:
        self.calls.append(call)

        async def send() -> list[Result]:
            if self.num_unavailable:
                self.num_unavailable -= 1
                raise DeploymentUnavailableError("Router")
            return self.results

        return DeploymentBroadcastResponse(send(), asyncio.get_running_loop())


def decision(at_s: float) -> dict[str, float]:
    return {"decided": at_s}


def test_answers_are_joined_newest_first():
    async def main() -> None:
        handle = Handle(("r2", [decision(2)]), ("r1", [decision(3), decision(1)]))
        found = await Peers(handle).decisions(None, 2, "team-a")
        assert found.routers == ["r1", "r2"] and found.num_silent == 0
        assert [d["decided"] for d in found.decisions] == [3, 2]
        assert handle.calls == [("own_decisions", None, 2, "team-a")]

    asyncio.run(main())


def test_the_states_of_the_routers_that_answer_in_time(monkeypatch):
    monkeypatch.setattr(peers_module, "_STATE_TIMEOUT_S", 0.05)

    async def main() -> None:
        handle = Handle("state of r1", None, "state of r2")
        assert sorted(await Peers(handle).live_states("team-a")) == ["state of r1", "state of r2"]
        assert handle.calls == [("own_state", "team-a")]
        with pytest.raises(Unavailable):
            await Peers(Handle(None)).live_states(None)

    asyncio.run(main())


def test_a_router_that_hangs_or_fails_hides_no_other(monkeypatch):
    monkeypatch.setattr(peers_module.Peers._ask, "__kwdefaults__", {"timeout_s": 0.05})

    async def main() -> None:
        page = {"quire_requests_running": (b"# HELP", b"")}
        handle = Handle(("r1", page), None, RuntimeError("defect"))
        began_s = time.monotonic()
        assert await Peers(handle).metrics(0.05) == ({"r1": page}, 2)
        assert 0.04 < time.monotonic() - began_s < 15
        assert [result.cancelled for result in handle.results] == [False, True, False]
        found = await Peers(Handle(("r1", [decision(1)]), None)).decisions("request", 5)
        assert (found.routers, found.num_silent, found.decisions) == (["r1"], 1, [decision(1)])

    asyncio.run(main())


def test_a_handle_that_does_not_know_the_routers_yet_is_asked_again():
    async def main() -> None:
        handle = Handle(("r1", {}), num_unavailable=2)
        assert await Peers(handle).metrics(5.0) == ({"r1": {}}, 0)
        assert len(handle.calls) == 3

    asyncio.run(main())


@pytest.mark.parametrize("handle", [Handle(None, None), Handle(num_unavailable=10**6)])
def test_no_answer_at_all_is_unavailable(handle):
    async def main() -> None:
        with pytest.raises(Unavailable, match=r"within 0\.1 s"):
            await Peers(handle).metrics(0.1)

    asyncio.run(main())

"""Sixty streams of every kind that run without a pause while a cluster changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
from chaos_clients import Connection
from chaos_streams import NotSent, Outcome, Spec, Watch, ask_grpc, ask_http
from live import CHANGE_TIMEOUT_S, Cluster

NUM_STREAMS = 60


def clock_time() -> str:
    """UTC as in Serve's logs, to find what else happened then."""
    return time.strftime("%H:%M:%S", time.gmtime())


async def ask_until_sent(connection: Connection, spec: Spec, watch: Watch) -> Outcome:
    """As gRPC does by itself, but with a pause and on another connection."""
    while True:
        try:
            return await ask_grpc(connection.stub, spec, watch)
        except NotSent:
            await asyncio.sleep(0.05)
            await connection.renew()


class Load:
    """`NUM_STREAMS` clients, each with one stream after the other until told to stop.

    Parameters
    ----------
    least_tokens
        As of `Spec`.
    """

    def __init__(self, cluster: Cluster, least_tokens: int = 0):
        self._cluster = cluster
        self._least_tokens = least_tokens
        self._stop = False
        self.expected: dict[int, Outcome] = {}  # the answer without faults
        self.bad: list[str] = []
        self.num_streams = 0
        self.num_moved = 0
        self.num_ready_asked = 0
        self.not_ready: list[str] = []  # what `/ready` said instead

    def _spec(self, number: int) -> Spec:
        return Spec(number, self._least_tokens)

    async def run(self, change: Callable[[], None]) -> None:
        """Ask every stream once in peace; then again and again until `change` has returned."""
        limits = httpx.Limits(max_connections=None)
        address = f"127.0.0.1:{self._cluster.grpc_port}"
        connections = [Connection(address) for _ in range(NUM_STREAMS)]
        async with httpx.AsyncClient(
            base_url=self._cluster.url, timeout=CHANGE_TIMEOUT_S, limits=limits
        ) as client:

            async def ask(number: int) -> Outcome:
                spec, watch = self._spec(number), Watch()
                if spec.over_http:
                    outcome = await ask_http(client, spec, watch)
                else:
                    outcome = await ask_until_sent(connections[number], spec, watch)
                self.num_moved += watch.attempts > 1
                return outcome

            async def client_of(number: int) -> None:
                while not self._stop:
                    self.num_streams += 1
                    try:
                        outcome = await ask(number)
                    except Exception as error:
                        self.bad.append(f"{clock_time()} {self._spec(number)}: {error!r}")
                        await asyncio.sleep(0.5)
                        continue
                    if outcome != self.expected[number]:
                        self.bad.append(
                            f"{self._spec(number)}: {outcome} is not the answer in peace"
                        )

            numbers = range(NUM_STREAMS)
            answers = await asyncio.gather(*map(ask, numbers))
            self.expected = dict(zip(numbers, answers, strict=True))
            clients = [asyncio.create_task(client_of(number)) for number in numbers]
            clients.append(asyncio.create_task(self._watch_ready(client)))
            try:
                await asyncio.to_thread(change)
            finally:
                self._stop = True
                await asyncio.gather(*clients)
                await asyncio.gather(*(connection.close() for connection in connections))

    async def _watch_ready(self, client: httpx.AsyncClient) -> None:
        """Whichever router answers, one that has just begun or one that is about to go, it is ready."""
        while not self._stop:
            self.num_ready_asked += 1
            try:
                answer = await client.get("/ready")
                if answer.status_code != 200:
                    self.not_ready.append(f"{clock_time()} {answer.status_code}: {answer.text}")
            except httpx.TransportError as error:
                self.not_ready.append(f"{clock_time()} {error!r}")
            await asyncio.sleep(0.1)


def until_changed(is_done: Callable[[], bool], what: str) -> None:
    began_s = time.monotonic()
    while not is_done():
        assert time.monotonic() - began_s < CHANGE_TIMEOUT_S, f"not in {CHANGE_TIMEOUT_S} s: {what}"
        time.sleep(0.25)
    print(f"{what}: {time.monotonic() - began_s:.0f} s", flush=True)

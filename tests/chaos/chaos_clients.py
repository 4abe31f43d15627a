"""Clients for the chaos tests: many streams at a time, each followed to its end whatever happens to the servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
from chaos_streams import (
    Outcome,
    Refused,
    Spec,
    Truncated,
    Watch,
    ask_grpc,
    ask_http,
    new_outcome,
)
from live import Cluster
from patient_channel import aio_channel

from quire.protos import generation_pb2_grpc

CONCURRENCY = 24
MAX_REFUSED_S = 240.0  # for which a client comes back


class Connection:
    """One client's channel, shared with nobody, and another one once a call has failed on it."""

    def __init__(self, address: str):
        self._address = address
        self._open()

    def _open(self) -> None:
        self._channel = aio_channel(self._address)
        self.stub = generation_pb2_grpc.GenerationStub(self._channel)

    async def renew(self) -> None:
        await self.close()
        self._open()

    async def close(self) -> None:
        await self._channel.close()


class Clients:
    """Asks streams, many at a time, and remembers how each went.

    Parameters
    ----------
    num_specs
        Stream number i asks what number i modulo this asks.
    resumes
        Whether a stream that broke is resumed; otherwise it counts as failed.
    concurrency
        Streams at a time.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_specs: int,
        *,
        resumes: bool = False,
        concurrency: int = CONCURRENCY,
    ):
        self._cluster = cluster
        self._num_specs = num_specs
        self._resumes = resumes
        self._concurrency = concurrency
        self.watches: dict[int, Watch] = {}
        self.outcomes: dict[int, Outcome | str] = {}

    async def run(self, numbers: Iterator[int]) -> None:
        """Ask the streams of these numbers."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._cluster.url, timeout=120, limits=limits
        ) as client:

            async def worker() -> None:
                connection = Connection(f"127.0.0.1:{self._cluster.grpc_port}")
                for number in numbers:
                    await self._one(client, connection, number)
                await connection.close()

            await asyncio.gather(*(worker() for _ in range(self._concurrency)))

    async def _one(self, client: httpx.AsyncClient, connection: Connection, number: int) -> None:
        spec = Spec(number % self._num_specs)
        watch = self.watches[number] = Watch()
        outcome = new_outcome(spec)
        began_s = time.monotonic()
        while True:
            try:
                if spec.over_http:
                    self.outcomes[number] = await ask_http(client, spec, watch, outcome)
                else:
                    self.outcomes[number] = await ask_grpc(connection.stub, spec, watch, outcome)
                return
            except Refused as refusal:
                watch.refusals += 1
                await connection.renew()
                if time.monotonic() - began_s > MAX_REFUSED_S:
                    self.outcomes[number] = f"refused for {MAX_REFUSED_S} s: {refusal}"
                    return
                await asyncio.sleep(0.25)
            except Truncated as end:
                watch.truncations += 1
                await connection.renew()
                if not self._resumes:
                    self.outcomes[number] = repr(end)
                    return
                await asyncio.sleep(0.05)
            except Exception as error:
                self.outcomes[number] = repr(error)
                return

    def is_open(self, number: int) -> bool:
        """Whether a stream is in the middle of its answer."""
        watch = self.watches.get(number)
        return watch is not None and bool(watch.last_id) and number not in self.outcomes

    def wrong(self, whole: Clients) -> list[str]:
        """One line for each stream that is not what it was without faults."""
        lines = []
        for number, outcome in self.outcomes.items():
            spec = Spec(number % self._num_specs)
            expected = whole.outcomes[spec.i]
            if outcome != expected:
                api = "HTTP" if spec.over_http else "gRPC"
                lines.append(f"{spec} {spec.kind} {api}: {difference(outcome, expected)}")
        return lines


def difference(outcome: Outcome | str, whole: Outcome) -> str:
    """What is wrong with an answer, in one line."""
    if isinstance(outcome, str):
        return outcome
    for i, (got, wanted) in enumerate(zip(outcome.choices, whole.choices, strict=True)):
        for name in ("token_ids", "text", "logprobs", "finish_reason", "stop_reason"):
            one, other = getattr(got, name), getattr(wanted, name)
            if one != other:
                return f"choice {i}: {name} {one!r}, expected {other!r}"
    return f"usage {outcome.usage}, expected {whole.usage}; done: {outcome.done}"

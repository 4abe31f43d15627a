"""No timer is between a client and its tokens: they arrive while no timer of the event loop can fire.

Real engines, the real bus and the HTTP answer run in one event loop; its clock stands still during the test.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from local_serve import LocalCluster, LocalReplica, start_replica

from quire.cluster.http.http_body import parse_body
from quire.cluster.http.http_completions import CompletionRequest
from quire.cluster.http.http_generation import GenerationResponse
from quire.replica.builtin_model import CHECKPOINT
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.service import RouterService
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer

LIMITS = dict(num_blocks=256, max_model_len=2048, num_threads=1)
GIVE_UP_S = 60.0
LONG = "The harbour at night, and every boat in it. " * 100  # tokenised in a thread


@pytest.fixture(scope="module")
def replicas(runner) -> Iterator[list[LocalReplica]]:
    with pytest.MonkeyPatch.context() as patch:
        replicas = [runner.run(start_replica(name, patch, **LIMITS)) for name in "ab"]
        yield replicas
    for replica in replicas:
        replica.engine.close()


@contextmanager
def stopped_clock(loop: asyncio.AbstractEventLoop) -> Iterator[threading.Event]:
    """No timer of the loop fires in the block; after `GIVE_UP_S` they do again, and the event is set."""
    given_up = threading.Event()
    now_s, time = loop.time(), loop.time

    def go_on() -> None:
        loop.time = time
        loop.call_soon_threadsafe(lambda: None)  # it may be waiting for what never comes

    def give_up() -> None:
        given_up.set()
        go_on()

    watch = threading.Timer(GIVE_UP_S, give_up)
    loop.time = lambda: now_s
    watch.start()
    try:
        yield given_up
    finally:
        watch.cancel()
        go_on()


async def _never() -> Any:
    await asyncio.get_running_loop().create_future()


async def stream(service: RouterService, prompt: str, begun: asyncio.Event) -> list[bytes]:
    """The parts of an HTTP answer; `begun` is set when the first is handed to the server."""
    fields = {"model": "quire", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "seed": 1}
    body = parse_body(CompletionRequest, fields | {"stream": True})
    parts: list[bytes] = []

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            parts.append(message["body"])
            begun.set()

    await GenerationResponse(service, body, body.to_request(prompt[:20]))({}, _never, send)
    return parts


async def begins(event: asyncio.Event, task: asyncio.Task) -> None:
    """Wait for a stream's first byte. A stream that fails before it raises here, instead of never setting the event."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
    if not event.is_set():
        waiting.cancel()
        await task
        raise AssertionError("the stream ended without a byte")


@pytest.mark.parametrize("policy", ["slo", "round_robin"])
def test_tokens_come_while_no_timer_fires(runner, replicas, policy):
    async def run() -> None:
        cluster = LocalCluster(replicas, ReplicaTable(PrefixIndex()))
        service = RouterService(
            ModelFacts(name="quire", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
            router_id=cluster.router_id,
            tokenizer=AsyncTokenizer(TextTokenizer.load(CHECKPOINT), num_threads=1),
            template=None,
            table=cluster.table,
            policy=make_policy(policy),
            transport=cluster.bus,
        )
        await cluster.start()
        loop = asyncio.get_running_loop()
        with stopped_clock(loop) as given_up:
            timer = loop.create_task(asyncio.sleep(0.001))
            alone = asyncio.Event()
            first = loop.create_task(stream(service, "A lone request", alone))
            await begins(alone, first)  # on an idle engine
            begun = [asyncio.Event() for _ in range(6)]
            prompts = [f"{i} {LONG if i % 2 else 'short'}" for i in range(6)]
            others = [  # While another one runs.
                loop.create_task(stream(service, prompt, event))
                for prompt, event in zip(prompts, begun, strict=True)
            ]
            for event, task in zip(begun, others, strict=True):
                await begins(event, task)
            answers = await asyncio.gather(first, *others)
            assert not given_up.is_set(), "something waited on a timer"
            assert not timer.done(), "the clock did not stand still"
        await timer
        for parts in answers:
            assert parts[-1].endswith(b"data: [DONE]\n\n")
            assert b"".join(parts).count(b'"text":') > 6
        await cluster.stop()

    runner.run(run())

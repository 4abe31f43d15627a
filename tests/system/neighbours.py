"""Small requests in a steady rhythm, over HTTP and gRPC: `neighbours.py HTTP_PORT GRPC_PORT`, until its input ends.

In a process of its own, so that the hostile clients do not count for its times. It prints a JSON object. `answers` has
the kind of each request, when it was sent (`time.monotonic`), the seconds that it took, and what went wrong. `waits`
has the times in which this process had something to do and no core, from and until.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

import grpc
import httpx
from patient_channel import aio_channel, was_not_sent

from quire.protos import generation_pb2, generation_pb2_grpc

PAUSE_S = 0.1
WATCH_PERIOD_S = 0.02
NUM_TOKENS = 2
BODY = {"prompt": "The harbour", "max_tokens": NUM_TOKENS, "ignore_eos": True}
TIMEOUT_S = 60


async def once(client: httpx.AsyncClient) -> str:
    """A whole answer on a kept connection."""
    answer = await client.post("/v1/completions", json=BODY)
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text[:200]}"
    return "" if answer.json()["usage"]["completion_tokens"] == NUM_TOKENS else answer.text[:200]


async def on_a_new_connection(url: str) -> str:
    """A stream."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        answer = await client.post("/v1/completions", json={**BODY, "stream": True})
    return "" if answer.text.endswith("data: [DONE]\n\n") else answer.text[-200:]


async def over_grpc(address: str) -> str:
    request = generation_pb2.GenerateRequest(prompt="The harbour", ignore_eos=True)
    request.sampling.max_tokens = NUM_TOKENS
    while True:
        async with aio_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            try:
                answer = await stub.GenerateOnce(request, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if not was_not_sent(error):
                    return f"{error.code()}: {error.details()}"
            else:
                return "" if answer.usage.completion_tokens == NUM_TOKENS else str(answer)


async def main(http_port: int, grpc_port: int) -> None:
    answers: list[tuple[str, float, float, str]] = []
    waits: list[tuple[float, float]] = []
    ended = asyncio.Event()

    async def user(kind: str, ask: Callable[[], Awaitable[str]]) -> None:
        while not ended.is_set():
            began_s = time.monotonic()
            try:
                error = await ask()
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            answers.append((kind, began_s, time.monotonic() - began_s, error))
            await asyncio.sleep(PAUSE_S)

    async def watch() -> None:
        while not ended.is_set():
            due_s = time.monotonic() + WATCH_PERIOD_S
            await asyncio.sleep(WATCH_PERIOD_S)
            waits.append((due_s, time.monotonic()))

    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    url, address = f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}"
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        await asyncio.gather(
            user("HTTP", lambda: once(client)),
            user("HTTP, a stream on a new connection", lambda: on_a_new_connection(url)),
            watch(),
            user("gRPC on a new connection", lambda: over_grpc(address)),
        )
    print(json.dumps({"answers": answers, "waits": waits}))


asyncio.run(main(*map(int, sys.argv[1:])))

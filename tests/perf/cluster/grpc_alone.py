"""A gRPC server that only sends prepared messages: the CPU time of grpcio itself for a streamed message.

Each stream gets one prepared message per step from its own queue, without frames, router, Serve or proxy. Python only
runs a queue and a generator per stream and one timer, so the result is a lower bound for any server that uses grpcio's
asyncio API.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import grpc
import uvloop

from quire.cluster.local.ports import free_ports
from quire.protos import generation_pb2 as pb

_METHOD = "quire.v1.Generation", "Generate"
_TOKEN = pb.GenerateResponse(text=" a", token_ids=[1]).SerializeToString()


class Pacemaker:
    """Gives every stream a message in each step."""

    def __init__(self, step_s: float):
        self._step_s = step_s
        self._streams: set[asyncio.Queue[bytes]] = set()

    async def run(self) -> None:
        next_s = time.perf_counter()
        while True:
            next_s += self._step_s
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
            for stream in self._streams:
                stream.put_nowait(_TOKEN)

    async def generate(
        self, data: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Send one message per requested token; the last one has the count."""
        num_tokens = pb.GenerateRequest.FromString(data).sampling.max_tokens
        messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._streams.add(messages)
        try:
            for _ in range(num_tokens):
                yield await messages.get()
        finally:
            self._streams.remove(messages)
        usage = pb.Usage(completion_tokens=num_tokens)
        yield pb.GenerateResponse(usage=usage).SerializeToString()


async def serve(port: int, step_s: float) -> None:
    """Serve until the process ends; prints a line when the server listens."""
    pacemaker, server = Pacemaker(step_s), grpc.aio.server()
    service, method = _METHOD
    handler = grpc.unary_stream_rpc_method_handler(pacemaker.generate)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("listens", flush=True)
    await pacemaker.run()


@contextmanager
def grpc_alone(step_s: float) -> Iterator[tuple[int, int]]:
    """Run the server in its own process; yields its port and process id."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tests.perf.cluster.grpc_alone", str(port), str(step_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout.readline() != "listens\n":
                raise RuntimeError(f"{' '.join(command)}: ended with {process.wait()}")
            yield port, process.pid
        finally:
            process.terminate()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2])))

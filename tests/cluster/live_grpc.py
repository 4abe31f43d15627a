"""The gRPC front end on a real channel, called as Ray Serve calls it.

The methods get Serve's own context. Its code, details and metadata reach the client at the end of the call (`direct`:
behind HAProxy) or with each message (`proxy`: behind Ray's own proxy).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from ray.serve.grpc_util import RayServegRPCContext

from quire.cluster.api_common.watchers import Watchers
from quire.cluster.auth.access_control import AccessControl
from quire.cluster.grpc import grpc_servicers
from quire.cluster.grpc.grpc_api import GrpcApi
from quire.protos import control_pb2_grpc, generation_pb2, generation_pb2_grpc

MODES = ("direct", "proxy")
UNARY = (
    "GenerateOnce",
    "Render",
    "Tokenize",
    "Detokenize",
    "Embed",
    "GetModelInfo",
    "ListAdapters",
    "LoadAdapter",
    "UnloadAdapter",
    "GetLoads",
    "Check",
)
STREAMING = ("Generate", "WatchCache", "WatchRouter", "Watch")


class Servicer:
    """Calls a `GrpcApi` as Serve does (ray.serve._private, `replica.py` and `proxy.py`)."""

    List = None  # in newer health protos; not served

    def __init__(self, api: GrpcApi, mode: str):
        for name in UNARY:
            setattr(self, name, self._unary(getattr(api, name)))
        for name in STREAMING:
            setattr(self, name, self._streaming(getattr(api, name), mode))

    def _unary(self, method: Callable) -> Callable:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            serve_context = RayServegRPCContext(context)
            result = await method(request, grpc_context=serve_context)
            serve_context._set_on_grpc_context(context)
            return result

        return call

    def _streaming(self, method: Callable, mode: str) -> Callable:
        async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            serve_context = RayServegRPCContext(context)
            responses = method(request, grpc_context=serve_context)
            try:
                async for response in responses:
                    if mode == "proxy":
                        serve_context._set_on_grpc_context(context)
                    yield response
                if mode == "direct":
                    serve_context._set_on_grpc_context(context)
            except Exception:
                context.set_code(serve_context.code() or grpc.StatusCode.INTERNAL)
                context.set_details(serve_context.details() or "unset")
            finally:
                await responses.aclose()

        return call


@dataclass
class Clients:
    """Stubs on one channel, and the server's port."""

    port: int
    channel: grpc.aio.Channel
    generation: generation_pb2_grpc.GenerationStub
    control: control_pb2_grpc.ControlStub
    health: health_pb2_grpc.HealthStub


@asynccontextmanager
async def serving(
    service: Any,
    mode: str,
    options: Sequence[tuple[str, int]] = (),
    watchers: Watchers | None = None,
    access: AccessControl | None = None,
) -> AsyncIterator[Clients]:
    api = GrpcApi()
    api.service = service
    api.access = access
    api.watchers = watchers or Watchers(256, 64)
    api.is_direct_call = lambda: mode == "direct"
    server = grpc.aio.server(options=options)
    servicer = Servicer(api, mode)
    grpc_servicers.add_GenerationServicer_to_server(servicer, server)
    grpc_servicers.add_ControlServicer_to_server(servicer, server)
    grpc_servicers.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Clients(
            port,
            channel,
            generation_pb2_grpc.GenerationStub(channel),
            control_pb2_grpc.ControlStub(channel),
            health_pb2_grpc.HealthStub(channel),
        )
    await server.stop(None)


def run(
    service: Any,
    mode: str,
    body: Callable[[Clients], Awaitable[Any]],
    options: Sequence[tuple[str, int]] = (),
) -> Any:
    async def main() -> Any:
        async with serving(service, mode, options) as clients:
            return await asyncio.wait_for(body(clients), 60)

    return asyncio.run(main())


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    sampling = generation_pb2.SamplingOptions(**fields.pop("sampling", {"max_tokens": 8}))
    fields = fields or {"prompt": "once upon"}
    return generation_pb2.GenerateRequest(sampling=sampling, **fields)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error of a unary or streaming call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)

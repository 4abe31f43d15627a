"""Both front ends of a router, on real sockets of this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import live_grpc
import uvicorn

from quire.cluster.api_common.watchers import Watchers
from quire.cluster.http.http_api import build_app
from quire.cluster.tls.listener_process import RouterAddress


@contextlib.asynccontextmanager
async def router(
    service: Any, seen: list[dict[str, str]], watchers: Watchers | None = None
) -> AsyncIterator[RouterAddress]:
    """Both front ends of a router on free ports; yields its address. `seen` gets the headers of each HTTP request."""
    app = build_app(lambda: service, max_body_bytes=1 << 16)

    async def with_health(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/-/healthz":  # Ray answers it
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"success"})
            return
        seen.append({k.decode(): v.decode() for k, v in scope["headers"]})
        await app(scope, receive, send)

    config = uvicorn.Config(with_health, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    async with live_grpc.serving(service, "direct", watchers=watchers) as clients:
        yield RouterAddress("127.0.0.1", listener.getsockname()[1], clients.port)
    server.should_exit = server.force_exit = True
    await serving

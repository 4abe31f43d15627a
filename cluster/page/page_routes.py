"""The routes of the live page.

```
GET /ui                          the page
GET /ui/page.css, /ui/page.js    its style and its script
GET /ui/state                    the state of the routers: JSON, or server-sent events if `Accept` asks for them
```

The page loads nothing from other hosts, and a browser runs no script in it but `page.js` (`_PAGE_HEADERS`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.cluster.api_common.watchers import FORWARDED_FOR, Watchers, client_of
from quire.cluster.auth.keyed_service import key_name
from quire.cluster.http.answer_response import send_bytes, until_disconnect
from quire.cluster.page.page_state import StateFeed
from quire.protos.errors import shown
from quire.router.types import Service

logger = logging.getLogger("ray.serve")

EVENTS = "text/event-stream"
# Time between two states of one stream, and bytes per second that it may take: a larger state is sent more rarely.
PERIOD_S = 0.5
MAX_BYTES_PER_S = 64 * 1024
# A viewer that leaves an event unread for this time is disconnected.
SLOW_VIEWER_S = 10.0
# After this time a stream ends and the page opens another one. So a revoked key loses the page.
MAX_STREAM_S = 600.0

_FOLDER = Path(__file__).parent
_PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_STATE_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "x-accel-buffering": "no",  # otherwise nginx buffers the events
    "x-content-type-options": "nosniff",
}


class StateEvents(Response):
    """Sends the state of the routers, again and again, until the viewer leaves.

    Each event has the whole state, so a slow viewer gets fewer events and nothing waits in a queue for it.

    Parameters
    ----------
    read
        Returns the state as JSON.
    watchers
        Counts the streams of all clients.
    client, viewer
        The address for `watchers`, and the name for the log.
    """

    media_type = EVENTS

    def __init__(
        self, read: Callable[[], Awaitable[bytes]], watchers: Watchers, client: str, viewer: str
    ):
        super().__init__(headers=_STATE_HEADERS)
        del self.headers["content-length"]
        self._read = read
        self._watchers = watchers
        self._client = client
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watchers.watching(self._client):
            await until_disconnect(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        state = await self._read()
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
        )
        end_s = time.monotonic() + MAX_STREAM_S
        while time.monotonic() < end_s:
            event = b"data: %s\n\n" % state
            try:
                async with asyncio.timeout(SLOW_VIEWER_S):
                    await send_bytes(event, send)
            except TimeoutError:
                logger.warning(
                    "%s left the page's events unread for %g s and is disconnected",
                    self._viewer,
                    SLOW_VIEWER_S,
                )
                return
            await asyncio.sleep(max(PERIOD_S, len(event) / MAX_BYTES_PER_S))
            state = await self._read()
        await send_bytes(b"", send, is_last=True)


def add_routes(
    app: FastAPI, get_service: Callable[[], Service], max_body_bytes: int, keepalive_s: float
) -> None:
    """Add the routes to the application; the parameters are those of `http_api.build_app`."""
    feed = StateFeed()

    def add_file(path: str, name: str, media_type: str) -> None:
        content = (_FOLDER / name).read_bytes()

        @app.get(path, include_in_schema=False)
        async def file() -> Response:
            return Response(content, headers=_PAGE_HEADERS, media_type=media_type)

    add_file("/ui", "page.html", "text/html")
    add_file("/ui/page.css", "page.css", "text/css")
    add_file("/ui/page.js", "page.js", "text/javascript")

    @app.get("/ui/state", include_in_schema=False)
    async def state(request: Request) -> Response:
        service = get_service()
        if EVENTS not in request.headers.get("accept", ""):
            return Response(
                await feed.state(service), headers=_STATE_HEADERS, media_type="application/json"
            )
        host, port = request.client or ("an unknown address", 0)
        client = client_of(f"{host}:{port}", request.headers.getlist(FORWARDED_FOR))
        viewer = f"{key_name(service)} at {shown(client)}"
        watchers: Watchers = app.state.get_watchers()
        return StateEvents(lambda: feed.state(service), watchers, client, viewer)

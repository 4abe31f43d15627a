"""The HTTP API on a real socket of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from quire.cluster.http.http_api import build_app


@contextmanager
def serving(service: Any, **options: Any) -> Iterator[httpx.Client]:
    """A client of an application with these options of `build_app`."""
    app = build_app(lambda: service, max_body_bytes=1 << 16, **options)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=30, verify=False) as client:
            yield client
    finally:
        server.should_exit = server.force_exit = True
        thread.join()

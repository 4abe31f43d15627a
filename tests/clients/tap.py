"""A proxy on the loopback between an agent and the server: it narrows requests and records shapes, never texts.

An agent leaves the choice of a tool to the model, and a small model chooses none. So a test narrows requests: one
tool's argument has one value, and the first turn has to call this tool. The engine writes the call under its grammar,
and the agent can run nothing but what the test allows.

The agent also has the tap as its proxy for all other hosts. The tap refuses these requests and counts them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 300
_CHUNK_BYTES = 65536
_NOT_FORWARDED = {"host", "content-length", "connection", "accept-encoding", "transfer-encoding"}

# Changes a request's body in place.
Narrow = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request as the agent sent it, and its answer, without their texts."""

    path: str
    sent: dict[str, Any]
    status: int
    answered: dict[str, Any]


@dataclass(slots=True)
class Record:
    """The exchanges in the order in which they ended."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)
    elsewhere: Counter[str] = field(default_factory=Counter)  # refused requests by HOST:PORT

    def environment(self) -> dict[str, str]:
        """The variables by which a program takes the tap as its proxy."""
        names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
        return dict.fromkeys(names, self.url) | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def sent_shape(body: bytes) -> dict[str, Any]:
    """Return the size of a request, the names of its fields, and its tools and items by type."""
    if not body:
        return {"bytes": 0}
    value = json.loads(body)
    shape: dict[str, Any] = {"bytes": len(body), "fields": sorted(value)}
    if tools := value.get("tools"):
        shape["tools"] = dict(Counter(tool.get("type", "custom") for tool in tools))
    items = value.get("input") or value.get("messages") or []
    shape["items"] = dict(Counter(kind for item in items for kind in _kinds(item)))
    return shape


def _kinds(item: dict[str, Any]) -> list[str]:
    """The types of what an item of a conversation holds."""
    role, content = item.get("role"), item.get("content")
    if role is None:
        return [item["type"]]
    if isinstance(content, str):
        return [f"{role} text"]
    return [f"{role} {part['type']}" for part in content]


def answer_shape(content_type: str, body: bytes) -> dict[str, Any]:
    """Return the size of an answer, and how many events of each type a stream has."""
    shape: dict[str, Any] = {"bytes": len(body)}
    if content_type.startswith("text/event-stream"):
        lines = body.decode().splitlines()
        names = (line.removeprefix("event: ") for line in lines if line.startswith("event: "))
        shape["events"] = dict(Counter(names))
    elif body and content_type.startswith("application/json"):
        value = json.loads(body)
        shape["fields"] = sorted(value)
        if "error" in value:
            shape["error"] = value["error"]["message"]
    return shape


@contextmanager
def tap(server: str, narrow: Narrow) -> Iterator[Record]:
    """Run a tap before `server` (http://HOST:PORT/PREFIX) during the block."""
    to = urlsplit(server)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _refuse(self) -> None:
            with lock:
                record.elsewhere[urlsplit(self.path).netloc or self.path] += 1
            self.close_connection = True
            self.send_error(403)

        def _forward(self) -> None:
            if not self.path.startswith("/"):
                return self._refuse()
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            narrowed = body
            if body:
                value = json.loads(body)
                narrow(value)
                narrowed = json.dumps(value).encode()
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _NOT_FORWARDED}
            connection = http.client.HTTPConnection(to.hostname or "", to.port, timeout=_TIMEOUT_S)
            try:
                connection.request(self.command, to.path + self.path, narrowed, headers)
                self._answer(connection.getresponse(), body)
            except OSError as error:
                self.close_connection = True
                with contextlib.suppress(OSError):  # the agent has gone away
                    self.send_error(502, str(error))
            finally:
                connection.close()

        def _answer(self, answer: http.client.HTTPResponse, body: bytes) -> None:
            """Pass the answer on as it comes, and record the exchange before its end is seen."""
            content_type = answer.getheader("content-type", "")
            self.close_connection = True
            self.send_response(answer.status)
            self.send_header("content-type", content_type)
            self.send_header("connection", "close")
            self.end_headers()
            parts = []
            while part := answer.read1(_CHUNK_BYTES):
                parts.append(part)
                self.wfile.write(part)
            shapes = sent_shape(body), answer.status, answer_shape(content_type, b"".join(parts))
            with lock:
                record.exchanges.append(Exchange(urlsplit(self.path).path, *shapes))

        do_CONNECT = _refuse
        do_GET = do_HEAD = do_POST = _forward

        def log_message(self, *args: object) -> None:
            """Print nothing: the standard output has outcomes."""

    lock = threading.Lock()
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    record = Record(f"http://127.0.0.1:{listener.server_port}")
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield record
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()

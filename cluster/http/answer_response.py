"""Runs one generation request over HTTP, from the call of the router to the last byte of the answer.

The API's own module subclasses `AnswerResponse` and says how its events, its whole answer and its errors look.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.cluster.api_common.front_end import (
    Answer,
    collect,
    explain_headers,
    internal_error,
    renamed,
)
from quire.cluster.http.http_answers import json_response
from quire.cluster.http.sse import KEEP_ALIVE
from quire.protos.errors import QuireError
from quire.router.types import GenerationRequest, GenerationStream, Service


class AnswerResponse(Response, ABC):
    """Runs a request and sends its answer, as one JSON object or as server-sent events.

    One task runs the whole request. So a disconnect at any time, even before the first token, ends the request through
    one `finally`.

    Parameters
    ----------
    service
        The router.
    request
        The router's request.
    names
        Map from the router's names of fields to the client's names.
    streams
        Whether the client wants events.
    keepalive_s
        Interval of the comments that a stream sends until its first token; 0: no comments.
    """

    keep_alive: ClassVar[bytes] = KEEP_ALIVE  # sent to keep a silent stream's connection

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        names: Mapping[str, str],
        *,
        streams: bool,
        keepalive_s: float = 0.0,
    ):
        super().__init__()
        self._service = service
        self._request = request
        self._names = names
        self._streams = streams
        self._keepalive_s = keepalive_s
        self._has_begun = False  # status and headers are sent
        # Events that are sent together with those that end the stream.
        self._unsent = b""

    def _begin_answer(self) -> None:
        """Read what the answer needs of the service: after the answer all replicas may be gone."""

    @abstractmethod
    async def _send_events(self, stream: GenerationStream, send: Send) -> bytes:
        """Send the events of a stream; return those that end it.

        An error of the stream may pass: `_error_event` encodes it.
        """

    async def _collect(self, stream: GenerationStream) -> list[Answer]:
        """Collect the answers for `_complete`, one for each choice."""
        return await collect(stream, len(self._request.marks))

    @abstractmethod
    def _complete(self, stream: GenerationStream, answers: list[Answer]) -> Any:
        """Return the whole answer as JSON."""

    def _own_headers(self, stream: GenerationStream, *, complete: bool) -> dict[str, str]:
        """Return the answer's own headers; `complete` as in `explain_headers`."""
        return explain_headers(stream.explain, complete=complete)

    @abstractmethod
    def _error_event(self, error: QuireError) -> bytes:
        """Encode the last event of a failed stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._streams and self._keepalive_s:
                stream = await self._kept_alive(send)
            else:
                stream = await self._service.generate(self._request)
        except Exception as error:
            if isinstance(error, QuireError):
                error = renamed(error, self._names)
            if not self._has_begun:
                raise error
            await send_bytes(self._event_of(error), send, is_last=True)
            return
        try:
            self._begin_answer()
            if self._streams:
                await self._stream(stream, send)
            else:
                whole = self._complete(stream, await self._collect(stream))
                headers = self._own_headers(stream, complete=True)
                await json_response(whole, headers=headers)(scope, receive, send)
        finally:
            await stream.aclose()

    async def _kept_alive(self, send: Send) -> GenerationStream:
        """Wait for the stream and its first delta; send comments meanwhile."""
        generating = asyncio.ensure_future(self._service.generate(self._request))
        try:
            while not (await asyncio.wait((generating,), timeout=self._keepalive_s))[0]:
                await self._begin({}, send)
                await send_bytes(self.keep_alive, send)
            return generating.result()
        except BaseException:
            await _undo(generating)
            raise

    async def _begin(self, headers: dict[str, str], send: Send) -> None:
        """Send status and headers, once."""
        if self._has_begun:
            return
        self._has_begun = True
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # otherwise nginx buffers the tokens
            **headers,
        }
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(k.encode(), v.encode("latin-1")) for k, v in headers.items()],
            }
        )

    async def _stream(self, stream: GenerationStream, send: Send) -> None:
        """Send the stream's events. `generate` has waited for the first delta, so status and headers are sent now."""
        await self._begin(self._own_headers(stream, complete=False), send)
        try:
            last = await self._send_events(stream, send)
        except Exception as error:
            last = self._event_of(error)
        await send_bytes(self._unsent + last, send, is_last=True)

    def _event_of(self, error: Exception) -> bytes:
        return self._error_event(error if isinstance(error, QuireError) else internal_error(error))


async def send_bytes(body: bytes, send: Send, *, is_last: bool = False) -> None:
    """Send a part of the response's body."""
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _undo(generating: asyncio.Future[GenerationStream]) -> None:
    """Cancel a call of `generate`, or close the stream if the call has returned one."""
    generating.cancel()
    await asyncio.wait((generating,))
    if not generating.cancelled() and generating.exception() is None:
        await generating.result().aclose()


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it when the client disconnects."""
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.create_task(_disconnect(receive))
    is_at_work, has_left = True, False

    def leave(watched: asyncio.Task[None]) -> None:
        nonlocal has_left
        if not watched.cancelled():
            # Retrieve the exception, so that asyncio does not log it: the client has disconnected in any case.
            watched.exception()
        if is_at_work:
            has_left = True
            task.cancel()

    watcher.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        # If another task has cancelled this one too, the cancellation must propagate.
        if not has_left or task.uncancel() > 0:
            raise
    finally:
        is_at_work = False
        watcher.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

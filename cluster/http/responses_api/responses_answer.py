"""The answer of `POST /v1/responses`, whole or as events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from quire.cluster.api_common.front_end import Answer
from quire.cluster.http.answer_response import AnswerResponse, send_bytes
from quire.cluster.http.responses_api.response_events import ResponseEvents
from quire.cluster.http.responses_api.response_object import RESPONSE_ID_PREFIX, constant_part
from quire.cluster.http.responses_api.response_tools import RequestTools
from quire.cluster.http.responses_api.responses_body import ResponsesRequest
from quire.protos.errors import QuireError
from quire.router.types import GenerationRequest, GenerationStream, Service


class ResponsesAnswer(AnswerResponse):
    """Answers a request of the Responses API.

    Parameters
    ----------
    body
        The request's body.
    tools
        The tools of `body`.
    request
        The router's request, made from `body`.
    names
        Map from the router's names of fields to those of the client.

    `service` and `keepalive_s` are those of `AnswerResponse`.
    """

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        tools: RequestTools,
        request: GenerationRequest,
        names: Mapping[str, str],
        *,
        keepalive_s: float = 0.0,
    ):
        super().__init__(
            service, request, names, streams=bool(body.stream), keepalive_s=keepalive_s
        )
        self._body = body
        self._tools = tools
        self._events: ResponseEvents | None = None  # set with the stream

    def _make_events(self, answer_id: str, created_s: int, model: str) -> ResponseEvents:
        constant = constant_part(
            self._body,
            self._tools,
            response_id=RESPONSE_ID_PREFIX + answer_id,
            created_s=created_s,
            model=model,
        )
        return ResponseEvents(constant, answer_id, self._tools.origins)

    def _events_of(self, stream: GenerationStream) -> ResponseEvents:
        origin = stream.origin
        self._events = self._make_events(origin.answer_id, origin.created_s, stream.model)
        return self._events

    async def _send_events(self, stream: GenerationStream, send: Send) -> bytes:
        events = self._events_of(stream)
        self._unsent = events.begin()
        async for delta in stream:
            self._unsent += events.add(delta)
            # The end follows right after the last delta: send both in one message, which costs as much as a token.
            if self._unsent and delta.finish_reason is None:
                chunk, self._unsent = self._unsent, b""
                await send_bytes(chunk, send)
        return events.end(stream.usage)

    async def _collect(self, stream: GenerationStream) -> list[Answer]:
        """Collect the deltas as events do, so that a whole answer equals the last event of a stream."""
        events = self._events_of(stream)
        async for delta in stream:
            events.add(delta)
        events.end(stream.usage)
        return []

    def _complete(self, stream: GenerationStream, answers: list[Answer]) -> dict[str, Any]:
        assert self._events is not None
        return self._events.whole(stream.usage)

    def _error_event(self, error: QuireError) -> bytes:
        events = self._events
        if events is None:
            # Refused after comments: there is no answer whose id the Response could have.
            model = self._request.model or ""
            events = self._make_events(self._request.request_id, int(time.time()), model)
        return events.fail(error)

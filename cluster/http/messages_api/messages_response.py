"""The answer of POST /v1/messages."""

from __future__ import annotations

from typing import Any

from starlette.types import Send

from quire.cluster.api_common.front_end import Answer, Progress
from quire.cluster.http.answer_response import AnswerResponse, send_bytes
from quire.cluster.http.messages_api.message_events import (
    PING,
    BlockAnswer,
    MessageEvents,
    stop_fields,
    usage_answer,
)
from quire.cluster.http.messages_api.messages_errors import error_event, request_id_header
from quire.cluster.http.messages_api.messages_requests import router_names
from quire.cluster.http.messages_api.messages_schema import MessagesBody
from quire.protos.errors import QuireError
from quire.router.types import GenerationRequest, GenerationStream, Service

MESSAGE_ID_PREFIX = "msg_"


class MessagesResponse(AnswerResponse):
    """Answers a request to the Messages API, whole or as events.

    Parameters
    ----------
    body
        The request's body.
    request
        The router's request, made from `body`.
    names
        Map from the router's names of fields to the names of the headers that they came from.

    `service` and `keepalive_s` are those of `AnswerResponse`.
    """

    keep_alive = PING

    def __init__(
        self,
        service: Service,
        body: MessagesBody,
        request: GenerationRequest,
        names: dict[str, str],
        *,
        keepalive_s: float,
    ):
        super().__init__(
            service,
            request,
            {**router_names(body), **names},
            streams=bool(body.stream),
            keepalive_s=keepalive_s,
        )
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"

    async def _send_events(self, stream: GenerationStream, send: Send) -> bytes:
        events = MessageEvents(self._shows_thinking)
        sent = Progress()
        has_begun = False
        async for delta in stream:
            sent.add(delta)
            chunk = events.add(delta)
            if not has_begun:
                has_begun = True
                chunk = events.start(self._message(stream, [], None, None)) + chunk
            # The stream ends right after its last delta: send both in one message, which costs as much as a token.
            if sent.finish_reason is not None:
                self._unsent += chunk
            elif chunk:
                await send_bytes(chunk, send)
        sent.end()
        return events.end(stop_fields(sent.finish_reason, sent.stop_reason), stream.usage)

    async def _collect(self, stream: GenerationStream) -> list[Answer]:
        answer = BlockAnswer(shows_thinking=self._shows_thinking)
        async for delta in stream:
            answer.add(delta)
        answer.end()
        return [answer]

    def _complete(self, stream: GenerationStream, answers: list[Answer]) -> dict[str, Any]:
        """Build a `MessageAnswer`."""
        (answer,) = answers
        assert isinstance(answer, BlockAnswer)
        stop = stop_fields(answer.finish_reason, answer.stop_reason)
        return self._message(stream, answer.content(), **stop)

    def _message(
        self,
        stream: GenerationStream,
        content: list[dict[str, Any]],
        stop_reason: str | None,
        stop_sequence: str | None,
    ) -> dict[str, Any]:
        return {
            "id": MESSAGE_ID_PREFIX + stream.origin.answer_id,
            "type": "message",
            "role": "assistant",
            "model": stream.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage_answer(stream.usage),
        }

    def _own_headers(self, stream: GenerationStream, *, complete: bool) -> dict[str, str]:
        headers = super()._own_headers(stream, complete=complete)
        return {**request_id_header(self._request.request_id), **headers}

    def _error_event(self, error: QuireError) -> bytes:
        return error_event(error, self._request.request_id)

"""One generation request over HTTP, from the call of the router to the last byte of the answer."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.cluster.front_end import Answer, collect, explain_headers, internal_error
from quire.cluster.http_answers import (
    chat_logprobs,
    completion_logprobs,
    json_response,
    usage_answer,
)
from quire.cluster.http_schema import ChatCompletionRequest, CompletionRequest
from quire.cluster.sse import DONE, ChunkEncoder, error_event
from quire.protos.errors import QuireError
from quire.router.types import GenerationRequest, GenerationStream, ModelInfo, Service

GenerationBody = CompletionRequest | ChatCompletionRequest


class GenerationResponse(Response):
    """Runs a request and sends its answer, as one JSON object or as events.

    All of the request's life is in one task, so that a client that leaves at any moment, before
    the first token, too, ends it through one `finally`.
    """

    def __init__(self, service: Service, body: GenerationBody, request: GenerationRequest):
        super().__init__()
        self._service = service
        self._body = body
        self._request = request
        self._chat = isinstance(body, ChatCompletionRequest)
        self._fingerprint = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = await self._service.generate(self._request)
        try:
            # Now, while the replica that answers is known: not after an answer that it may not survive.
            self._fingerprint = _fingerprint(self._service.model_info())
            if self._body.stream:
                await self._send_events(stream, send)
            else:
                answers = await collect(stream, self._request.n)
                headers = explain_headers(stream.explain, complete=True)
                await json_response(self._complete(stream, answers), headers=headers)(
                    scope, receive, send
                )
        finally:
            await stream.aclose()

    async def _send_events(self, stream: GenerationStream, send: Send) -> None:
        """Status and headers go out with the first delta, which `generate` has waited for."""
        encoders = self._encoders(stream)
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would hold tokens back
            **explain_headers(stream.explain, complete=False),
        }
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(k.encode(), v.encode("latin-1")) for k, v in headers.items()],
            }
        )
        try:
            await self._send_deltas(stream, encoders, send)
            last = DONE
            if self._includes_usage():
                last = encoders[0].usage(stream.usage) + DONE
        except QuireError as error:
            last = error_event(error)
        except Exception as error:
            last = error_event(internal_error(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_deltas(
        self, stream: GenerationStream, encoders: list[ChunkEncoder], send: Send
    ) -> None:
        answers = [Answer() for _ in encoders]
        echo = self._echo()
        async for delta in stream:
            answer, encoder = answers[delta.choice], encoders[delta.choice]
            chunk = b""
            if not answer.pieces:
                chunk = encoder.role() if self._chat else b""
                delta = replace(delta, text=echo + delta.text)
            answer.add(delta)
            chunk += encoder.delta(delta, stream.usage)
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        for answer in answers:
            answer.end()

    def _encoders(self, stream: GenerationStream) -> list[ChunkEncoder]:
        """One for each choice."""
        options = self._body.stream_options
        envelope = self._envelope(
            stream, "chat.completion.chunk" if self._chat else "text_completion"
        )
        return [
            ChunkEncoder(
                envelope,
                index=index,
                chat=self._chat,
                include_usage=self._includes_usage(),
                continuous_usage=bool(options and options.continuous_usage_stats),
                token_ids=bool(self._body.return_token_ids),
            )
            for index in range(self._request.n)
        ]

    def _complete(self, stream: GenerationStream, answers: list[Answer]) -> dict[str, Any]:
        """A `Completion` or `ChatCompletion`."""
        return {
            **self._envelope(stream, "chat.completion" if self._chat else "text_completion"),
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage_answer(stream.usage),
        }

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": answer.text}
            choice["logprobs"] = chat_logprobs(answer.logprobs)
        else:
            choice["text"] = self._echo() + answer.text
            choice["logprobs"] = completion_logprobs(answer.logprobs)
        choice["finish_reason"] = answer.finish_reason
        choice["stop_reason"] = answer.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _envelope(self, stream: GenerationStream, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self._chat else "cmpl"
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": stream.created_s,
            "model": stream.model,
            "system_fingerprint": self._fingerprint,
        }

    def _includes_usage(self) -> bool:
        options = self._body.stream_options
        return bool(options and options.include_usage)

    def _echo(self) -> str:
        """The prompt's text if the client wants it in front of the answer."""
        echo = isinstance(self._body, CompletionRequest) and self._body.echo
        return self._request.prompt if echo and isinstance(self._request.prompt, str) else ""


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it when the client leaves."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _fingerprint(info: ModelInfo) -> str:
    """Equal for answers of the same weights in the same number format."""
    key = "\x00".join((info.name, info.revision, info.dtype)).encode()
    return "fp_" + hashlib.blake2b(key, digest_size=5).hexdigest()

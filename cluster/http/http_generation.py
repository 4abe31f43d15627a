"""Handles one generation request over HTTP, from the call of the router to the last byte of the answer."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Coroutine, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.cluster.api_common.front_end import (
    Answer,
    Progress,
    collect,
    explain_headers,
    internal_error,
    renamed,
)
from quire.cluster.http.http_answers import (
    chat_logprobs,
    completion_logprobs,
    json_response,
    prompt_logprobs,
    shifted,
    usage_answer,
    with_top,
)
from quire.cluster.http.http_chats import ChatCompletionRequest
from quire.cluster.http.http_completions import CompletionRequest
from quire.cluster.http.sse import DONE, KEEP_ALIVE, ChunkEncoder, error_event, with_id
from quire.protos.errors import QuireError
from quire.router.request.resume import EventIds
from quire.router.types import (
    GenerationRequest,
    GenerationStream,
    ModelInfo,
    OutputDelta,
    Service,
    TokenScores,
)

CHAT_ID_PREFIX, COMPLETION_ID_PREFIX = ID_PREFIXES = ("chatcmpl-", "cmpl-")
GenerationBody = CompletionRequest | ChatCompletionRequest


class GenerationResponse(Response):
    """Runs a request and sends its answer, as one JSON object or as server-sent events.

    One task runs the whole request. So a disconnect at any time, even before the first token, ends the request through
    one `finally`.

    Parameters
    ----------
    service
        The router.
    body
        The request's body.
    request
        The router's request, made from `body`.
    names
        Map from the router's names of fields to the names of the headers that they came from.
    event_ids
        Whether each event of a stream has an id.
    keepalive_s
        Interval of the comments that a stream sends until its first token; 0: no comments.
    """

    def __init__(
        self,
        service: Service,
        body: GenerationBody,
        request: GenerationRequest,
        names: Mapping[str, str] | None = None,
        *,
        event_ids: bool = False,
        keepalive_s: float = 0.0,
    ):
        super().__init__()
        self._service = service
        self._body = body
        self._request = request
        self._chat = isinstance(body, ChatCompletionRequest)
        self._event_ids = event_ids
        self._keepalive_s = keepalive_s
        self._has_begun = False  # status and headers are sent
        self._fingerprint = ""
        self._names = {**body.router_names(), **(names or {})}
        # The events of the last delta, which are sent together with the events that end the stream.
        self._unsent = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._body.stream and self._keepalive_s:
                stream = await self._kept_alive(send)
            else:
                stream = await self._service.generate(self._request)
        except Exception as error:
            if isinstance(error, QuireError):
                error = renamed(error, self._names)
            if not self._has_begun:
                raise error
            await self._send_last(_error_event(error), send)
            return
        try:
            # Ask for the model's facts now: replicas report them, and after the answer all replicas may be gone.
            self._fingerprint = _fingerprint(self._service.model_info())
            if self._body.stream:
                await self._send_events(stream, send)
            else:
                answers = await collect(stream, len(self._request.marks))
                headers = explain_headers(stream.explain, complete=True)
                await json_response(self._complete(stream, answers), headers=headers)(
                    scope, receive, send
                )
        finally:
            await stream.aclose()

    async def _kept_alive(self, send: Send) -> GenerationStream:
        """Wait for the stream and its first delta; send comments meanwhile."""
        generating = asyncio.ensure_future(self._service.generate(self._request))
        try:
            while not (await asyncio.wait((generating,), timeout=self._keepalive_s))[0]:
                await self._begin({}, send)
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
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

    async def _send_last(self, events: bytes, send: Send) -> None:
        await send({"type": "http.response.body", "body": events, "more_body": False})

    async def _send_events(self, stream: GenerationStream, send: Send) -> None:
        """Send the stream's events. `generate` has waited for the first delta, so status and headers are sent now."""
        encoders = self._encoders(stream)
        await self._begin(explain_headers(stream.explain, complete=False), send)
        try:
            await self._send_deltas(stream, encoders, send)
            last = DONE
            if self._includes_usage():
                last = encoders[0].usage(stream.usage) + DONE
        except Exception as error:
            last = _error_event(error)
        await self._send_last(self._unsent + last, send)

    async def _send_deltas(
        self, stream: GenerationStream, encoders: list[ChunkEncoder], send: Send
    ) -> None:
        marks = self._request.marks
        ids = EventIds(stream.origin, marks) if self._event_ids else None
        sent = [Progress() for _ in encoders]
        silent = {choice for choice, mark in enumerate(marks) if not mark.finished}
        unfinished = len(silent)
        async for delta in stream:
            choice = delta.choice
            encoder = encoders[choice]
            chunk = b""
            if choice in silent:
                silent.remove(choice)
                first = self._first_chunk(encoder, choice // self._request.n, stream)
                # The client of a resumed stream has this chunk already if the choice had begun.
                if not marks[choice].begun:
                    chunk = first if ids is None else with_id(ids.begin(choice), first)
            sent[choice].add(delta)
            event = encoder.delta(delta, stream.usage)
            chunk += event if ids is None else with_id(ids.after(delta), event)
            unfinished -= delta.finish_reason is not None
            # The stream ends right after its last delta: send both in one message, which costs as much as a token.
            if not unfinished:
                self._unsent += chunk
            elif chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        for progress, mark in zip(sent, marks, strict=True):
            if not mark.finished:
                progress.end()

    def _first_chunk(self, encoder: ChunkEncoder, prompt: int, stream: GenerationStream) -> bytes:
        """Encode the chunk before the first token of a choice: role, echoed prompt, prompt log-probabilities."""
        scores = stream.scores_of_prompt(prompt)
        asked = self._prompt_logprobs(scores)
        if self._chat:
            return encoder.role(asked)
        echoed = self._echoed_scores(scores)
        text = self._echo(prompt, scores)
        chunk = b""
        if text or echoed is not None or asked is not None:
            chunk = encoder.delta(OutputDelta(text, [], logprobs=echoed), stream.usage, asked)
        encoder.echoed(len(text))
        return chunk

    def _prompt_logprobs(
        self, scores: list[TokenScores] | None
    ) -> list[dict[str, Any] | None] | None:
        num_top = self._body.prompt_logprobs
        return None if num_top is None or scores is None else prompt_logprobs(scores, num_top)

    def _echoed_scores(self, scores: list[TokenScores] | None) -> list[TokenScores] | None:
        """The prompt's scores, if the answer's log-probabilities begin with them (`echo` with `logprobs`)."""
        body = self._body
        if not isinstance(body, CompletionRequest) or not body.echo or body.logprobs is None:
            return None
        return None if scores is None else with_top(scores, body.logprobs)

    def _encoders(self, stream: GenerationStream) -> list[ChunkEncoder]:
        """Make one encoder for each choice."""
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
            for index in range(len(self._request.marks))
        ]

    def _complete(self, stream: GenerationStream, answers: list[Answer]) -> dict[str, Any]:
        """Build a `Completion` or `ChatCompletion`."""
        choices: list[dict[str, Any]] = []
        num_generated = self._request.n
        num_dropped = self._body.num_dropped_choices()
        for prompt in range(len(answers) // num_generated):
            scores = stream.scores_of_prompt(prompt)
            of_prompt = answers[prompt * num_generated :][:num_generated]
            if num_dropped:
                of_prompt = _best(of_prompt, num_generated - num_dropped, self._body.logprobs)
            for answer in of_prompt:
                choices.append(self._choice(len(choices), answer, prompt, scores))
        whole = {
            **self._envelope(stream, "chat.completion" if self._chat else "text_completion"),
            "choices": choices,
            "usage": usage_answer(stream.usage),
        }
        if self._chat and (asked := self._prompt_logprobs(stream.prompt_scores)) is not None:
            whole["prompt_logprobs"] = asked
        return whole

    def _choice(
        self, index: int, answer: Answer, prompt: int, scores: list[TokenScores] | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": answer.text}
            choice["logprobs"] = chat_logprobs(answer.logprobs)
        else:
            echo = self._echo(prompt, scores)
            choice["text"] = echo + answer.text
            of_answer = answer.logprobs
            if of_answer is not None:
                of_answer = shifted(of_answer, len(echo))
                of_answer = [*(self._echoed_scores(scores) or ()), *of_answer]
            choice["logprobs"] = completion_logprobs(of_answer)
            if (asked := self._prompt_logprobs(scores)) is not None:
                choice["prompt_logprobs"] = asked
        choice["finish_reason"] = answer.finish_reason
        choice["stop_reason"] = answer.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _envelope(self, stream: GenerationStream, kind: str) -> dict[str, Any]:
        prefix = CHAT_ID_PREFIX if self._chat else COMPLETION_ID_PREFIX
        return {
            "id": prefix + stream.origin.answer_id,
            "object": kind,
            "created": stream.origin.created_s,
            "model": stream.model,
            "system_fingerprint": self._fingerprint,
        }

    def _includes_usage(self) -> bool:
        options = self._body.stream_options
        return bool(options and options.include_usage)

    def _echo(self, prompt: int, scores: list[TokenScores] | None) -> str:
        """The prompt's text if the request has `echo`, else an empty text."""
        if not isinstance(self._body, CompletionRequest) or not self._body.echo:
            return ""
        given = self._request.prompts[prompt] if self._request.prompts else self._request.prompt
        if isinstance(given, str):
            return given
        utf8 = b"".join(of_token.token.utf8 for of_token in scores or ())
        return utf8.decode(errors="replace")


def _best(answers: list[Answer], num: int, num_logprobs: int | None) -> list[Answer]:
    """Return the `num` answers with the highest mean log-probability, best first.

    Their log-probabilities are removed if the client has not asked for them.
    """

    def mean_logprob(answer: Answer) -> float:
        logprobs = (of_token.token.logprob for of_token in answer.logprobs or ())
        scores = [logprob for logprob in logprobs if logprob is not None]
        return sum(scores) / len(scores) if scores else -math.inf

    best = sorted(answers, key=mean_logprob, reverse=True)[:num]
    if num_logprobs is None:
        for answer in best:
            answer.logprobs = None
    return best


def _error_event(error: Exception) -> bytes:
    return error_event(error if isinstance(error, QuireError) else internal_error(error))


async def _undo(generating: asyncio.Future[GenerationStream]) -> None:
    """Cancel a call of `generate`, or close the stream if the call has returned one."""
    generating.cancel()
    await asyncio.wait((generating,))
    if not generating.cancelled() and generating.exception() is None:
        await generating.result().aclose()


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
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


def _fingerprint(info: ModelInfo) -> str:
    """OpenAI's `system_fingerprint`: equal for answers of the same model, revision and dtype."""
    key = "\x00".join((info.name, info.revision, info.dtype)).encode()
    return "fp_" + hashlib.blake2b(key, digest_size=5).hexdigest()

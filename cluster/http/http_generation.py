"""The answers of completions and chat completions, in OpenAI's form."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from quire.cluster.api_common.front_end import (
    Answer,
    Progress,
)
from quire.cluster.http.answer_response import AnswerResponse, send_bytes
from quire.cluster.http.http_answers import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    shifted,
    usage_answer,
    with_top,
)
from quire.cluster.http.http_chats import ChatCompletionRequest
from quire.cluster.http.http_completions import CompletionRequest
from quire.cluster.http.http_tools import call_answer
from quire.cluster.http.sse import DONE, ChunkEncoder, error_event, with_id
from quire.protos.errors import QuireError
from quire.router.request.resume import EventIds
from quire.router.scored_token import TokenScores
from quire.router.status_types import ModelInfo
from quire.router.types import GenerationRequest, GenerationStream, OutputDelta, Service

CHAT_ID_PREFIX, COMPLETION_ID_PREFIX = ID_PREFIXES = ("chatcmpl-", "cmpl-")
GenerationBody = CompletionRequest | ChatCompletionRequest


class GenerationResponse(AnswerResponse):
    """Answers a completion or a chat completion in OpenAI's form.

    Parameters
    ----------
    body
        The request's body.
    request
        The router's request, made from `body`.
    names
        Map from the router's names of fields to the names of the headers that they came from.
    event_ids
        Whether each event of a stream has an id.

    `service` and `keepalive_s` are those of `AnswerResponse`.
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
        super().__init__(
            service,
            request,
            {**body.router_names(), **(names or {})},
            streams=bool(body.stream),
            keepalive_s=keepalive_s,
        )
        self._body = body
        self._chat = isinstance(body, ChatCompletionRequest)
        self._event_ids = event_ids
        # Set with the stream: replicas report the model's facts, and after the answer all replicas may be gone.
        self._fingerprint = ""

    def _begin_answer(self) -> None:
        self._fingerprint = _fingerprint(self._service.model_info())

    async def _send_events(self, stream: GenerationStream, send: Send) -> bytes:
        encoders = self._encoders(stream)
        await self._send_deltas(stream, encoders, send)
        return (encoders[0].usage(stream.usage) if self._includes_usage() else b"") + DONE

    def _error_event(self, error: QuireError) -> bytes:
        return error_event(error)

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
                await send_bytes(chunk, send)
        for progress, mark in zip(sent, marks, strict=True):
            if not mark.finished:
                progress.end()

    def _first_chunk(self, encoder: ChunkEncoder, prompt: int, stream: GenerationStream) -> bytes:
        """Encode the chunk before the first token of a choice: role, echoed prompt, prompt log-probabilities."""
        scores = stream.scores_of_prompt(prompt)
        asked = self._prompt_logprobs(scores)
        if self._chat:
            return encoder.role(self._content(""), asked)
        echoed = self._echoed_scores(scores)
        text = self._echo(prompt, scores)
        chunk = b""
        if text or echoed is not None or asked is not None:
            chunk = encoder.whole_delta(OutputDelta(text, [], logprobs=echoed), stream.usage, asked)
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
                logprobs=self._request.logprobs is not None,
                event_ids=self._event_ids,
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
            choice["message"] = self._message(answer)
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

    def _message(self, answer: Answer) -> dict[str, Any]:
        """Build an `AssistantMessage`."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content(answer.text)}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = list(map(call_answer, answer.tool_calls))
        return message

    def _content(self, text: str) -> str | None:
        """The content of a message. With tools, a message without text has null, as OpenAI's has."""
        return text or (None if self._request.tools else "")

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


def _fingerprint(info: ModelInfo) -> str:
    """OpenAI's `system_fingerprint`: equal for answers of the same model, revision and dtype."""
    key = "\x00".join((info.name, info.revision, info.dtype)).encode()
    return "fp_" + hashlib.blake2b(key, digest_size=5).hexdigest()

"""Server-sent events of a streamed answer, encoded with little work per token.

A stream has only `data:` lines, like OpenAI's, because many clients read any line as data. If the client asks for event
ids, each event also has an `id:` line, with which the client can resume a broken stream (`router/request/resume.py`).
Only the id and the text differ from chunk to chunk of a stream, so the rest is encoded once:

```
data: {"id":…,"model":…,"choices":[{"index":0,"delta":{"content":  "text"  },"finish_reason":null}]}
└──────────────── head ───────────────────────────────────────────┘        └─────── tail ─────────┘
```
"""

from __future__ import annotations

from typing import Any

import orjson

from quire.cluster.http.error_response import error_answer
from quire.cluster.http.http_answers import (
    chat_logprobs,
    completion_logprobs,
    shifted,
    usage_answer,
)
from quire.cluster.http.http_tools import call_answer
from quire.protos.errors import QuireError
from quire.router.types import OutputDelta, Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # an SSE comment, which clients skip


class ChunkEncoder:
    """Encodes the chunks of one choice.

    Parameters
    ----------
    envelope
        The fields at the beginning of every chunk: `id`, `object`, `created`, `model` and so on.
    index
        Index of the choice.
    chat
        Encode chunks of a chat (`delta`) instead of a completion (`text`).
    include_usage
        Every chunk has `usage`, which is null except in the last one, as with OpenAI.
    continuous_usage
        Every chunk has the usage so far.
    token_ids
        Every choice has `token_ids`.
    logprobs
        Deltas have log-probabilities.
    event_ids
        Each delta is one event, because its id names the whole delta. Otherwise each call has a chunk of its own.
    """

    def __init__(
        self,
        envelope: dict[str, Any],
        *,
        index: int = 0,
        chat: bool,
        include_usage: bool = False,
        continuous_usage: bool = False,
        token_ids: bool = False,
        logprobs: bool = False,
        event_ids: bool = False,
    ):
        self._envelope = b"data: " + orjson.dumps(envelope)[:-1]
        self._chat = chat
        self._choice = b',"choices":[{"index":%d,' % index
        self._head = self._envelope + self._choice
        self._head += b'"delta":{"content":' if chat else b'"text":'
        usage = b',"usage":null' if include_usage else b""
        self._tail = (b"}" if chat else b"") + b',"logprobs":null,"finish_reason":null}]'
        self._tail += usage + b"}\n\n"
        self._usage = usage
        self._continuous_usage = continuous_usage
        self._token_ids = token_ids
        self._adds_fields = continuous_usage or token_ids or logprobs
        self._splits_calls = not event_ids
        self._echoed_chars = 0  # characters of the echoed prompt

    def role(self, content: str | None, prompt_logprobs: list[Any] | None = None) -> bytes:
        """Encode the first chunk of a chat.

        Parameters
        ----------
        content
            The text before the first token: empty, or None if the message may end without text.
        """
        message = orjson.dumps({"role": "assistant", "content": content})
        choice = b'"delta":' + message + b',"logprobs":null,"finish_reason":null}]'
        prompt = b""
        if prompt_logprobs is not None:
            prompt = b',"prompt_logprobs":' + orjson.dumps(prompt_logprobs)
        return self._envelope + self._choice + choice + prompt + self._usage + b"}\n\n"

    def delta(self, delta: OutputDelta, usage: Usage) -> bytes:
        """Encode the output of `delta` as chunks; empty if they would carry no information.

        Parameters
        ----------
        usage
            Usage so far.
        """
        if (
            self._adds_fields
            or delta.finish_reason is not None
            or delta.reasoning
            or delta.tool_calls
        ):
            return self._whole_deltas(delta, usage)
        # The text is empty while the last character is incomplete, or while it may be the start of a stop string.
        if not delta.text:
            return b""
        return self._head + orjson.dumps(delta.text) + self._tail

    def _whole_deltas(self, delta: OutputDelta, usage: Usage) -> bytes:
        if delta.tool_calls and self._splits_calls:
            return b"".join(self.whole_delta(part, usage) for part in _parts(delta))
        return self.whole_delta(delta, usage)

    def whole_delta(
        self, delta: OutputDelta, usage: Usage, prompt_logprobs: list[Any] | None = None
    ) -> bytes:
        """Encode one chunk with every field of `delta`, even without text.

        Parameters
        ----------
        prompt_logprobs
            A `PromptLogprobsAnswer` for the choice, in the first chunk of a completion.
        """
        rest: dict[str, Any] = {"finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            rest["stop_reason"] = delta.stop_reason
        if self._token_ids:
            rest["token_ids"] = delta.token_ids
        if prompt_logprobs is not None:
            rest["prompt_logprobs"] = prompt_logprobs
        usage_json = self._usage
        if self._continuous_usage:
            usage_json = b',"usage":' + orjson.dumps(usage_answer(usage))
        output = {"delta": _message_delta(delta)} if self._chat else {"text": delta.text}
        return b"".join(
            (
                self._envelope,
                self._choice,
                orjson.dumps(output)[1:-1],
                b',"logprobs":',
                orjson.dumps(self._logprobs(delta)),
                b",",
                orjson.dumps(rest)[1:],
                b"]",
                usage_json,
                b"}\n\n",
            )
        )

    def echoed(self, num_chars: int) -> None:
        """Set the number of characters of the echoed prompt, for the text offsets of the answer."""
        self._echoed_chars = num_chars

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        if self._chat or delta.logprobs is None:
            return chat_logprobs(delta.logprobs)
        return completion_logprobs(shifted(delta.logprobs, self._echoed_chars))

    def usage(self, usage: Usage) -> bytes:
        """Encode the last chunk of a stream with `include_usage`: the usage, without choices."""
        return (
            self._envelope
            + b',"choices":[],"usage":'
            + orjson.dumps(usage_answer(usage))
            + b"}\n\n"
        )


def _parts(delta: OutputDelta) -> list[OutputDelta]:
    """Split a delta so that each call and the finish reason come alone, as OpenAI sends them.

    openai-python's stream helper ends a call at the next chunk with another call or with a finish reason.
    """
    parts = [OutputDelta("", [], tool_calls=(call,)) for call in delta.tool_calls]
    if delta.text or delta.reasoning:
        parts.insert(0, OutputDelta(delta.text, [], reasoning=delta.reasoning))
    parts[0].token_ids, parts[0].logprobs = delta.token_ids, delta.logprobs
    if delta.finish_reason is not None:
        parts.append(OutputDelta("", [], delta.finish_reason, delta.stop_reason))
    return parts


def _message_delta(delta: OutputDelta) -> dict[str, Any]:
    """Build a `ChatDelta`: only the fields with new output, as OpenAI does."""
    message: dict[str, Any] = {}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.text:
        message["content"] = delta.text
    if delta.tool_calls:
        message["tool_calls"] = [
            {"index": call.index, **call_answer(call)} for call in delta.tool_calls
        ]
    return message


def with_id(event_id: str, chunk: bytes) -> bytes:
    """Add an id line to an event, if there is one. The id identifies all events up to this one."""
    return b"id: " + event_id.encode() + b"\n" + chunk if chunk else b""


def error_event(error: QuireError) -> bytes:
    """Encode the last event of a failed stream. No [DONE] follows, so that clients see an incomplete stream."""
    return b"data: " + orjson.dumps(error_answer(error)) + b"\n\n"

"""Server-sent events of a streamed answer, encoded with as little work per token as possible.

A stream is `data:` lines only, as OpenAI's: many clients read every other line as data. A client that asks for ids
gets an `id:` line in each event, from which it continues if it loses its router (`router/request/resume.py`). All but
the id and the text of a chunk is the same for every token of a stream, so it is encoded once:

```
data: {"id":…,"model":…,"choices":[{"index":0,"delta":{"content":  "text"  },"finish_reason":null}]}
└──────────────── head ───────────────────────────────────────────┘        └─────── tail ─────────┘
```
"""

from __future__ import annotations

from typing import Any

import orjson

from quire.cluster.http.http_answers import (
    chat_logprobs,
    completion_logprobs,
    error_answer,
    shifted,
    usage_answer,
)
from quire.protos.errors import QuireError
from quire.router.types import OutputDelta, Usage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients skip it


class ChunkEncoder:
    """Encodes the chunks of one choice.

    Parameters
    ----------
    envelope
        `id`, `object`, `created`, `model` and so on: what every chunk begins with.
    index
        The choice's.
    chat
        Chunks of a chat (`delta`) instead of a completion (`text`).
    include_usage
        `usage` is in every chunk, null but for the last, as with OpenAI.
    continuous_usage
        The usage so far is in every chunk.
    token_ids
        `token_ids` is in every choice.
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
    ):
        self._envelope = b"data: " + orjson.dumps(envelope)[:-1]
        self._chat = chat
        self._choice = b',"choices":[{"index":%d,' % index
        self._head = self._envelope + self._choice
        self._head += b'"delta":{"content":' if chat else b'"text":'
        self._after_text = b'},"logprobs":' if chat else b',"logprobs":'
        usage = b',"usage":null' if include_usage else b""
        self._tail = self._after_text + b'null,"finish_reason":null}]' + usage + b"}\n\n"
        self._usage = usage
        self._continuous_usage = continuous_usage
        self._token_ids = token_ids
        self._echoed_chars = 0  # of the prompt, before the answer's text

    def role(self, prompt_logprobs: list[Any] | None = None) -> bytes:
        """The first chunk of a chat."""
        choice = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        prompt = b""
        if prompt_logprobs is not None:
            prompt = b',"prompt_logprobs":' + orjson.dumps(prompt_logprobs)
        return self._envelope + self._choice + choice + prompt + self._usage + b"}\n\n"

    def delta(
        self, delta: OutputDelta, usage: Usage, prompt_logprobs: list[Any] | None = None
    ) -> bytes:
        """A chunk with the text of `delta`; empty when it has nothing to tell.

        Parameters
        ----------
        prompt_logprobs
            A `PromptLogprobsAnswer` in the choice, for the first chunk of a completion.
        """
        plain = delta.finish_reason is None and delta.logprobs is None and prompt_logprobs is None
        if plain and not self._continuous_usage and not self._token_ids:
            if not delta.text:  # an incomplete character, or what may become a stop string
                return b""
            return self._head + orjson.dumps(delta.text) + self._tail
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
        return b"".join(
            (
                self._head,
                orjson.dumps(delta.text),
                self._after_text,
                orjson.dumps(self._logprobs(delta)),
                b",",
                orjson.dumps(rest)[1:],
                b"]",
                usage_json,
                b"}\n\n",
            )
        )

    def echoed(self, num_chars: int) -> None:
        """The text of the answer follows so many characters of echoed prompt."""
        self._echoed_chars = num_chars

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        if self._chat or delta.logprobs is None:
            return chat_logprobs(delta.logprobs)
        return completion_logprobs(shifted(delta.logprobs, self._echoed_chars))

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that ends a stream whose client wants the usage."""
        return (
            self._envelope
            + b',"choices":[],"usage":'
            + orjson.dumps(usage_answer(usage))
            + b"}\n\n"
        )


def with_id(event_id: str, chunk: bytes) -> bytes:
    """An event with the id that stands for all up to it; nothing if there is no event."""
    return b"id: " + event_id.encode() + b"\n" + chunk if chunk else b""


def error_event(error: QuireError) -> bytes:
    """The last event of a failed stream. No [DONE] follows, so no client takes it for whole."""
    return b"data: " + orjson.dumps(error_answer(error)) + b"\n\n"

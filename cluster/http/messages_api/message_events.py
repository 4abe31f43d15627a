"""Events of a streamed message, encoded with little work per token, and the blocks of a whole one.

```
message_start
content_block_start   thinking     thinking_delta ...  signature_delta   content_block_stop
content_block_start   text         text_delta ...                        content_block_stop
content_block_start   tool_use     input_json_delta                      content_block_stop
message_delta         stop_reason, usage
message_stop
```

A block ends where output of another kind begins; a call is a block of its own. Within a block of text only the text
differs from event to event, so the rest is encoded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from quire.cluster.api_common.front_end import Answer
from quire.router.tool_types import ToolCall
from quire.router.types import OutputDelta, Usage

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
# Anthropic signs its reasoning. This server checks no signature, so every block has the same.
SIGNATURE = "quire"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def usage_answer(usage: Usage) -> dict[str, Any]:
    """Build a `MessageUsage`: as with Anthropic, `input_tokens` are those that were not in the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def stop_fields(finish_reason: str | None, stop_reason: str | int | None) -> dict[str, str | None]:
    """Return `stop_reason` and `stop_sequence` of a message; the arguments are those of the last delta."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": _STOP_REASONS[finish_reason or "stop"], "stop_sequence": None}


def _pieces(delta: OutputDelta) -> Iterator[tuple[str, str | ToolCall]]:
    """Yield the new output in its order, each piece with the type of its block."""
    if delta.reasoning:
        yield "thinking", delta.reasoning
    if delta.text:
        yield "text", delta.text
    for call in delta.tool_calls:
        yield "tool_use", call


@dataclass(slots=True)
class BlockAnswer(Answer):
    """Collects the deltas of a message as blocks.

    Attributes
    ----------
    shows_thinking
        Whether blocks of reasoning have their text.
    """

    shows_thinking: bool = True
    blocks: list[tuple[str, list[str | ToolCall]]] = field(default_factory=list)

    def add(self, delta: OutputDelta) -> None:
        """Count a delta and append its output; raises `Aborted` if the router has aborted the request."""
        Answer.add(self, delta)
        for kind, piece in _pieces(delta):
            if kind == "tool_use" or not self.blocks or self.blocks[-1][0] != kind:
                self.blocks.append((kind, []))
            self.blocks[-1][1].append(piece)

    def content(self) -> list[dict[str, Any]]:
        """Return the blocks as JSON."""
        return [self._block(kind, pieces) for kind, pieces in self.blocks]

    def _block(self, kind: str, pieces: list[str | ToolCall]) -> dict[str, Any]:
        if isinstance(pieces[0], ToolCall):
            call = pieces[0]
            # The text of the arguments as it is, so that a stream and a whole answer have the same.
            arguments = orjson.Fragment(call.arguments)
            return {"type": kind, "id": call.call_id, "name": call.name, "input": arguments}
        text = "".join(map(str, pieces))
        if kind == "text":
            return {"type": kind, "text": text}
        shown = text if self.shows_thinking else ""
        return {"type": kind, "thinking": shown, "signature": SIGNATURE}


class MessageEvents:
    """Encodes the events of one message.

    Parameters
    ----------
    shows_thinking
        Whether blocks of reasoning have their text.
    """

    def __init__(self, shows_thinking: bool):
        self._shows_thinking = shows_thinking
        self._index = -1  # of the open block
        self._kind = ""  # type of the open block; empty: none is open
        self._head = b""  # of a delta of the open block, up to its text

    def start(self, message: dict[str, Any]) -> bytes:
        """Encode the first event; `message` is the message without content."""
        return _event("message_start", {"message": message})

    def add(self, delta: OutputDelta) -> bytes:
        """Encode a delta; empty if it has no output, for example while a character is incomplete."""
        if self._kind == "text" and not delta.reasoning and not delta.tool_calls:
            return self._head + orjson.dumps(delta.text) + b"}}\n\n" if delta.text else b""
        return b"".join(self._piece(kind, piece) for kind, piece in _pieces(delta))

    def end(self, stop: dict[str, str | None], usage: Usage) -> bytes:
        """Encode the events that end the message."""
        last = {"delta": stop, "usage": usage_answer(usage)}
        return self._close() + _event("message_delta", last) + _event("message_stop", {})

    def _piece(self, kind: str, piece: str | ToolCall) -> bytes:
        if isinstance(piece, ToolCall):
            block = {"type": kind, "id": piece.call_id, "name": piece.name, "input": {}}
            opened = self._open(kind, block, "input_json_delta", "partial_json")
            return opened + self._head + orjson.dumps(piece.arguments) + b"}}\n\n" + self._close()
        opened = b""
        if kind != self._kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            # Text and thinking have their text in a field of their own name, and deltas named after it.
            opened = self._open(kind, {"type": kind, kind: "", **signature}, f"{kind}_delta", kind)
        if kind == "thinking" and not self._shows_thinking:
            return opened
        return opened + self._head + orjson.dumps(piece) + b"}}\n\n"

    def _open(self, kind: str, block: dict[str, Any], delta: str, text_field: str) -> bytes:
        closed = self._close()
        self._index += 1
        self._kind = kind
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%s","%s":' % (self._index, delta.encode(), text_field.encode())
        )
        start = {"index": self._index, "content_block": block}
        return closed + _event("content_block_start", start)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        signature = b""
        if self._kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signature = _event("content_block_delta", {"index": self._index, "delta": delta})
        self._kind = ""
        return signature + _event("content_block_stop", {"index": self._index})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    data = orjson.dumps({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

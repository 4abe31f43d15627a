"""The events of a streamed Response, encoded with little work per token.

Each delta of the router adds to an item of the output. Text and reasoning are items with one part, which stay open for
further deltas; a call is complete when it comes. Whole answers are made in the same way, so that they are equal.

```
response.created, response.in_progress
  output_item.added, content_part.added            an item begins
    output_text.delta | reasoning_text.delta …     ◀─ for each delta: only text and number differ
  output_text.done  | reasoning_text.done, content_part.done, output_item.done
  output_item.added, function_call_arguments.delta, function_call_arguments.done, output_item.done
response.completed | response.incomplete | error, response.failed
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from quire.cluster.api_common.front_end import Progress
from quire.cluster.http.error_response import error_answer
from quire.cluster.http.http_answers import chat_logprobs
from quire.cluster.http.responses_api.response_object import (
    ItemStatus,
    Status,
    changing_part,
    message_item,
    reasoning_item,
)
from quire.protos.errors import QuireError
from quire.router.scored_token import TokenScores
from quire.router.tool_types import ToolCall
from quire.router.types import OutputDelta, Usage

Names = Mapping[str, tuple[str | None, str]]


@dataclass(frozen=True, slots=True)
class _TextKind:
    """A kind of items that consist of text.

    Attributes
    ----------
    part_type
        Type of the item's part, and of its events.
    has_scores
        The part has log-probabilities.
    make
        Builds the item from its id, status and parts.
    """

    id_prefix: str
    part_type: str
    has_scores: bool
    make: Callable[[str, ItemStatus, list[dict[str, Any]]], dict[str, Any]]


_MESSAGE = _TextKind("msg_", "output_text", True, message_item)
_REASONING = _TextKind("rs_", "reasoning_text", False, reasoning_item)


@dataclass(slots=True)
class _OpenItem:
    """The item to which text is being added.

    Attributes
    ----------
    head, tail
        Encoded delta event before and after its text; its number and the end follow the tail.
    """

    kind: _TextKind
    item_id: str
    head: bytes
    pieces: list[str] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        """Build the item's part."""
        part: dict[str, Any] = {"type": self.kind.part_type, "text": "".join(self.pieces)}
        if self.kind.has_scores:
            part |= {"annotations": [], "logprobs": _logprobs(self.scores)}
        return part

    def item(self, status: ItemStatus) -> dict[str, Any]:
        """Build the item."""
        return self.kind.make(self.item_id, status, [self.part()])


class ResponseEvents:
    """Encodes the events of one Response, and collects its output.

    Parameters
    ----------
    constant
        `response_object.constant_part`.
    answer_id
        Makes the ids of the items unique.
    origins
        Namespace and name of each function, by the name that the model knows.
    """

    def __init__(self, constant: dict[str, Any], answer_id: str, origins: Names):
        self._constant = constant
        self._constant_json = orjson.dumps(constant)[:-1]
        self._answer_id = answer_id
        self._origins = origins
        self._progress = Progress()
        self._number = 0  # of the next event
        self._output: list[dict[str, Any]] = []  # the items that are done
        self._open: _OpenItem | None = None
        # Scores of tokens whose text has not come yet: the last character may be incomplete.
        self._scores: list[TokenScores] = []

    def begin(self) -> bytes:
        """Encode the events before the first item."""
        part = changing_part("in_progress", [])
        return self._response("response.created", part) + self._response(
            "response.in_progress", part
        )

    def add(self, delta: OutputDelta) -> bytes:
        """Encode the events of a delta; empty if it adds nothing yet.

        Raises
        ------
        Aborted
            The router has aborted the request.
        """
        self._progress.add(delta)
        events = b""
        if delta.logprobs is not None:
            self._scores += delta.logprobs
        if delta.reasoning:
            events += self._text(_REASONING, delta.reasoning)
            if not delta.text:
                self._scores.clear()
        if delta.text:
            events += self._text(_MESSAGE, delta.text)
        for call in delta.tool_calls:
            events += self._call(call)
            self._scores.clear()
        return events

    def end(self, usage: Usage) -> bytes:
        """Encode the events that end the Response.

        Raises
        ------
        EngineError
            The answer has no finish reason.
        """
        self._progress.end()
        events = b""
        if self._open is None and not self._output:
            events += self._begin_text(_MESSAGE)
        if self._open is not None and self._open.kind.has_scores:
            self._open.scores += self._scores
        is_cut = self._progress.finish_reason == "length"
        events += self._close("incomplete" if is_cut else "completed")
        part = self._final_part(usage)
        return events + self._response(f"response.{part['status']}", part)

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Build the whole `ResponseAnswer`, after `end`."""
        return {**self._constant, **self._final_part(usage)}

    def fail(self, error: QuireError) -> bytes:
        """Encode the events that end a failed Response.

        Some clients look for one of them, some for the other.
        """
        detail = error_answer(error)["error"]
        fields = {name: detail[name] for name in ("code", "message", "param")}
        output = self._output
        if self._open is not None:
            output = [*output, self._open.item("incomplete")]
        part = changing_part("failed", output, error=error)
        return self._event("error", **fields, error=detail) + self._response(
            "response.failed", part
        )

    def _final_part(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._progress.finish_reason == "length"
        status: Status = "incomplete" if is_cut else "completed"
        return changing_part(status, self._output, usage=usage)

    # Items

    def _text(self, kind: _TextKind, text: str) -> bytes:
        """Add text to the open item of this kind; begin one if there is none."""
        events = b""
        item = self._open
        if item is None or item.kind is not kind:
            events = self._close() + self._begin_text(kind)
            item = self._open
            assert item is not None
        item.pieces.append(text)
        tail = b"" if not kind.has_scores else b',"logprobs":[]'
        if kind.has_scores and self._scores:
            tail = b',"logprobs":' + orjson.dumps(_logprobs(self._scores))
            item.scores += self._scores
            self._scores.clear()
        number = self._next_number()
        return b"%b%b%b%b,\"sequence_number\":%d}\n\n" % (
            events, item.head, orjson.dumps(text), tail, number
        )  # fmt: skip

    def _begin_text(self, kind: _TextKind) -> bytes:
        item_id = self._item_id(kind.id_prefix)
        place = self._place(item_id)
        name = f"response.{kind.part_type}.delta"
        fields = orjson.dumps({"type": name, **place})
        head = b"event: %b\ndata: %b,\"delta\":" % (name.encode(), fields[:-1])  # fmt: skip
        self._open = _OpenItem(kind, item_id, head)
        return self._item_event("added", kind.make(item_id, "in_progress", [])) + self._event(
            "response.content_part.added", **place, part=self._open.part()
        )

    def _close(self, status: ItemStatus = "completed") -> bytes:
        """End the open item, if there is one."""
        item = self._open
        if item is None:
            return b""
        place, part = self._place(item.item_id), item.part()
        text = {name: part[name] for name in ("text", "logprobs") if name in part}
        done = item.item(status)
        events = (
            self._event(f"response.{item.kind.part_type}.done", **place, **text)
            + self._event("response.content_part.done", **place, part=part)
            + self._item_event("done", done)
        )
        self._output.append(done)
        self._open = None
        return events

    def _call(self, call: ToolCall) -> bytes:
        """Add a call."""
        events = self._close()
        namespace, name = self._origins.get(call.name, (None, call.name))
        item_id = self._item_id("fc_")
        place = {"item_id": item_id, "output_index": len(self._output)}
        item = {
            "type": "function_call",
            "id": item_id,
            "status": "in_progress",
            "call_id": call.call_id,
            "name": name,
            **({} if namespace is None else {"namespace": namespace}),
            "arguments": "",
        }
        done = {**item, "status": "completed", "arguments": call.arguments}
        arguments = "response.function_call_arguments"
        events += (
            self._item_event("added", item)
            + self._event(f"{arguments}.delta", **place, delta=call.arguments)
            + self._event(f"{arguments}.done", **place, name=name, arguments=call.arguments)
            + self._item_event("done", done)
        )
        self._output.append(done)
        return events

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}{self._answer_id}_{len(self._output)}"

    def _place(self, item_id: str) -> dict[str, Any]:
        """The fields that name the only part of an item."""
        return {"item_id": item_id, "output_index": len(self._output), "content_index": 0}

    # Events

    def _next_number(self) -> int:
        number, self._number = self._number, self._number + 1
        return number

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = orjson.dumps({"type": name, **fields, "sequence_number": self._next_number()})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)

    def _item_event(self, verb: str, item: dict[str, Any]) -> bytes:
        name = f"response.output_item.{verb}"
        return self._event(name, output_index=len(self._output), item=item)

    def _response(self, name: str, part: dict[str, Any]) -> bytes:
        """Encode an event with the Response; its constant part is encoded once."""
        return b'event: %b\ndata: {"type":"%b","response":%b,%b,"sequence_number":%d}\n\n' % (
            name.encode(),
            name.encode(),
            self._constant_json,
            orjson.dumps(part)[1:],
            self._next_number(),
        )


def _logprobs(scores: list[TokenScores]) -> list[dict[str, Any]]:
    answer = chat_logprobs(scores)
    assert answer is not None
    content: list[dict[str, Any]] = answer["content"]
    return content

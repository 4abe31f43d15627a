"""Streams of every kind for the chaos tests: what is asked over which API, and what a client sees of it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from patient_channel import was_not_sent

from quire.protos import generation_pb2 as pb
from quire.protos import generation_pb2_grpc

# Small models write white space for ever where a schema allows it.
SCHEMA = {
    "type": "array",
    "items": {"type": "string", "minLength": 12, "maxLength": 24},
    "minItems": 3,
    "maxItems": 5,
    "x-guidance": {"whitespace_flexible": False},
}
MULTI_BYTE = "[一-龥éüß😀-😏]{30,40}"  # two to four bytes a character, which tokens cut anywhere
# What gRPC makes of a router that dies: the first directly, the others behind HAProxy, which resets the stream, or
# answers 500 to one that has just begun.
ROUTER_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
KINDS = ("greedy", "sampled", "schema", "choices", "logprobs", "stop", "multi-byte", "penalties")


@dataclass(frozen=True, slots=True)
class Spec:
    """Stream number `i`: a function of it, so that asking again asks for the same.

    Attributes
    ----------
    least_tokens
        Each answer has so many tokens at least, unless a grammar or a stop string ends it.
    """

    i: int
    least_tokens: int = 0

    @property
    def kind(self) -> str:
        return KINDS[self.i % len(KINDS)]

    @property
    def over_http(self) -> bool:
        return self.i // len(KINDS) % 2 == 0

    @property
    def num_choices(self) -> int:
        return 2 if self.kind == "choices" else 1

    @property
    def prompt(self) -> str:
        return f"Story {self.i} of the harbour: " + "the tide, the quay and the light. " * (
            self.i % 9
        )

    def sampling(self) -> dict[str, Any]:
        """What both APIs call by the same names."""
        max_tokens = max(48 + 8 * (self.i % 7), self.least_tokens)
        if self.kind == "greedy":
            return {"temperature": 0.0, "max_tokens": max_tokens}
        sampling = {"temperature": 1.0, "seed": self.i, "max_tokens": max_tokens}
        if self.kind == "sampled":
            sampling["top_p"] = 0.95
        elif self.kind in ("schema", "multi-byte"):
            sampling["max_tokens"] = 160
        elif self.kind == "stop":
            sampling["min_tokens"] = max_tokens // 2
        elif self.kind == "penalties":
            sampling |= {"repetition_penalty": 1.2, "presence_penalty": 0.4}
            sampling["frequency_penalty"] = 0.3
        return sampling

    def http_body(self) -> dict[str, Any]:
        body = {"prompt": self.prompt, "stream": True, "return_token_ids": True, **self.sampling()}
        body["stream_options"] = {"include_usage": True}
        if self.kind == "schema":
            schema = {"name": "titles", "schema": SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self.kind == "multi-byte":
            body["structured_outputs"] = {"regex": MULTI_BYTE}
        elif self.kind == "stop":
            body["stop"] = ["e ", ", ", "."]
        elif self.kind == "choices":
            body["n"] = 2
        elif self.kind == "logprobs":
            body["logprobs"] = 3
        if self.kind not in ("schema", "multi-byte"):
            body["ignore_eos"] = True
        return body

    def grpc_request(self) -> pb.GenerateRequest:
        request = pb.GenerateRequest(
            prompt=self.prompt, sampling=pb.SamplingOptions(**self.sampling())
        )
        if self.kind == "schema":
            request.structured_output.json_schema = json.dumps(SCHEMA)
        elif self.kind == "multi-byte":
            request.structured_output.regex = MULTI_BYTE
        elif self.kind == "stop":
            request.stop.extend(["e ", ", ", "."])
        elif self.kind == "choices":
            request.n = 2
        elif self.kind == "logprobs":
            request.logprobs = 3
        request.ignore_eos = self.kind not in ("schema", "multi-byte")
        return request


@dataclass(slots=True)
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | int | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Outcome:
    """All that a client sees but time: equal or not to the answer without faults."""

    choices: list[Choice]
    usage: tuple[int, int] = (0, 0)  # prompt, completion
    done: bool = False  # the stream said that it was complete


@dataclass(slots=True)
class Watch:
    """When the messages of a stream came, at worst; how often it was refused before the first one; where it broke."""

    router: str = ""  # that serves it, where the API tells before the end
    refusals: int = 0
    attempts: int = 0  # of the router, where the API tells
    truncations: int = 0
    last_id: str = ""  # of the events so far
    messages: int = 0
    gap: tuple[float, float] = (0.0, 0.0)  # the longest time without a message, begin and end
    _last_s: float | None = None

    @property
    def stall_s(self) -> float:
        """The longest time without a message."""
        return self.gap[1] - self.gap[0]

    def tick(self) -> None:
        now = time.monotonic()
        self.messages += 1
        if self._last_s is not None and now - self._last_s > self.stall_s:
            self.gap = (self._last_s, now)
        self._last_s = now


class Refused(Exception):
    """The server answered before anything was generated: come back later."""


class NotSent(Refused):
    """The connection said goodbye before the server took the call: ask again at once."""


class Truncated(Exception):
    """The stream broke: `Watch.last_id` says where it goes on."""


def new_outcome(spec: Spec) -> Outcome:
    return Outcome([Choice() for _ in range(spec.num_choices)])


async def ask_http(
    client: httpx.AsyncClient, spec: Spec, watch: Watch, outcome: Outcome | None = None
) -> Outcome:
    """All of a stream, or the rest of what `outcome` has so far.

    Raises
    ------
    Refused, Truncated
        Nothing came, or not all of it; `outcome` has what there is.
    """
    outcome = outcome or new_outcome(spec)
    try:
        await _read_http(client, spec, watch, outcome)
    except httpx.TransportError as error:
        if not watch.last_id:
            raise Refused(repr(error)) from error
        raise Truncated(repr(error)) from error
    if not outcome.done:
        raise Truncated("the body ended without [DONE]")
    return outcome


async def _read_http(client: httpx.AsyncClient, spec: Spec, watch: Watch, outcome: Outcome) -> None:
    headers = {"Last-Event-ID": watch.last_id}  # an empty one asks for ids
    asking = client.stream("POST", "/v1/completions", json=spec.http_body(), headers=headers)
    async with asking as response:
        if response.status_code != 200:
            body = await response.aread()
            # Serve's proxies answer for a router that has just died, in plain text.
            is_ours = response.headers["content-type"] == "application/json"
            if response.status_code in (429, 503) or not is_ours:
                raise Refused(body)
            raise AssertionError((response.status_code, body))
        watch.router = response.headers["x-quire-router"]
        event_id = data = ""
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                data = line.removeprefix("data: ")
            elif not line and data:  # only a whole event counts
                watch.last_id = event_id
                _take_event(data, watch, outcome)
                data = ""


def _take_event(data: str, watch: Watch, outcome: Outcome) -> None:
    if data == "[DONE]":
        outcome.done = True
        return
    chunk = json.loads(data)
    assert "error" not in chunk, chunk
    watch.tick()
    if chunk.get("usage"):
        usage = chunk["usage"]
        outcome.usage = (usage["prompt_tokens"], usage["completion_tokens"])
    for part in chunk["choices"]:
        choice = outcome.choices[part["index"]]
        assert choice.finish_reason is None, "nothing follows the end"
        choice.text += part["text"]
        choice.token_ids += part.get("token_ids") or []
        choice.finish_reason = part["finish_reason"]
        choice.stop_reason = part.get("stop_reason")
        if part.get("logprobs"):
            scores = part["logprobs"]
            columns = (scores["tokens"], scores["token_logprobs"], scores["top_logprobs"])
            choice.logprobs += zip(*columns, strict=True)


async def ask_grpc(
    stub: generation_pb2_grpc.GenerationStub,
    spec: Spec,
    watch: Watch,
    outcome: Outcome | None = None,
) -> Outcome:
    """As `ask_http`.

    Raises
    ------
    NotSent
        Over an `aio_channel`.
    """
    outcome = outcome or new_outcome(spec)
    request = spec.grpc_request()
    request.resume_from = watch.last_id
    call = stub.Generate(request)
    try:
        async for message in call:
            watch.tick()
            watch.last_id = message.event_id
            choice = outcome.choices[message.choice]
            assert choice.finish_reason is None, "nothing follows the end"
            assert message.index == len(choice.token_ids), "an index is missing or comes twice"
            choice.text += message.text
            choice.token_ids += message.token_ids
            choice.logprobs += [scores.SerializeToString() for scores in message.logprobs]
            if message.finish_reason:
                choice.finish_reason = message.finish_reason
                stop_reason = message.WhichOneof("stop_reason")
                choice.stop_reason = stop_reason and getattr(message, stop_reason)
            if message.HasField("usage"):
                usage = message.usage
                outcome.usage = (usage.prompt_tokens, usage.completion_tokens)
    except grpc.aio.AioRpcError as error:
        refused = (*ROUTER_LOST, grpc.StatusCode.RESOURCE_EXHAUSTED)
        if was_not_sent(error) and not watch.last_id:
            raise NotSent(error.details()) from error
        if error.code() in refused and not watch.last_id:
            raise Refused(error.details()) from error
        if error.code() in ROUTER_LOST:
            raise Truncated(error.details()) from error
        raise
    trailing = dict(await call.trailing_metadata())
    watch.attempts = int(trailing.get("x-quire-attempts", 0))
    outcome.done = True
    return outcome

"""Streams as clients read them: bytes from a socket, through readers with the rules of well-known clients."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from live_app import serving
from stream_readers import READERS, READERS_OF_COMMENTS, Unreadable

from quire.protos.errors import Unavailable

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FIELDS = {"max_tokens": 12, "seed": 3, "stream": True}
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hello there"}], **FIELDS},
    COMPLETIONS: {"prompt": "hello there", **FIELDS},
}
ASKED = {"header": {"Last-Event-ID": ""}, "field": {}}
COMMENT = b": keep-alive\n\n"


def pieces_of(
    client: httpx.Client, path: str, headers: dict[str, str] | None = None, **fields: Any
) -> list[bytes]:
    """The body as received."""
    body = {**BODIES[path], **fields}
    with client.stream("POST", path, json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        return list(response.iter_raw())


def whole_text(client: httpx.Client, path: str) -> str:
    answer = client.post(path, json={**BODIES[path], "stream": False}).json()
    (choice,) = answer["choices"]
    return choice["message"]["content"] if path == CHAT else choice["text"]


def with_comments(pieces: list[bytes]) -> list[bytes]:
    """Insert comments between events, like a gateway that keeps the connection alive."""
    return [b"".join(pieces).replace(b"\n\n", b"\n\n" + COMMENT)]


@pytest.mark.parametrize("path", BODIES)
def test_clients_read_a_stream(service, path):
    with serving(service) as client:
        pieces, text = pieces_of(client, path), whole_text(client, path)
    assert len(text) > 40
    for name, reader in READERS.items():
        assert reader(pieces) == text, name
        assert reader([b"".join(pieces)[i : i + 1] for i in range(len(b"".join(pieces)))]) == text
    for name in READERS_OF_COMMENTS:
        assert READERS[name](with_comments(pieces)) == text, name


@pytest.mark.parametrize("path", BODIES)
def test_every_line_is_data_unless_ids_are_asked_for(service, path):
    with serving(service) as client:
        lines = b"".join(pieces_of(client, path)).splitlines()
    assert {line[:6] for line in lines if line} == {b"data: "}


@pytest.mark.parametrize("way", ASKED)
@pytest.mark.parametrize("path", BODIES)
def test_ids_come_when_they_are_asked_for(service, path, way):
    fields = {} if way == "header" else {"stream_options": {"include_event_ids": True}}
    with serving(service) as client:
        pieces, text = pieces_of(client, path, ASKED[way], **fields), whole_text(client, path)
    *events, done, end = b"".join(pieces).split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"id: q1.") and b"\ndata: {" in event for event in events)
    # Why ids are optional: these readers fail on them, and openai-python fails on a comment after one.
    for name in ("vllm_bench", "sglang_bench", "llmperf", "dify"):
        with pytest.raises(Unreadable):
            READERS[name](pieces)
    assert READERS["openai_python"](pieces) == text
    with pytest.raises(Unreadable):
        READERS["openai_python"](with_comments(pieces))


@pytest.mark.parametrize("path", BODIES)
def test_keep_alives_come_until_the_first_token_if_they_are_on(service, path):
    service.generate_s = 0.5
    with serving(service, keepalive_s=0.05) as client:
        pieces = pieces_of(client, path)
        service.generate_s = 0.0
        text, quick = whole_text(client, path), pieces_of(client, path)
    assert 2 <= b"".join(pieces).count(COMMENT) <= 12
    assert b"".join(pieces).startswith(COMMENT) and COMMENT not in b"".join(quick)
    for name in READERS_OF_COMMENTS:
        assert READERS[name](pieces) == text, name
    for name, reader in READERS.items():
        assert reader(quick) == text, name


def test_keep_alives_are_off_by_default(service):
    service.generate_s = 0.3
    with serving(service) as client:
        assert b":" not in {line[:1] for line in b"".join(pieces_of(client, CHAT)).splitlines()}


def test_a_refusal_after_a_keep_alive_is_an_error_event(service):
    async def refuse(request: Any) -> None:
        await asyncio.sleep(0.2)
        raise Unavailable("no replica is ready to serve the model", retry_after_s=1.0)

    service.generate = refuse
    with serving(service, keepalive_s=0.05) as client:
        body = b"".join(pieces_of(client, CHAT))
    with pytest.raises(Unreadable, match="no replica is ready"):
        READERS["openai_python"]([body])
    assert b"[DONE]" not in body


def test_a_refusal_before_the_first_keep_alive_has_its_status(service):
    service.refusal = Unavailable("no replica is ready to serve the model", retry_after_s=1.0)
    with serving(service, keepalive_s=5.0) as client:
        assert client.post(CHAT, json=BODIES[CHAT]).status_code == 503


def test_a_client_that_leaves_during_keep_alives_ends_its_request(service):
    service.generate_s = 60.0
    with serving(service, keepalive_s=0.05) as client:
        with client.stream("POST", CHAT, json=BODIES[CHAT]) as response:
            assert next(response.iter_raw()) == COMMENT
        assert service.cancelled_in_generate.wait(10)

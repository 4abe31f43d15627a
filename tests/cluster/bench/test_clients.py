"""The clients read from real sockets, in pieces of any size."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import pytest

from quire.cluster.bench.load.clients import OpenAIClient, RequestFailed, connect, served_model

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def answered(pieces: list[bytes], head: bytes, **options):
    """The client's answer from a server that sends these pieces, and the request's body."""
    bodies = []

    async def serve(reader, writer):
        request = await reader.readuntil(b"\r\n\r\n")
        length = int(request.lower().partition(b"content-length:")[2].split()[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(head)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = OpenAIClient(f"http://127.0.0.1:{port}", "m", **options)
        return await client.complete([5, 6, 7], 4, "talk"), bodies[0]


STREAM = (
    event(choices=[{"text": "a", "token_ids": [1]}])
    + event(choices=[{"text": "bc", "token_ids": [2, 3]}])
    + event(choices=[{"text": "", "token_ids": [4], "finish_reason": "length"}])
    + event(choices=[], usage=USAGE)
    + b"data: [DONE]\n\n"
)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Quire-Replica: r1\r\n"
    b"X-Quire-Predicted-Cached-Tokens: 64\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_stream_is_read_however_it_is_cut(size):
    pieces = [chunk(STREAM[i : i + size]) for i in range(0, len(STREAM), size)]
    if size == 1:  # one write, or the test takes ten seconds
        pieces = [b"".join(pieces)]
    answer, body = asyncio.run(answered([*pieces, b"0\r\n\r\n"], CHUNKED))
    assert (answer.tokens, answer.token_ids) == ([1, 2, 1], [1, 2, 3, 4])
    assert (answer.prompt_tokens, answer.cached_tokens) == (3, 2)
    assert (answer.replica, answer.predicted_tokens) == ("r1", 64)
    assert answer.arrivals_s == sorted(answer.arrivals_s)
    assert body["prompt"] == [5, 6, 7] and body["max_tokens"] == 4 and body["stream"] is True
    assert body["ignore_eos"] is True and body["prompt_cache_key"] == "talk"


def test_arrivals_are_those_of_the_pieces():
    events = [chunk(event(choices=[{"text": "a"}])) for _ in range(3)]
    answer, _ = asyncio.run(answered([*events, b"0\r\n\r\n"], CHUNKED))
    gaps = [b - a for a, b in zip(answer.arrivals_s, answer.arrivals_s[1:], strict=False)]
    assert len(gaps) == 2 and min(gaps) > 0.01


def test_tokens_that_the_usage_counts_are_counted():
    """Some servers send several tokens in one piece and no ids."""
    text = event(choices=[{"text": "abc"}]) + event(choices=[], usage=USAGE)
    answer, _ = asyncio.run(answered([text], b"HTTP/1.1 200 OK\r\n\r\n"))
    assert answer.num_tokens == 4
    assert answer.predicted_tokens is None


def test_tokens_without_text_come_with_the_usage():
    """An answer may consist of control tokens only."""
    text = event(choices=[{"text": ""}]) + event(choices=[], usage=USAGE)
    answer, _ = asyncio.run(answered([text], b"HTTP/1.1 200 OK\r\n\r\n"))
    assert answer.num_tokens == 4 and len(answer.arrivals_s) == 1


@pytest.mark.parametrize(
    ("head", "pieces", "message"),
    [
        (b"HTTP/1.1 429 Too Many\r\n\r\n", [b'{"error": "full"}'], 'status 429: {"error": "full"}'),
        (CHUNKED, [chunk(event(error={"message": "gone"}))], "gone"),
        (CHUNKED, [b"ff\r\ndata"], "IncompleteReadError"),
        (b"", [], "IncompleteReadError"),
    ],
)
def test_a_failure_has_the_servers_words(head, pieces, message):
    with pytest.raises(RequestFailed, match=message):
        asyncio.run(answered(pieces, head))


def found_model(answer: bytes, path: str = "") -> tuple[str, str]:
    """The model that `served_model` finds with this response, and the request's first line."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lines: list[bytes] = []

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                lines.append(connection.recv(4096).split(b"\r\n")[0])
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
            return served_model(url), lines[0].decode()
        finally:
            thread.join()


def listing(*names: str) -> bytes:
    body = json.dumps({"object": "list", "data": [{"id": name} for name in names]})
    return f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{body}".encode()


@pytest.mark.parametrize(("path", "asked"), [("", ""), ("/v1", ""), ("/v1/", ""), ("/a", "/a")])
def test_the_only_model_of_a_server_is_found(path, asked):
    assert found_model(listing("a/b"), path) == ("a/b", f"GET {asked}/v1/models HTTP/1.1")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (listing(), r"/v1/models lists 0 models: ; give --model"),
        (listing("a", "b"), r"/v1/models lists 2 models: a, b; give --model"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "does not list a model: HTTP Error 404"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "does not list a model"),
        (b"HTTP/1.1 200 OK\r\n\r\n[1]", "does not list a model"),
    ],
)
def test_a_model_that_is_not_found_is_asked_for(answer, words):
    with pytest.raises(ValueError, match=words):
        found_model(answer)


def test_only_http_and_grpc_are_known():
    with pytest.raises(ValueError, match=r"url: must be http://HOST:PORT or https://\.\.\., got"):
        connect("ftp://x", "")

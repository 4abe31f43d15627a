"""Streaming clients with little CPU use, for a load that shares the cores with the server.

While a stream runs, the client only stores the bytes with their arrival times; it parses them after the end. (`clients`
parses while it reads, because its callers show the progress.)
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import orjson

from quire.protos import generation_pb2 as pb

Piece = tuple[float, bytes]  # arrival (time.perf_counter) and bytes


@dataclass(slots=True)
class TokenStream:
    """The answer of one request."""

    sent_s: float  # time.perf_counter
    arrivals_s: list[float] = field(default_factory=list)  # one per token
    num_tokens: int = 0  # from the server's usage

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def gaps_s(self) -> Iterator[float]:
        """Times between consecutive tokens."""
        later = iter(self.arrivals_s)
        next(later, None)
        return (b - a for a, b in zip(self.arrivals_s, later, strict=False))


class StreamFailed(Exception):
    """The server refused the request or broke off; the message has its text."""


class SseStreams:
    """Streams of `POST /v1/completions`, with one connection each.

    Parameters
    ----------
    port
        Port on the loopback.
    model
        Model name in the requests.
    context
        With it, the streams use TLS.
    """

    def __init__(self, port: int, model: str, context: ssl.SSLContext | None = None):
        self._port, self._model, self._context = port, model, context

    async def read(self, prompt_ids: Iterable[int], num_tokens: int) -> TokenStream:
        """Request exactly `num_tokens` tokens; returns when the last one has arrived.

        Raises
        ------
        StreamFailed
            The status is not 200, an error event came, or the stream ended without [DONE].
        """
        body = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n"
            "Content-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        sent_s = time.perf_counter()
        loop = asyncio.get_running_loop()
        transport, reader = await loop.create_connection(
            _Reader, "127.0.0.1", self._port, ssl=self._context
        )
        try:
            transport.write(head.encode() + data)
            pieces = await reader.ended
        finally:
            transport.close()
        return parse_sse(sent_s, pieces)

    async def close(self) -> None:
        pass


class _Reader(asyncio.Protocol):
    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self.ended: asyncio.Future[list[Piece]] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(self._pieces)


def parse_sse(sent_s: float, pieces: list[Piece]) -> TokenStream:
    """Parse a whole HTTP/1.1 response: server-sent events with the arrival time of their last byte."""
    stream, done = TokenStream(sent_s), False
    for arrival_s, event in _events(pieces):
        data = event.partition(b"data: ")[2]
        if not data:  # a comment
            continue
        if data == b"[DONE]":
            done = True
            continue
        chunk = orjson.loads(data)
        if "error" in chunk:
            raise StreamFailed(str(chunk["error"])[:300])
        if any(choice["text"] for choice in chunk["choices"]):
            stream.arrivals_s.append(arrival_s)
        if usage := chunk.get("usage"):
            stream.num_tokens = usage["completion_tokens"]
    if not done:
        raise StreamFailed(f"the stream ended after {len(stream.arrivals_s)} tokens")
    return stream


def _events(pieces: list[Piece]) -> Iterator[Piece]:
    """The events of a chunked body."""
    rest = b""
    for arrival_s, data in _payloads(pieces):
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            yield arrival_s, event


def _payloads(pieces: list[Piece]) -> Iterator[Piece]:
    """Decode the chunks (RFC 9112, section 7.1) that have arrived, with arrival times."""
    buffer, in_body, left = b"", False, 0  # of the chunk, with the end of its line
    for arrival_s, data in pieces:
        buffer += data
        if not in_body:
            head, blank, rest = buffer.partition(b"\r\n\r\n")
            if not blank:
                continue
            _check_head(head, rest)
            buffer, in_body = rest, True
        payload = b""
        while buffer:
            if left:
                taken, buffer = buffer[:left], buffer[left:]
                payload += taken[: max(0, left - 2)]
                left -= len(taken)
                continue
            line, end, rest = buffer.partition(b"\r\n")
            if not end:
                break
            left, buffer = int(line.split(b";")[0], 16) + 2, rest
        if payload:
            yield arrival_s, payload


def _check_head(head: bytes, rest: bytes) -> None:
    if not head.startswith(b"HTTP/1.1 200 "):
        raise StreamFailed(f"{head[:60]!r}: {rest[:300]!r}")
    if b"transfer-encoding: chunked" not in head.lower():
        raise StreamFailed(f"not chunked: {head[:300]!r}")


class GrpcStreams:
    """Streams of `quire.v1.Generation/Generate` over one channel; messages are decoded after the end.

    Parameters
    ----------
    port
        Port on the loopback.
    model
        Model name in the requests.
    authority
        Certificate in PEM form that the server's must be signed with; with it, the channel uses TLS.
    """

    def __init__(self, port: int, model: str, authority: bytes | None = None):
        import grpc

        self._model = model
        address = f"127.0.0.1:{port}"
        if authority is None:
            self._channel = grpc.aio.insecure_channel(address)
        else:
            credentials = grpc.ssl_channel_credentials(authority)
            self._channel = grpc.aio.secure_channel(address, credentials)
        self._generate = self._channel.unary_stream(
            "/quire.v1.Generation/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=bytes,
        )

    async def read(self, prompt_ids: Iterable[int], num_tokens: int) -> TokenStream:
        """See `SseStreams.read`."""
        import grpc

        request = pb.GenerateRequest(
            model=self._model,
            token_ids=pb.TokenIds(ids=prompt_ids),
            sampling=pb.SamplingOptions(max_tokens=num_tokens, temperature=0.0),
            ignore_eos=True,
        )
        pieces: list[Piece] = []
        sent_s = time.perf_counter()
        try:
            async for data in self._generate(request):
                pieces.append((time.perf_counter(), data))
        except grpc.aio.AioRpcError as error:
            raise StreamFailed(f"{error.code().name}: {error.details()}") from None
        return parse_grpc(sent_s, pieces)

    async def close(self) -> None:
        await self._channel.close()


def parse_grpc(sent_s: float, pieces: list[Piece]) -> TokenStream:
    """Parse the messages (`GenerateResponse`) of one call."""
    stream = TokenStream(sent_s)
    for arrival_s, data in pieces:
        response = pb.GenerateResponse.FromString(data)
        stream.arrivals_s += [arrival_s] * len(response.token_ids)
        if response.HasField("usage"):
            stream.num_tokens = response.usage.completion_tokens
    return stream

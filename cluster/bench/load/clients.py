"""Streaming clients for OpenAI's HTTP API and for Quire's gRPC.

Both record when each piece of an answer arrived and how many tokens it had. One event loop reads all streams and takes
the times; `load_generator.Run.loop_lags_s` shows whether the loop was delayed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class RequestFailed(Exception):
    """The server refused the request or ended the answer early; the message has the status and text."""


@dataclass(slots=True)
class Answer:
    """An answer with arrival times (`time.perf_counter`).

    Attributes
    ----------
    arrivals_s, tokens
        Arrival time and number of tokens of each piece that had tokens.
    token_ids
        Empty if the server does not return ids.
    cached_tokens
        Prompt tokens found in the cache.
    predicted_tokens
        Prompt tokens that the router expected in the cache; None if the server does not report them.
    host_cached_tokens
        The part of `cached_tokens` that came from the host tier, if the server reports it.
    """

    arrivals_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int | None = None
    replica: str = ""
    host_cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)


class Client(Protocol):
    """A connection to a server."""

    async def complete(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        session: str = "",
        retain: bool = False,
    ) -> Answer:
        """Send a prompt and read the answer; `retain`: the session continues soon, if the server takes such a hint."""
        ...

    async def close(self) -> None: ...


class OpenAIClient:
    """Streams `POST /v1/completions` with token ids; opens a connection for each request.

    Parameters
    ----------
    url
        http:// or https:// with the application's prefix; /v1 at the end is optional.
    model
        Model name in the requests.
    extra
        More fields of the body, for example `{"return_token_ids": true}`.
    timeout_s
        Longest wait for the next bytes.
    headers
        More headers of every request.
    """

    def __init__(
        self,
        url: str,
        model: str,
        extra: dict[str, Any] | None = None,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] = _NO_HEADERS,
    ):
        self._url = urllib.parse.urlsplit(_without_version(url))
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise ValueError(f"url: must be http://HOST:PORT or https://..., got {url!r}")
        self._model, self._extra, self._timeout_s = model, extra or {}, timeout_s
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    async def complete(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        session: str = "",
        retain: bool = False,
    ) -> Answer:
        body = self.body(prompt_ids, max_tokens, session, retain)
        answer = Answer()
        try:
            async with self._post("/v1/completions", body) as (headers, lines):
                _explain(answer, headers)
                async for line in lines:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        self._add(answer, json.loads(line[5:]))
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from None
        return answer

    def body(
        self, prompt_ids: Sequence[int], max_tokens: int, session: str, retain: bool = False
    ) -> dict[str, Any]:
        """The JSON body of a request."""
        return {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"prompt_cache_key": session} if session else {}),
            **({"prompt_cache_retention": "24h"} if retain else {}),
            **self._extra,
        }

    @staticmethod
    def _add(answer: Answer, event: dict[str, Any]) -> None:
        now_s = time.perf_counter()
        if "error" in event:
            raise RequestFailed(str(event["error"])[:300])
        for choice in event.get("choices") or ():
            # Without ids a piece counts as one token, because nearly every server sends one token per piece.
            ids = choice.get("token_ids")
            count = len(ids) if ids is not None else bool(choice.get("text"))
            if count:
                answer.arrivals_s.append(now_s)
                answer.tokens.append(int(count))
                answer.token_ids += ids or ()
        if usage := event.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens") or 0
            answer.host_cached_tokens = details.get("host_cached_tokens") or 0
            missing = usage["completion_tokens"] - answer.num_tokens
            # The usage has more tokens than the pieces: some pieces had several. Count them in the last piece.
            if missing > 0 and answer.tokens:
                answer.tokens[-1] += missing
            # No piece had text, because the tokens are control tokens or incomplete characters: count one piece now.
            elif missing > 0:
                answer.arrivals_s.append(now_s)
                answer.tokens.append(missing)

    async def close(self) -> None:
        pass

    @asynccontextmanager
    async def _post(
        self, path: str, body: dict[str, Any]
    ) -> AsyncIterator[tuple[dict[str, str], AsyncIterator[bytes]]]:
        """Send a request; yields the response's headers and the lines of its body."""
        url = self._url
        tls = ssl.create_default_context() if url.scheme == "https" else None
        port = url.port or (443 if tls else 80)
        reader, writer = await asyncio.open_connection(url.hostname, port, ssl=tls, limit=1 << 20)
        try:
            data = json.dumps(body).encode()
            head = (
                f"POST {url.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {url.netloc}\r\n"
                "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
                f"{self._headers}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + data)
            await writer.drain()
            status, headers = await self._head(reader)
            chunked = headers.get("transfer-encoding", "").lower() == "chunked"
            if status != 200:
                text = b"".join([line async for line in self._lines(reader, chunked)])
                raise RequestFailed(f"status {status}: {text[:300].decode(errors='replace')}")
            yield headers, self._lines(reader, chunked)
        finally:
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        text = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self._timeout_s)
        first, *rest = text.decode("latin-1").split("\r\n")
        headers = {}
        for line in rest:
            name, colon, value = line.partition(":")
            if colon:
                headers[name.strip().lower()] = value.strip()
        return int(first.split(" ", 2)[1]), headers

    async def _lines(self, reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
        rest = b""
        while data := await asyncio.wait_for(self._piece(reader, chunked), self._timeout_s):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    @staticmethod
    async def _piece(reader: asyncio.StreamReader, chunked: bool) -> bytes:
        """Read the next bytes of the body; empty at its end."""
        if not chunked:
            return await reader.read(1 << 16)
        size = int((await reader.readline()).split(b";")[0] or b"0", 16)
        data = await reader.readexactly(size)
        await reader.readline()
        return data


class GrpcClient:
    """Streams `quire.v1.Generation/Generate` over one channel; it has no hint to retain a session.

    Parameters
    ----------
    target
        HOST:PORT.
    model
        Model name in the requests; empty for the application's only model.
    headers
        Metadata of every call.
    """

    def __init__(self, target: str, model: str = "", headers: Mapping[str, str] = _NO_HEADERS):
        import grpc

        from quire.protos import generation_pb2_grpc

        self._model = model
        self._metadata = tuple(headers.items())
        self._channel = grpc.aio.insecure_channel(target)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    async def complete(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        session: str = "",
        retain: bool = False,
    ) -> Answer:
        import grpc

        from quire.protos import generation_pb2 as pb

        request = pb.GenerateRequest(
            model=self._model,
            token_ids=pb.TokenIds(ids=prompt_ids),
            sampling=pb.SamplingOptions(max_tokens=max_tokens, temperature=0.0),
            ignore_eos=True,
            session=session,
        )
        answer = Answer()
        try:
            call = self._stub.Generate(request, metadata=self._metadata)
            async for response in call:
                if response.token_ids:
                    answer.arrivals_s.append(time.perf_counter())
                    answer.tokens.append(len(response.token_ids))
                    answer.token_ids += response.token_ids
                if response.HasField("usage"):
                    answer.prompt_tokens = response.usage.prompt_tokens
                    answer.cached_tokens = response.usage.cached_tokens
                    answer.host_cached_tokens = response.usage.host_cached_tokens
            _explain(answer, dict(await call.trailing_metadata() or ()))
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(f"{error.code().name}: {error.details()}") from None
        return answer

    async def close(self) -> None:
        await self._channel.close()


def _explain(answer: Answer, headers: Mapping[str, Any]) -> None:
    """Record the replica and the prediction that Quire reports in headers or trailing metadata."""
    answer.replica = str(headers.get("x-quire-replica", ""))
    predicted = headers.get("x-quire-predicted-cached-tokens")
    answer.predicted_tokens = None if predicted is None else int(predicted)


def served_model(
    url: str, headers: Mapping[str, str] = _NO_HEADERS, timeout_s: float = 30.0
) -> str:
    """Ask a server for the name of its only model.

    Parameters
    ----------
    url
        http:// or https:// with the application's prefix; /v1 at the end is optional.

    Raises
    ------
    ValueError
        The server does not answer, or lists no model or several.
    """
    place = f"{_without_version(url)}/v1/models"
    try:
        asked = urllib.request.Request(place, headers=dict(headers))
        with urllib.request.urlopen(asked, timeout=timeout_s) as response:
            names = [model["id"] for model in json.load(response)["data"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{place} does not list a model: {error}; give --model") from None
    if len(names) != 1:
        raise ValueError(f"{place} lists {len(names)} models: {', '.join(names)}; give --model")
    return names[0]


def _without_version(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def connect(
    url: str,
    model: str,
    extra: dict[str, Any] | None = None,
    headers: Mapping[str, str] = _NO_HEADERS,
) -> Client:
    """Make a client for an http://, https:// or grpc:// URL.

    Raises
    ------
    ValueError
        The URL has another scheme.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "grpc":
        return GrpcClient(rest, model, headers)
    return OpenAIClient(url, model, extra, headers=headers)

"""How well-known clients read a stream: each reader here follows the parsing rules of one of them.

A reader takes the pieces of a body as they came from the socket, and gives the text that its client would show. It
raises `Unreadable` where the client reports a failed request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Unreadable(Exception):
    """The client fails on this stream."""


def vllm_bench(pieces: Iterable[bytes]) -> str:
    """`vllm bench serve`: events end with an empty line; a comment is skipped; `data: ` is cut off what is left."""
    texts, is_done = [], False
    for event in _parts(pieces, "\n\n"):
        event = event.strip()
        if not event or event.startswith(":"):
            continue
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            is_done = True
        else:
            texts.append(_text(_json(data)))
    return _finished(texts, is_done)


def sglang_bench(pieces: Iterable[bytes]) -> str:
    """SGLang's `bench_serving`: each line that is not empty is data, with or without `data: `."""
    texts, is_done = [], False
    for line in _parts(pieces, "\n"):
        line = line.strip()
        if not line:
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            is_done = True
        else:
            texts.append(_text(_json(data)))
    return _finished(texts, is_done)


def llmperf(pieces: Iterable[bytes]) -> str:
    """llmperf: the first six characters of each line that is not empty are dropped unseen."""
    texts, is_done = [], False
    for line in _parts(pieces, "\n"):
        line = line.strip()
        if not line:
            continue
        data = line[len("data: ") :]
        if data == "[DONE]":
            is_done = True
            continue
        chunk = _json(data)
        if "error" in chunk:
            raise Unreadable(chunk["error"])
        texts.append(_text(chunk))
    return _finished(texts, is_done)


def dify(pieces: Iterable[bytes]) -> str:
    """Dify: what is not JSON ends the answer with what is there, which the user then sees as an empty one."""
    texts = []
    for event in _parts(pieces, "\n\n"):
        event = event.strip()
        if not event or event.startswith(":"):
            continue
        data = event.removeprefix("data:").lstrip()
        if data == "[DONE]":
            continue
        texts.append(_text(_json(data)))
    return "".join(texts)


def openai_python(pieces: Iterable[bytes]) -> str:
    """openai-python: fields by line, and an event at each empty line if any field was ever set.

    The id stays set, so from the first `id:` on an empty line after a comment is an event without data.
    """
    texts: list[str] = []
    data: list[str] = []
    name = last_id = ""
    for line in _parts(pieces, "\n"):
        line = line.rstrip("\r")
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                data.append(value)
            elif field == "event":
                name = value
            elif field == "id":
                last_id = value
            continue
        if not (data or name or last_id):
            continue
        event, data, name = "\n".join(data), [], ""
        if event.startswith("[DONE]"):
            return "".join(texts)
        chunk = _json(event)
        if "error" in chunk:
            raise Unreadable(chunk["error"])
        texts.append(_text(chunk))
    raise Unreadable("no [DONE]")


READERS: dict[str, Callable[[Iterable[bytes]], str]] = {
    reader.__name__: reader for reader in (vllm_bench, sglang_bench, llmperf, dify, openai_python)
}
# SGLang's and llmperf's take every line for data.
READERS_OF_COMMENTS = ("vllm_bench", "dify", "openai_python")


def _parts(pieces: Iterable[bytes], end: str) -> Iterator[str]:
    """What the separator ends, however the pieces are cut."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(end.encode())
        for part in whole:
            yield part.decode()
    if rest:
        yield rest.decode()


def _json(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unreadable(f"{text[:40]!r}: {error}") from None


def _text(chunk: dict[str, Any]) -> str:
    (choice,) = chunk["choices"]
    return (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""


def _finished(texts: list[str], is_done: bool) -> str:
    if not is_done:
        raise Unreadable("no [DONE]")
    return "".join(texts)

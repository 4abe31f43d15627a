"""Reads the JSON body of a request, up to a size limit."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import Request

from quire.cluster.http import json_size
from quire.protos.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding

# If a body is too large, the rest of it is read and discarded: otherwise the connection is reset before the client has
# read the answer. Beyond this multiple of the size limit, reading stops.
_DISCARDED_BODIES = 8


async def read_json(request: Request, max_body_bytes: int) -> Any:
    """Read and decode the body.

    Raises
    ------
    BodyTooLarge
        The body is above `max_body_bytes`, with or without a content length.
    UnsupportedEncoding
        The body is compressed.
    InvalidRequest
        The content type is not JSON, the body is not valid JSON, or it has too many values.
    """
    body = await _read_body(request, max_body_bytes)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise UnsupportedEncoding(
            f"content-encoding must be identity, got {encoding[:64]!r}: compressed bodies are not supported",
            field="content-encoding",
        )
    content_type = request.headers.get("content-type", "")
    # Browsers let any page send text/plain or form data to other origins without a preflight, but not JSON.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequest(
            f"content-type must be application/json, got {content_type[:64]!r}",
            field="content-type",
        )
    try:
        await json_size.check(body)
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if len(body) > json_size.YIELD_BYTES:
        await asyncio.sleep(0)
    return value


async def _read_body(request: Request, max_body_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= max_body_bytes:
            chunks.append(chunk)
        elif num_bytes > _DISCARDED_BODIES * max_body_bytes:
            break
        else:
            chunks.clear()
    if num_bytes > max_body_bytes:
        raise BodyTooLarge(
            f"the body must have at most {max_body_bytes} bytes, got {num_bytes} or more"
        )
    return b"".join(chunks)

"""The route of OpenAI's Embeddings API.

```
POST /v1/embeddings    a vector for each input
```
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Literal

import numpy as np
import orjson
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from quire.cluster.api_common.front_end import (
    counting_refusals,
    explain_headers,
    renamed,
    with_headers,
)
from quire.cluster.http.answer_response import until_disconnect
from quire.cluster.http.embeddings_api.embeddings_body import EmbeddingsRequest
from quire.cluster.http.http_answers import PromptTokensDetails, prompt_tokens_details
from quire.cluster.http.http_body import describe_route, parse_body
from quire.cluster.http.http_schema import IGNORED_FIELDS
from quire.cluster.http.json_body import read_json
from quire.protos.errors import QuireError
from quire.router.types import Embeddings, GenerationRequest, Service

_BODY = EmbeddingsRequest


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class EmbeddingObject(_Shape):
    """The embedding of one input."""

    object: Literal["embedding"]
    index: int = Field(description="Index of the input.")
    embedding: list[float] | str = Field(
        description="The values; with `encoding_format` base64, little-endian float32 as base64."
    )


class EmbeddingsUsage(_Shape):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(_Shape):
    """The embeddings of the inputs, in their order."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingsUsage


class EmbeddingsResponse(Response):
    """Embeds the inputs of a request. A client that leaves ends it.

    Parameters
    ----------
    request
        The router's request.
    body
        Its body.
    names
        Map from the router's names of fields to the client's names.
    """

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        body: EmbeddingsRequest,
        names: Mapping[str, str],
    ):
        super().__init__()
        self._service = service
        self._request = request
        self._body = body
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._answer(send))

    async def _answer(self, send: Send) -> None:
        try:
            found = await self._service.embed(self._request, self._body.dimensions)
        except QuireError as error:
            raise renamed(error, self._names) from None
        headers = explain_headers(found.explain, complete=True)
        content = _encoded(
            found,
            self._request.model or self._service.model_info().name,
            self._body.encoding_format,
        )
        answer = StreamingResponse(content, headers=headers, media_type="application/json")
        await answer.stream_response(send)


async def _encoded(found: Embeddings, model: str, form: str | None) -> AsyncIterator[bytes]:
    """Encode an answer in parts, because all vectors at once could delay other requests."""
    encode = _as_base64 if form == "base64" else _as_numbers
    before = b'{"object":"list","data":['
    for index, vector in enumerate(found.vectors):
        yield b'%s{"object":"embedding","index":%d,"embedding":%s}' % (
            *(before, index, encode(vector)),
        )
        before = b","
        await asyncio.sleep(0)
    usage = {
        "prompt_tokens": found.usage.prompt_tokens,
        "total_tokens": found.usage.prompt_tokens,
        "prompt_tokens_details": prompt_tokens_details(found.usage),
    }
    yield b'],"model":%s,"usage":%s}' % (orjson.dumps(model), orjson.dumps(usage))


def _as_numbers(vector: np.ndarray) -> bytes:
    return orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)


def _as_base64(vector: np.ndarray) -> bytes:
    return b'"%s"' % base64.b64encode(vector.astype("<f4", copy=False).tobytes())


def add_routes(
    app: FastAPI, get_service: Callable[[], Service], max_body_bytes: int, keepalive_s: float
) -> None:
    """Add the route to the application; the parameters are those of `http_api.build_app`."""

    async def prepared(request: Request) -> EmbeddingsResponse:
        body = parse_body(_BODY, await read_json(request, max_body_bytes))
        asked, names = with_headers(body.to_request(request.state.request_id), request.headers)
        return EmbeddingsResponse(get_service(), asked, body, body.router_names() | names)

    @app.post(
        _BODY.path,
        **describe_route(
            _BODY,
            EmbeddingList,
            "Embed texts or token ids, in the form of OpenAI's Embeddings API.",
            ignored=IGNORED_FIELDS - _BODY.refused.keys() - _BODY.model_fields.keys(),
            refused=_BODY.refused,
        ),
    )
    async def embeddings(request: Request) -> Response:
        with counting_refusals(get_service()):
            return await prepared(request)

    app.state.body_models += [_BODY]

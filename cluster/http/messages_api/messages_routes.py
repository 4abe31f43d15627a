"""Anthropic's Messages API over a `Service`.

```
POST /v1/messages                  an answer, whole or as events
POST /v1/messages/count_tokens     the tokens of a prompt; nothing is generated
```

The query `?beta=true` and the headers `anthropic-version` and `anthropic-beta` are accepted and ignored: a field of a
beta is served or refused by its own name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from quire.cluster.api_common.front_end import (
    counting_refusals,
    renamed,
    with_headers,
)
from quire.cluster.http.http_answers import json_response
from quire.cluster.http.http_body import describe_route
from quire.cluster.http.json_body import read_json
from quire.cluster.http.messages_api.messages_answers import (
    MessageAnswer,
    MessageEvent,
    MessagesError,
    TokenCount,
)
from quire.cluster.http.messages_api.messages_errors import error_form, request_id_header
from quire.cluster.http.messages_api.messages_requests import (
    counted_request,
    generation_request,
    router_names,
)
from quire.cluster.http.messages_api.messages_response import MESSAGE_ID_PREFIX, MessagesResponse
from quire.cluster.http.messages_api.messages_schema import (
    IGNORED_FIELDS,
    REFUSED,
    AssistantTurn,
    CountTokensBody,
    CustomTool,
    MessagesBody,
    RedactedThinkingBlock,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
    parse_messages_body,
)
from quire.protos.errors import QuireError
from quire.router.types import Service

PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"
_BODY_MODELS: tuple[type[BaseModel], ...] = (
    MessagesBody,
    CountTokensBody,
    UserTurn,
    AssistantTurn,
    SystemTurn,
    CustomTool,
    TextBlock,
    ThinkingBlock,
    RedactedThinkingBlock,
    ToolUseBlock,
    ToolResultBlock,
    MessageEvent,
)


def add_routes(
    app: FastAPI, get_service: Callable[[], Service], max_body_bytes: int, keepalive_s: float
) -> None:
    """Add the routes to the application; the parameters are those of `http_api.build_app`."""
    app.state.error_forms[PATH] = error_form
    app.state.id_prefixes.append(MESSAGE_ID_PREFIX)
    app.state.body_models += _BODY_MODELS

    async def prepared(request: Request) -> MessagesResponse:
        body = parse_messages_body(MessagesBody, await read_json(request, max_body_bytes))
        asked = await generation_request(body, request.state.request_id)
        asked, names = with_headers(asked, request.headers)
        return MessagesResponse(get_service(), body, asked, names, keepalive_s=keepalive_s)

    @app.post(
        PATH,
        **_docs(
            "Answer the last turn of a conversation.", MessagesBody, MessageAnswer, MessageEvent
        ),
    )
    async def messages(request: Request) -> Response:
        with counting_refusals(get_service()):
            return await prepared(request)

    @app.post(
        COUNT_PATH,
        **_docs(
            "Count the tokens of a prompt, as its answer would count them.",
            CountTokensBody,
            TokenCount,
        ),
    )
    async def count_tokens(request: Request) -> Response:
        body = parse_messages_body(CountTokensBody, await read_json(request, max_body_bytes))
        asked = await counted_request(body, request.state.request_id)
        try:
            encoded = await get_service().encode(asked)
        except QuireError as error:
            raise renamed(error, router_names(body)) from None
        count = {"input_tokens": len(encoded.token_ids)}
        return json_response(count, headers=request_id_header(asked.request_id))


def _docs(
    purpose: str,
    body: type[BaseModel],
    answer: type[BaseModel],
    events: type[BaseModel] | None = None,
) -> dict[str, Any]:
    return describe_route(
        body,
        answer,
        f"{purpose} Anthropic's Messages API.",
        events=events,
        ignored=IGNORED_FIELDS,
        refused=REFUSED,
        error=MessagesError,
    )

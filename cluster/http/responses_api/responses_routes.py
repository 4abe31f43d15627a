"""The route of OpenAI's Responses API.

```
POST /v1/responses    answers the last turn of a conversation, which the request holds; nothing is stored
```
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request
from starlette.responses import Response

from quire.cluster.api_common.front_end import counting_refusals, with_headers
from quire.cluster.http.http_answers import ErrorAnswer
from quire.cluster.http.http_body import parse_body
from quire.cluster.http.http_schema import IGNORED_FIELDS
from quire.cluster.http.json_body import read_json
from quire.cluster.http.responses_api.response_object import (
    RESPONSE_ID_PREFIX,
    ResponseAnswer,
    ResponseEvent,
)
from quire.cluster.http.responses_api.responses_answer import ResponsesAnswer
from quire.cluster.http.responses_api.responses_body import REFERENCES, ResponsesRequest
from quire.router.types import Service

_BODY = ResponsesRequest


def add_routes(
    app: FastAPI, get_service: Callable[[], Service], max_body_bytes: int, keepalive_s: float
) -> None:
    """Add the route to the application; the parameters are those of `http_api.build_app`."""

    async def prepared(request: Request) -> ResponsesAnswer:
        body = parse_body(_BODY, await read_json(request, max_body_bytes))
        tools = await body.parsed_tools()
        asked = await body.to_request(request.state.request_id, tools)
        asked, names = with_headers(asked, request.headers)
        names = body.router_names() | names
        return ResponsesAnswer(get_service(), body, tools, asked, names, keepalive_s=keepalive_s)

    ignored = IGNORED_FIELDS - _BODY.refused.keys() - _BODY.model_fields.keys()

    @app.post(
        _BODY.path,
        description=(
            "Answer the last turn of a conversation, in the form of OpenAI's Responses API. Nothing is stored.\n\n"
            f"Accepted and ignored: {', '.join(sorted(ignored))}. "
            f"Refused unless null or neutral: {', '.join(sorted(_BODY.refused))}. Any other field is refused."
        ),
        response_model=ResponseAnswer,
        responses={
            200: {
                "model": ResponseAnswer,
                "content": {"text/event-stream": _schema(ResponseEvent)},
            },
            "4XX": {"model": ErrorAnswer},
            "5XX": {"model": ErrorAnswer},
        },
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": _schema(_BODY)}}
        },
    )
    async def responses(request: Request) -> Response:
        with counting_refusals(get_service()):
            return await prepared(request)

    app.state.id_prefixes.append(RESPONSE_ID_PREFIX)
    app.state.body_models += [_BODY, *REFERENCES, ResponseEvent]


def _schema(model: type) -> dict[str, dict[str, str]]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}

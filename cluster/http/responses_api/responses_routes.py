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
from quire.cluster.http.http_body import describe_route, parse_body
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

    @app.post(
        _BODY.path,
        **describe_route(
            _BODY,
            ResponseAnswer,
            "Answer the last turn of a conversation, in the form of OpenAI's Responses API. Nothing is stored.",
            events=ResponseEvent,
            ignored=IGNORED_FIELDS - _BODY.refused.keys() - _BODY.model_fields.keys(),
            refused=_BODY.refused,
        ),
    )
    async def responses(request: Request) -> Response:
        with counting_refusals(get_service()):
            return await prepared(request)

    app.state.id_prefixes.append(RESPONSE_ID_PREFIX)
    app.state.body_models += [_BODY, *REFERENCES, ResponseEvent]

"""The HTTP front end: OpenAI's API over a `Service`, as a FastAPI application.

```
POST /v1/completions, /v1/chat/completions    GET /v1/models, /v1/models/{id}
POST /tokenize, /detokenize, /v1/chat/completions/render    `http_tokenize`
GET /health (this process answers)            GET /ready (a request would be served)
GET /metrics (of the whole application, for Prometheus)
GET /v1/router/explain?request_id=            the routing decisions of a request
GET /version                                  GET /docs, /redoc, /openapi.json
```

The header `Last-Event-ID` resumes a broken stream after the event with this id (`router/request/resume.py`). Events
have ids if the request has that header, even an empty one, or `stream_options.include_event_ids`.

A body is read up to a size limit, decoded by orjson (no NaN, no lone surrogates, bounded depth) and parsed by
`http_body`. Every error has OpenAI's shape and comes from `quire.protos.errors`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quire.cluster.api_common.front_end import (
    EXPLAIN_HEADERS,
    counting_refusals,
    request_label,
    with_headers,
)
from quire.cluster.api_common.watchers import Watchers
from quire.cluster.auth.access_control import AccessControl
from quire.cluster.auth.http_door import add_door
from quire.cluster.auth.keyed_service import RATE_HEADERS, may_observe
from quire.cluster.http.error_response import error_response, formed_response
from quire.cluster.http.http_answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DecisionList,
    ErrorAnswer,
    ModelCard,
    ModelList,
    ReadyAnswer,
    adapter_card,
    decisions_answer,
    json_response,
    model_card,
)
from quire.cluster.http.http_body import describe_route, parse_body, refusal
from quire.cluster.http.http_chats import DOCUMENTED, ChatCompletionRequest
from quire.cluster.http.http_completions import CompletionRequest
from quire.cluster.http.http_generation import ID_PREFIXES, GenerationBody, GenerationResponse
from quire.cluster.http.http_middleware import Boundary, HostCheck
from quire.cluster.http.http_tokenize import add_tokenize_routes
from quire.cluster.http.json_body import read_json
from quire.protos.errors import (
    InvalidRequest,
    QuireError,
    UnsupportedField,
    model_not_found,
)
from quire.protos.metric_families import CONTENT_TYPE
from quire.router.request import resume
from quire.router.types import ResumePoint, Service

LAST_EVENT_ID = "Last-Event-ID"
DEFAULT_DECISIONS, MAX_DECISIONS = 20, 1000
# Response headers that scripts of web pages may read (CORS).
_EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    *EXPLAIN_HEADERS,
    *RATE_HEADERS,
)
_PREFLIGHT_S = 3600  # how long a browser may cache a preflight response
_MAX_SHOWN_CHARS = 256  # most characters of a path in an error message


# Adds the routes of an API: the application, `get_service`, `max_body_bytes` and `keepalive_s` of `build_app`.
AddRoutes = Callable[[FastAPI, Callable[[], Service], int, float], None]


def build_app(
    get_service: Callable[[], Service],
    *,
    max_body_bytes: int,
    echo_request_id: bool = False,
    keepalive_s: float = 0.0,
    cors_origins: Sequence[str] = (),
    allowed_hosts: Sequence[str] = ("*",),
    apis: Sequence[AddRoutes] = (),
    get_access: Callable[[], AccessControl] | None = None,
    get_watchers: Callable[[], Watchers] | None = None,
) -> FastAPI:
    """Build the HTTP application.

    Parameters
    ----------
    get_service
        Returns the service; called for each request.
    max_body_bytes
        Largest request body; a larger one gets status 413.
    echo_request_id
        Add the request's `X-Request-Id` to the response. Off under Ray Serve, which adds it.
    keepalive_s
        Interval of the comments that a stream sends until its first token; 0: no comments.
    cors_origins
        Origins of web pages that may use the API from scripts; `*`: all.
    allowed_hosts
        Names of this server in the header Host, besides localhost and IP addresses; `*`: all.
    apis
        Further APIs. A function that adds routes may also add to `app.state`: to `body_models` the models of its
        bodies, to `id_prefixes` the prefix of its answers' ids, to `error_forms` the form of its errors, by the path at
        which its routes begin.
    get_access
        Returns the keys; called for each request. None: no key is needed.
    get_watchers
        Returns what counts the streams that only watch; called for each of them. None: no limit.
    """
    version = importlib.metadata.version("quire")
    app = FastAPI(
        title="Quire",
        version=version,
        redirect_slashes=False,
        swagger_ui_oauth2_redirect_url=None,
    )
    if get_access is not None:
        # Below, every route gets the service as the request's key may use it.
        get_service = add_door(app, get_service, get_access)
    if "*" not in allowed_hosts:
        app.add_middleware(HostCheck, allowed=allowed_hosts)
    app.add_middleware(Boundary, echo_request_id=echo_request_id)
    if cors_origins:
        # Added last, so it is the outermost layer, and pages can read every response, errors included. Browsers send no
        # cookies or stored credentials to the API; a key in a header is set by the page.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_credentials=False,
            expose_headers=_EXPOSED_HEADERS,
            max_age=_PREFLIGHT_S,
        )
    app.add_exception_handler(QuireError, _on_quire_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_bad_parameter)
    _add_generation_routes(app, get_service, max_body_bytes, keepalive_s)
    _add_information_routes(app, get_service, version)
    app.state.body_models = [CompletionRequest, ChatCompletionRequest, *DOCUMENTED]
    app.state.error_forms = {}
    own_watchers = Watchers(sys.maxsize, sys.maxsize)
    app.state.get_watchers = get_watchers or (lambda: own_watchers)
    app.state.id_prefixes = list(ID_PREFIXES)
    add_tokenize_routes(app, get_service, max_body_bytes)
    for add_routes in apis:
        add_routes(app, get_service, max_body_bytes, keepalive_s)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


# --------------------------------------------------------------------------------------------------
# Routes
# --------------------------------------------------------------------------------------------------


def _add_generation_routes(
    app: FastAPI, get_service: Callable[[], Service], max_body_bytes: int, keepalive_s: float
) -> None:
    async def answer(request: Request, model: type[GenerationBody]) -> GenerationResponse:
        with counting_refusals(get_service()):
            return await prepared(request, model)

    async def prepared(request: Request, model: type[GenerationBody]) -> GenerationResponse:
        body = parse_body(model, await read_json(request, max_body_bytes))
        asked = body.to_request(request.state.request_id)
        last_id = request.headers.get(LAST_EVENT_ID)
        if last_id:
            asked = dataclasses.replace(asked, resume_from=_resume_point(last_id, body))
        asked, names = with_headers(asked, request.headers)
        event_ids = last_id is not None or body.asks_for_event_ids()
        if event_ids and body.stream and asked.prompts:
            raise UnsupportedField(
                f"the stream of a list of prompts cannot be resumed: with {LAST_EVENT_ID} and "
                f"stream_options.include_event_ids prompt must be one, got a list of {len(asked.prompts)}",
                field="prompt",
            )
        return GenerationResponse(
            get_service(), body, asked, names, event_ids=event_ids, keepalive_s=keepalive_s
        )

    @app.post(
        CompletionRequest.path,
        **describe_route(
            CompletionRequest,
            Completion,
            "Continue a prompt.",
            events=Completion,
            refused=CompletionRequest.refused,
        ),
    )
    async def completions(request: Request) -> Response:
        return await answer(request, CompletionRequest)

    @app.post(
        ChatCompletionRequest.path,
        **describe_route(
            ChatCompletionRequest,
            ChatCompletion,
            "Answer the last turn of a conversation.",
            events=ChatCompletionChunk,
            refused=ChatCompletionRequest.refused,
        ),
    )
    async def chat_completions(request: Request) -> Response:
        return await answer(request, ChatCompletionRequest)


def _add_information_routes(app: FastAPI, get_service: Callable[[], Service], version: str) -> None:
    @app.get("/v1/models", response_model=ModelList, responses=_ERRORS)
    async def models() -> Response:
        """The model that this application serves, and its adapters."""
        service = get_service()
        info = service.model_info()
        adapters = [adapter_card(entry, info) for entry in service.adapters()]
        return json_response({"object": "list", "data": [model_card(info), *adapters]})

    @app.get("/v1/models/{model_id:path}", response_model=ModelCard, responses=_ERRORS)
    async def model(model_id: str) -> Response:
        """The model, or one of its adapters."""
        service = get_service()
        info = service.model_info()
        if model_id == info.name:
            return json_response(model_card(info))
        adapters = {entry.ref.name: entry for entry in service.adapters()}
        if model_id not in adapters:
            raise model_not_found(model_id, [info.name, *adapters])
        return json_response(adapter_card(adapters[model_id], info))

    @app.get("/v1/router/explain", response_model=DecisionList, responses=_ERRORS)
    async def explain(request_id: str | None = None, limit: int = DEFAULT_DECISIONS) -> Response:
        """Explain routing decisions: the cost of the request on each replica, term by term.

        Any router answers for all routers. `request_id` is the response's `x-request-id` or its `id`; without it, the
        last `limit` decisions are returned.
        """
        if not 1 <= limit <= MAX_DECISIONS:
            raise InvalidRequest(
                f"limit must be in [1, {MAX_DECISIONS}], got {limit}", field="limit"
            )
        if request_id is not None:
            request_id = request_label(request_id, "request_id")
            for prefix in app.state.id_prefixes:
                request_id = request_id.removeprefix(prefix)
        return json_response(
            decisions_answer(request_id, await get_service().decisions(request_id, limit))
        )

    @app.get("/health")
    async def health() -> Response:
        """200 while this process answers, independent of its replicas: for liveness probes."""
        return json_response({"status": "ok"})

    @app.get("/ready", response_model=ReadyAnswer, responses={503: {"model": ReadyAnswer}})
    async def ready() -> Response:
        """200 if a request sent now would be served, else 503: for readiness probes.

        If keys are configured, only a key with the right `observe` gets more than `ready`.
        """
        service = get_service()
        readiness = service.readiness()
        content: dict[str, Any] = {"ready": readiness.ready}
        if may_observe(service):
            content |= {
                "reason": readiness.reason,
                "replicas": readiness.replicas,
                "startup": readiness.startup_s,
                "engine": readiness.engine,
            }
        return json_response(content, status_code=200 if readiness.ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The metrics of all routers and replicas, in Prometheus' text format. Any router answers for all."""
        return Response(await get_service().metrics(), headers={"content-type": CONTENT_TYPE})

    @app.get("/version")
    async def show_version() -> Response:
        """The version of Quire."""
        return json_response({"version": version})


def _resume_point(last_id: str, body: GenerationBody) -> ResumePoint:
    """Parse the point at which a stream is resumed.

    Raises
    ------
    InvalidRequest
        The id is not valid, or the request is not for a stream.
    """
    if not body.stream:
        raise InvalidRequest(
            f"{LAST_EVENT_ID} resumes streams only: stream must be true, got {body.stream!r}",
            field=LAST_EVENT_ID,
        )
    return resume.parse(last_id, LAST_EVENT_ID)


# --------------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------------


async def _on_quire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    return error_response(request.scope, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer requests for unknown routes and methods."""
    assert isinstance(error, HTTPException)
    served = ", ".join(_served(request.app, request.scope.get("root_path", "")))
    asked = f"{request.method[:_MAX_SHOWN_CHARS]} {request.scope['path'][:_MAX_SHOWN_CHARS]}"
    detail = {
        "message": f"{asked} is not served; served are {served}",
        "type": "invalid_request_error",
        "param": None,
        "code": str(error.detail).lower().replace(" ", "_"),
    }
    return formed_response(request.scope, error.status_code, detail, dict(error.headers or {}))


def _served(app: FastAPI, prefix: str) -> list[str]:
    """Methods and paths of all routes below the application's prefix; the documentation pages come last."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    routes.sort(key=lambda route: not route.include_in_schema)
    return [
        f"{' and '.join(sorted((route.methods or set()) - {'HEAD'}))} {prefix}{route.path_format}"
        for route in routes
    ]


async def _on_bad_parameter(request: Request, error: Exception) -> Response:
    """Answer a bad query parameter in OpenAI's shape; FastAPI's default has another shape and status 422."""
    assert isinstance(error, RequestValidationError)
    problems = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
    return error_response(request.scope, refusal(cast(list[ErrorDetails], problems)))


# --------------------------------------------------------------------------------------------------
# OpenAPI
# --------------------------------------------------------------------------------------------------

_REFERENCE = "#/components/schemas/{model}"
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer},
    "5XX": {"model": ErrorAnswer},
}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's OpenAPI document with the models that FastAPI does not know, because the routes parse bodies."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models = [*app.state.body_models, ChatCompletionChunk]
        _, definitions = models_json_schema(
            [(model, "validation") for model in models], ref_template=_REFERENCE
        )
        document["components"]["schemas"].update(definitions["$defs"])
        app.openapi_schema = document
    return app.openapi_schema

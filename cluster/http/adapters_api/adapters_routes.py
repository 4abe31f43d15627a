"""The routes that load and unload adapters, with the right `admin`.

```
POST   /v1/adapters           load an adapter from a folder, or replace the one with its name
DELETE /v1/adapters/{name}    unload it; requests that run keep it
```

`GET /v1/models` lists the adapters with the model; a request names one as its `model`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from quire.cluster.http.http_answers import ErrorAnswer, ModelCard, adapter_card, json_response
from quire.cluster.http.http_body import describe_route, refusal
from quire.cluster.http.http_schema import Strict
from quire.cluster.http.json_body import read_json
from quire.protos.errors import InvalidRequest, described
from quire.router.types import Service


class LoadAdapterRequest(Strict):
    """A folder in PEFT's format: adapter_config.json and adapter_model.safetensors."""

    name: str = Field(description="The name that requests give as `model`.")
    path: str = Field(description="The folder, relative to `adapter_folder` of the configuration.")


class UnloadedAdapter(BaseModel):
    """The answer to a deletion."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str
    object: Literal["model"]
    deleted: bool


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer},
    "5XX": {"model": ErrorAnswer},
}


def _parse(body: Any) -> LoadAdapterRequest:
    """Parse a decoded body; raises `InvalidRequest`."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {described(body)}")
    try:
        return LoadAdapterRequest.model_validate(body)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)) from None


def add_routes(
    app: FastAPI, get_service: Callable[[], Service], max_body_bytes: int, keepalive_s: float
) -> None:
    """Add the routes to the application; the parameters are those of `http_api.build_app`."""

    @app.post(
        "/v1/adapters",
        **describe_route(LoadAdapterRequest, ModelCard),
    )
    async def load_adapter(request: Request) -> Response:
        """Load an adapter on all replicas, or replace the one with its name."""
        body = _parse(await read_json(request, max_body_bytes))
        service = get_service()
        entry = await service.load_adapter(body.name, body.path)
        return json_response(adapter_card(entry, service.model_info()))

    @app.delete("/v1/adapters/{name:path}", response_model=UnloadedAdapter, responses=_ERRORS)
    async def unload_adapter(name: str) -> Response:
        """Unload an adapter on all replicas. Requests that run keep it."""
        await get_service().unload_adapter(name)
        return json_response({"id": name, "object": "model", "deleted": True})

    app.state.body_models += [LoadAdapterRequest]

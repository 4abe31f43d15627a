"""A service that takes turns of every kind, and a client of `/v1/responses`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import httpx
import openai
import pytest
from live_app import serving

from quire.cluster.http.responses_api.responses_routes import add_routes


@pytest.fixture
def service(service_class):
    """The service whose `requests` are unchanged, but whose answer depends only on the beginnings of the texts."""

    class AnyTurns(service_class):
        async def generate(self, request):
            texts = [(m["role"], (m.get("content") or "")[:40]) for m in request.messages]
            plain = tuple({"role": role, "content": text} for role, text in texts)
            asked = dataclasses.replace(request, messages=plain)
            try:
                return await super().generate(asked)
            finally:
                self.requests[-1] = request

    return AnyTurns()


@pytest.fixture
def http(service) -> Iterator[httpx.Client]:
    with serving(service, apis=[add_routes], keepalive_s=0.1) as client:
        yield client


@pytest.fixture
def client(http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture
def ask(http: httpx.Client):
    """Post a body; `model` is optional."""
    numbers = itertools.count()

    def post(**body) -> httpx.Response:
        headers = {"x-request-id": f"asked-{next(numbers)}"}
        return http.post("/v1/responses", json={"input": "hello", **body}, headers=headers)

    return post

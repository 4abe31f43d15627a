"""A client's timeout reaches the router from the header and from the body."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from quire.cluster.api_common.front_end import TIMEOUT_HEADER, timeout_seconds
from quire.cluster.http.http_api import build_app
from quire.protos.errors import InvalidRequest


def ask(service, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    app = build_app(lambda: service, max_body_bytes=4096)

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://quire") as client:
            body = {"prompt": "a", "max_tokens": 2, **fields}
            return await client.post("/v1/completions", json=body, headers=headers)

    return asyncio.run(post())


@pytest.mark.parametrize(
    ("fields", "header", "deadline_s"),
    [
        ({}, None, None),
        ({"timeout": 7.5}, None, 7.5),
        ({"timeout": 7}, "3", 7.0),
        ({}, "3", 3.0),
        ({"timeout": None}, "0", None),
        ({}, "-1", None),
    ],
)
def test_field_and_header(service, fields, header, deadline_s):
    headers = None if header is None else {TIMEOUT_HEADER: header}
    assert ask(service, headers, **fields).status_code == 200
    assert service.requests[-1].deadline_s == deadline_s


def test_a_header_that_is_no_number_is_refused(service):
    answer = ask(service, {TIMEOUT_HEADER: "soon"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == TIMEOUT_HEADER and "'soon'" in error["message"]
    with pytest.raises(InvalidRequest):
        timeout_seconds("nan")


def test_a_time_that_is_over_is_never_sent(service):
    answer = ask(service, timeout=-0.5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert service.streams == []

"""CORS: a preflight is answered only if its origin is configured."""

from __future__ import annotations

import httpx
import pytest
from live_app import serving

from quire.cluster.api_common.front_end import EXPLAIN_HEADERS, explain_headers
from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.config_problems import ConfigError
from quire.protos.errors import Overloaded
from quire.router.types import Explain

CHAT = "/v1/chat/completions"
PAGE, OTHER = "https://chat.example.com", "https://evil.example.com"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-type,authorization,x-stainless-os",
}


def preflight(client: httpx.Client, origin: str, **headers: str) -> httpx.Response:
    return client.options(CHAT, headers={"Origin": origin, **PREFLIGHT, **headers})


def allowed(response: httpx.Response) -> str | None:
    return response.headers.get("access-control-allow-origin")


def test_nothing_is_allowed_by_default(service):
    with serving(service, cors_origins=[]) as client:
        refused = preflight(client, PAGE)
        assert refused.status_code == 405 and allowed(refused) is None
        assert allowed(client.post(CHAT, json=BODY, headers={"Origin": PAGE})) is None


@pytest.mark.parametrize("origins", [[PAGE, "http://localhost:3000"], ["*"]])
def test_a_page_of_a_configured_origin_is_served(service, origins):
    with serving(service, cors_origins=origins) as client:
        answer = preflight(client, PAGE)
        assert answer.status_code == 200 and allowed(answer) in (PAGE, "*")
        assert "POST" in answer.headers["access-control-allow-methods"]
        named = answer.headers["access-control-allow-headers"].lower()
        assert all(name in named for name in PREFLIGHT["Access-Control-Request-Headers"].split(","))
        whole = client.post(CHAT, json=BODY, headers={"Origin": PAGE})
        stream = client.post(CHAT, json={**BODY, "stream": True}, headers={"Origin": PAGE})
        models = client.get("/v1/models", headers={"Origin": PAGE})
        for response in (whole, stream, models):
            assert response.status_code == 200 and allowed(response) in (PAGE, "*")
        exposed = whole.headers["access-control-expose-headers"]
        assert "x-quire-replica" in exposed and "retry-after" in exposed
        for response in (answer, whole):
            assert "access-control-allow-credentials" not in response.headers


def test_a_page_of_another_origin_is_not(service):
    with serving(service, cors_origins=[PAGE]) as client:
        answer = preflight(client, OTHER)
        assert answer.status_code == 400 and allowed(answer) is None
        for origin in (OTHER, PAGE + ".evil.com", "null"):
            assert allowed(client.post(CHAT, json=BODY, headers={"Origin": origin})) is None
        assert (
            preflight(client, PAGE, **{"Access-Control-Request-Method": "DELETE"}).status_code
            == 400
        )


def test_a_page_can_read_every_error(service):
    with serving(service, cors_origins=[PAGE]) as client:
        headers = {"Origin": PAGE}
        errors = [
            client.post(CHAT, json={}, headers=headers),
            client.post(CHAT, content=b"x" * (1 << 17), headers=headers),
            client.post("/v1/nothing", json={}, headers=headers),
            client.post(CHAT, json=BODY, headers={**headers, "x-request-id": "a" * 200}),
        ]
        service.refusal = Overloaded("full", retry_after_s=1.0)
        errors.append(client.post(CHAT, json=BODY, headers=headers))
        assert [error.status_code for error in errors][:3] == [400, 413, 404]
        for error in errors:
            assert allowed(error) == PAGE, error.text


def test_every_header_of_an_answer_is_one_that_pages_may_read():
    headers = explain_headers(
        Explain("r", "a", 1, 1, 0.1, "b", 1, answered_attempt=1, ttft_s=0.1), complete=True
    )
    assert set(headers) == set(EXPLAIN_HEADERS)


@pytest.mark.parametrize(
    "origin",
    [*("*", PAGE, "http://localhost:3000", "http://[::1]:8080", "https://10.0.0.1")],
)
def test_origins_of_the_configuration(origin):
    assert AppConfig.from_args({"http": {"cors_origins": [origin]}}).http.cors_origins == [origin]


@pytest.mark.parametrize(
    "origin",
    [
        "chat.example.com",
        PAGE + "/",
        PAGE + "/path",
        "https://*.example.com",
        "null",
        "",
        "HTTPS://A.B",
    ],
)
def test_what_no_browser_sends_is_refused(origin):
    with pytest.raises(ConfigError, match=r"http.cors_origins: each origin must be"):
        AppConfig.from_args({"http": {"cors_origins": [origin]}})

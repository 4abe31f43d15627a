"""Keys over HTTP, through real sockets: every route of the application, with every kind of key."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import re
from collections.abc import Iterator

import httpx
import openai
import pytest
from fastapi import FastAPI
from live_app import serving
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from quire.cluster.app import APIS
from quire.cluster.auth.access_rules import HTTP_RULES, Right
from quire.cluster.auth.key_ring import OTHER
from quire.cluster.auth.tenant_counters import visible_to
from quire.cluster.http.http_answers import ErrorAnswer
from quire.cluster.http.http_api import build_app
from quire.cluster.http.messages_api import messages_routes
from quire.cluster.http.messages_api.messages_answers import MessagesError
from quire.protos.metric_families import join

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}
RIGHTS_OF = {
    "generate": {Right.ANY_KEY, Right.GENERATE},
    "observe": {Right.ANY_KEY, Right.OBSERVE},
    "admin": {Right.ANY_KEY, Right.GENERATE, Right.OBSERVE, Right.ADMIN},
}


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path of every route."""
    found = []
    for route in app.routes:
        assert isinstance(route, Route), (
            "a mount or a websocket needs a rule of its own in `HttpDoor`"
        )
        found += [(method, route.path) for method in sorted(route.methods or ())]
    return found


ROUTES = routes_of(build_app(lambda: None, max_body_bytes=1000, apis=APIS))


@pytest.fixture
def http(service, keys) -> Iterator[httpx.Client]:
    access = keys.access()
    with serving(service, apis=APIS, get_access=lambda: access, echo_request_id=True) as client:
        client.access = access
        yield client


def basic(user: str, password: str) -> dict[str, str]:
    """The headers of a browser whose user has typed a password."""
    return {"authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}


def check_error(
    response: httpx.Response, status: int, code: str, needed: Right = Right.GENERATE
) -> str:
    """The error's message; nothing for HEAD, which has no body. A browser may open routes that need `observe`."""
    assert response.status_code == status, (response.request, response.text)
    scheme = 'Basic realm="Quire", charset="UTF-8"' if needed is Right.OBSERVE else "Bearer"
    assert response.headers.get("www-authenticate") == (scheme if status == 401 else None)
    if response.request.method == "HEAD":
        return ""
    if response.url.path.startswith(messages_routes.PATH):
        error = MessagesError.model_validate(response.json()).error
        assert error.type == {401: "authentication_error", 403: "permission_error"}[status]
    else:
        error = ErrorAnswer.model_validate(response.json()).error
        assert error.code == code
    assert response.headers["x-request-id"]
    return error.message


def test_every_route_has_a_rule():
    """A new route is denied until `access_rules` has its right."""
    assert not {path for _, path in ROUTES} - HTTP_RULES.keys()


def test_the_open_routes_are_these():
    assert {path for path, right in HTTP_RULES.items() if right is Right.OPEN} == {
        "/health",
        "/ready",
    }


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_route_is_served_to_keys_with_its_right_only(http, keys, method: str, path: str):
    url, needed = re.sub(r"{.*}", "acme/tiny", path), HTTP_RULES[path]
    for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"x-api-key": "sk-wrong"}):
        answer = http.request(method, url, headers=headers)
        if needed is Right.OPEN:
            assert answer.status_code == 200
        else:
            check_error(answer, 401, "invalid_api_key", needed)
    for name, rights in RIGHTS_OF.items():
        answer = http.request(method, url, headers=keys.header(name), json=BODY)
        if needed is Right.OPEN or needed in rights:
            assert answer.status_code not in (401, 403), answer.text
        else:
            message = check_error(answer, 403, "permission_denied")
            assert method == "HEAD" or needed.value in message


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_browser_s_password_opens_what_observe_opens_and_nothing_else(
    http, keys, method: str, path: str
):
    url, needed = re.sub(r"{.*}", "acme/tiny", path), HTTP_RULES[path]
    if needed is Right.OPEN:
        return
    for right in ("observe", "admin"):
        answer = http.request(method, url, headers=basic("anyone", keys.secrets[right]))
        assert answer.status_code == (200 if needed is Right.OBSERVE else 401), answer.text
    if needed is Right.OBSERVE:
        denied = http.request(method, url, headers=basic("x", keys.secrets["generate"]))
        check_error(denied, 403, "permission_denied", needed)
        for headers in (
            basic("x", "sk-wrong"),
            basic(keys.secrets["observe"], "x"),
            basic("x", ""),
            {"authorization": "Basic !"},
            {"authorization": "Basic"},
        ):
            answer = http.request(method, url, headers=headers)
            check_error(answer, 401, "invalid_api_key", needed)


@pytest.mark.parametrize(
    "path", ["/nothing", "/", "//health", "/health/", "/Health", "/v1", "/metrics/"]
)
def test_an_unknown_path_needs_a_key(http, keys, path: str):
    check_error(http.get(path), 401, "invalid_api_key")
    assert http.get(path, headers=keys.header("generate")).status_code in (200, 404)


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "OPTIONS", "HEAD", "TRACE"])
def test_another_method_needs_the_route_s_right(http, keys, method: str):
    assert http.request(method, CHAT).status_code == 401
    assert http.request(method, CHAT, headers=keys.header("observe")).status_code == 403
    assert http.request(method, CHAT, headers=keys.header("generate")).status_code == 405


def test_a_path_that_the_router_reads_as_a_route_has_its_rule(http, keys):
    """A route's expression lets a line break at the end pass."""
    assert http.get("/metrics%0A").status_code == 401
    assert http.get("/metrics%0A", headers=keys.header("generate")).status_code == 403


def test_a_route_without_a_rule_is_denied_to_every_key(service, keys):
    access = keys.access()
    app = build_app(lambda: service, max_body_bytes=1000, apis=APIS, get_access=lambda: access)

    @app.post("/v1/new/{name}")
    async def new(name: str) -> dict:
        return {}

    @app.get("/v1/old")
    async def old() -> dict:
        return {}

    async def ask(method: str, path: str, **headers: str) -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.request(method, path, headers=headers)).status_code

    for method, path in (("POST", "/v1/new/a"), ("GET", "/v1/new/a"), ("GET", "/v1/old")):
        assert asyncio.run(ask(method, path)) == 401
        assert asyncio.run(ask(method, path, **keys.header("admin"))) == 403


def test_websockets_are_closed(service, keys):
    access = keys.access()
    app = build_app(lambda: service, max_body_bytes=1000, apis=APIS, get_access=lambda: access)
    sent = []

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/health", "headers": []}
    asyncio.run(app(scope, None, send))
    assert sent == [{"type": "websocket.close"}]


def test_without_a_key_health_and_readiness_have_no_detail(http, keys, service):
    assert http.get("/health").json() == {"status": "ok"}
    for headers in ({}, {"x-api-key": "wrong"}, keys.header("generate")):
        assert http.get("/ready", headers=headers).json() == {"ready": True}
    assert http.get("/ready", headers=keys.header("observe")).json()["startup"]
    service.ready = False
    answer = http.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False})


def test_a_preflight_needs_no_key_and_refusals_can_be_read_by_pages(service, keys):
    access = keys.access()
    origin = "https://chat.example.com"
    with serving(service, apis=APIS, get_access=lambda: access, cors_origins=[origin]) as http:
        asked = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        answer = http.options(CHAT, headers=asked)
        assert answer.status_code == 200
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        refused = http.post(CHAT, headers={"origin": origin}, json=BODY)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == origin


def test_a_refusal_reaches_a_client_that_sends_a_large_body(http, keys):
    """The body is not read, and the connection must not be reset before the client has the answer."""
    for _ in range(3):
        answer = http.post(CHAT, content=b"x" * (8 << 20))
        check_error(answer, 401, "invalid_api_key")
    assert http.post(CHAT, headers=keys.header("generate"), json=BODY).is_success


def test_real_clients_hear_why(http, keys):
    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{http.base_url}/v1", api_key=key, max_retries=0)

    ask = {"model": "acme/tiny", **BODY}
    assert client(keys.secrets["generate"]).chat.completions.create(**ask).choices
    with pytest.raises(openai.AuthenticationError, match="the key is not valid"):
        client("sk-wrong").chat.completions.create(**ask)
    with pytest.raises(openai.PermissionDeniedError, match="lacks the right 'generate'"):
        client(keys.secrets["observe"]).chat.completions.create(**ask)


def test_the_key_decides_the_tenant(http, keys, service):
    """The client's salt divides the tenant's cache further, and no salt reaches another tenant's."""
    scopes = []
    for name, salt in itertools.product(("generate", "other"), (None, "x", "team-a", "team-b")):
        body = BODY | ({"cache_salt": salt} if salt else {})
        assert http.post(CHAT, headers=keys.header(name), json=body).is_success
        scopes.append(service.requests[-1].tenant)
    assert len(set(scopes)) == len(scopes)
    assert scopes[0] == "team-a" and scopes[4] == "team-b"
    assert [scope.partition("/")[0] for scope in scopes] == ["team-a"] * 4 + ["team-b"] * 4
    assert {request.payer for request in service.requests} == {"team-a", "team-b"}
    long = http.post(CHAT, headers=keys.header("generate"), json=BODY | {"cache_salt": "x" * 257})
    assert long.status_code == 400 and "cache_salt must have at most 256 bytes" in long.text


def test_a_model_that_the_key_does_not_allow_is_refused(http, keys, service):
    keys.add("bound", "generate", models=["acme/large"])
    http.access.ring.poll()
    for model in ({}, {"model": "acme/tiny"}):
        answer = http.post(CHAT, headers=keys.header("bound"), json=BODY | model)
        assert "acme/tiny" in check_error(answer, 403, "permission_denied")
    assert not service.requests


def test_explain_shows_a_tenant_its_own_requests(http, keys):
    for name in ("generate", "other", "admin"):
        label = {"x-request-id": f"of-{name}"}
        assert http.post(CHAT, headers=keys.header(name) | label, json=BODY).is_success

    def seen(name: str, **params: str) -> set[str]:
        answer = http.get("/v1/router/explain", headers=keys.header(name), params=params)
        if answer.status_code == 404:
            return set()
        return {decision["request_id"] for decision in answer.json()["data"]}

    assert seen("observe") == {"of-generate"}  # of the same tenant
    assert seen("other") == {"of-other"}
    assert seen("other", request_id="of-generate") == set()
    assert seen("admin") == {"of-generate", "of-other", "of-admin"}


def test_the_page_shows_a_tenant_its_own_requests(http, keys):
    for name in ("generate", "other", "admin"):
        label = {"x-request-id": f"of-{name}"}
        assert http.post(CHAT, headers=keys.header(name) | label, json=BODY).is_success

    def seen(name: str) -> set[str]:
        state = http.get("/ui/state", headers=keys.header(name)).json()
        assert state["replicas"]["name"] == ["replica-a"]  # which names no tenant
        return {decision["request_id"] for decision in state["requests"]}

    assert seen("observe") == {"of-generate"}  # of the same tenant
    assert seen("admin") == {"of-generate", "of-other", "of-admin"}
    assert seen("observe") == {"of-generate"}
    assert seen("other") == {"of-other"}


def test_metrics_show_a_tenant_its_own_series(http, keys, service):
    """Also of the tenants that share a label."""
    keys.add("third", "observe", tenant="team-c")
    http.access.ring.poll()
    for name in ("generate", "other", "admin"):
        assert http.post(CHAT, headers=keys.header(name), json=BODY).is_success
    http.access.ledger.counters.on_end(OTHER, 1, 1, 1)
    labels = {"application": "default", "router": 'router-"1"'}
    page = http.access.ledger.counters.metrics.page(labels)
    service.more_metrics = join([page])

    def tenants(name: str) -> set[str]:
        text = http.get("/metrics", headers=keys.header(name)).text
        assert "quire_tests_total 1.0" in text
        assert text.count("quire_calls_denied_total{") == 2 and "# TYPE quire_tenant_req" in text
        return set(re.findall(r'quire_tenant_requests_total{.*tenant="([^"]*)"', text))

    assert tenants("admin") == {"team-a", "team-b", "ops", OTHER}
    assert tenants("observe") == {"team-a"} and tenants("other") == {"team-b"}
    assert tenants("third") == set()
    # As soon as tenants share a label, it is nobody's own.
    text = service.more_metrics
    assert b'"team-a"' in visible_to("team-a", text)
    assert b"tenant=" not in visible_to(OTHER, text)


# --------------------------------------------------------------------------------------------------
# Quotas and usage
# --------------------------------------------------------------------------------------------------


def test_a_quota_of_tokens(http, keys):
    keys.add("small", "generate", quotas={"tokens_per_minute": 30})
    http.access.ring.poll()
    first = http.post(CHAT, headers=keys.header("small"), json=BODY)  # 11 prompt tokens, 4 output
    assert first.headers["x-ratelimit-limit-tokens"] == "30"
    assert first.headers["x-ratelimit-remaining-tokens"] == "19"  # the output is not known yet
    second = http.post(CHAT, headers=keys.header("small"), json=BODY)
    assert second.is_success and second.headers["x-ratelimit-remaining-tokens"] == "4"
    refused = http.post(CHAT, headers=keys.header("small"), json=BODY)
    assert "tokens_per_minute 30" in check_error(refused, 429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "22"  # 11 tokens at 1 in 2 s; the debt is 0
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert refused.headers["x-ratelimit-reset-tokens"] == "1m0s"
    keys.now_s = 22.0
    assert http.post(CHAT, headers=keys.header("small"), json=BODY).is_success
    assert not set(http.get("/health").headers) & {"x-ratelimit-limit-tokens"}


def tenant_metrics(http, tenant: str) -> dict[str, float]:
    """The series of a tenant by name, without `quire_tenant_`."""
    text = join([http.access.metrics_page({})]).decode()
    return {
        sample.name.removeprefix("quire_tenant_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("tenant") == tenant
    }


def test_quotas_are_in_the_metrics(http, keys):
    """Of two keys of one tenant, at one of two routers: the values of all routers add up to the quotas."""
    keys.num_routers = 2
    for name, quota in (("small", 60), ("large", 600)):
        keys.add(name, "generate", tenant="team-q", quotas={"tokens_per_minute": quota})
    http.access.ring.poll()
    found = tenant_metrics(http, "team-q")
    assert found["quota_tokens"] == found["quota_remaining_tokens"] == 330
    assert http.post(CHAT, headers=keys.header("small"), json=BODY).is_success
    found = tenant_metrics(http, "team-q")
    assert found["quota_remaining_tokens"] == 330 - 15 and found["running_requests"] == 0
    while http.post(CHAT, headers=keys.header("small"), json=BODY).is_success:
        pass
    assert tenant_metrics(http, "team-q")["rate_limited_total"] == 1
    keys.entries[-1].pop("quotas")
    keys.write()
    http.access.ring.poll()
    assert tenant_metrics(http, "team-q")["quota_tokens"] == 30
    # Of a tenant without quotas and without requests.
    found = tenant_metrics(http, "ops")
    assert found["requests_total"] == found["rate_limited_total"] == 0
    assert "quota_tokens" not in found


def test_a_stream_has_the_headers_too_and_is_not_delayed(http, keys, service):
    keys.add("small", "generate", quotas={"tokens_per_minute": 3000})
    http.access.ring.poll()
    service.goes_on.clear()  # after the first token
    with http.stream(
        "POST", CHAT, headers=keys.header("small"), json=BODY | {"stream": True}
    ) as answer:
        assert answer.headers["x-ratelimit-limit-tokens"] == "3000"
        events = answer.iter_lines()
        assert json.loads(next(events).removeprefix("data: "))["choices"]
        service.goes_on.set()
        assert list(events)[-2] == "data: [DONE]"


def test_a_quota_of_concurrent_requests(http, keys, service):
    keys.add("narrow", "generate", quotas={"concurrent_requests": 1})
    http.access.ring.poll()
    service.goes_on.clear()
    stream = BODY | {"stream": True}
    with http.stream("POST", CHAT, headers=keys.header("narrow"), json=stream) as answer:
        events = answer.iter_lines()
        next(events)
        refused = http.post(CHAT, headers=keys.header("narrow"), json=BODY)
        assert "concurrent_requests 1" in check_error(refused, 429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        found = tenant_metrics(http, "team-a")
        assert (found["rate_limited_total"], found["running_requests"]) == (1, 1)
        assert http.post(CHAT, headers=keys.header("narrow"), json={}).status_code == 400
        assert service.refused_by_front_end.count("rate_limit_exceeded") == 1
        service.goes_on.set()
        assert list(events)
    # A request that fails leaves its place too.
    for _ in range(2):
        service.refusals = [RuntimeError("defect")]
        assert http.post(CHAT, headers=keys.header("narrow"), json=BODY).status_code == 500
    assert http.post(CHAT, headers=keys.header("narrow"), json=BODY).is_success


def test_a_usage_line_for_each_answered_request(http, keys, service):
    label = {"x-request-id": "bill-me"}
    assert http.post(CHAT, headers=keys.header("generate") | label, json=BODY).is_success
    assert http.post(CHAT, headers=keys.header("generate"), json={}).status_code == 400
    (line,) = keys.usage.lines
    assert line.pop("time") > 1.7e9
    assert line == {
        "request_id": "bill-me",
        "tenant": "team-a",
        "key": "generate",
        "model": "acme/tiny",
        "prompt_tokens": 11,
        "completion_tokens": 4,
        "reasoning_tokens": 0,
        "cached_tokens": {"device": 8, "host": 1, "peer": 2},
        "ms": {"queue": 2.0, "prefill": 500.0, "decode": 250.0},
        "finish_reasons": ["length"],
    }
    page = str(http.access.ledger.counters.metrics.page({}))
    assert 'quire_tenant_output_tokens_total{tenant="team-a"} 4.0' in page
    assert 'quire_tenant_cached_tokens_total{tenant="team-a"} 11.0' in page


def test_no_key_or_digest_is_ever_written(http, keys, service, caplog):
    """A canary: every kind of request, right and wrong, and then all that the router has said."""
    caplog.set_level(logging.DEBUG)
    canary = "sk-quire-canary-0123456789"
    said = []
    for method, path in ROUTES:
        url = re.sub(r"{.*}", "acme/tiny", path)
        for key in (canary, *keys.secrets.values()):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                answer = http.request(method, url, headers=headers, json=BODY)
                said += [answer.text, str(answer.headers)]
    service.refusals = [RuntimeError("defect")]
    said.append(http.post(CHAT, headers=keys.header("admin"), json=BODY).text)
    keys.entries[0]["rights"] = [canary]
    keys.write()
    http.access.ring.poll()
    said += [
        caplog.text,
        json.dumps(keys.usage.lines),
        str(http.access.ledger.counters.metrics.page({})),
    ]
    secrets = [canary, *keys.secrets.values(), *(entry["sha256"] for entry in keys.entries)]
    text = "\n".join(said)
    assert "the keys stay as they were" in text and "internal error" in text
    assert not [secret for secret in secrets if secret in text]

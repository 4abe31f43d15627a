"""DNS rebinding: a page whose name resolves to this machine's address must not be able to call the server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from live_app import serving

from quire.cluster import app
from quire.cluster.app import APIS
from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.config_problems import ConfigError

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
THIS_MACHINE = ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:8000", "10.1.2.3:80"]
THIS_MACHINE += ["[::1]", "[::1]:8000", "[fe80::1]:8000", ""]
PAGES = ["evil.example.com", "evil.example.com:8000", "localhost.evil.example.com", "1.2.3.4.evil"]
PAGES += [
    "127.0.0.1.nip.io:8000",
    "[evil]:80",
    "evil@localhost",
    "localhost, evil",
    "0x7f.1",
    "\xe9",
]


def test_without_names_only_this_machine_is_named(service):
    with serving(service, allowed_hosts=[], apis=APIS) as client:
        for host in THIS_MACHINE:
            headers = {"Host": host}
            assert client.get("/health", headers=headers).status_code == 200, host
            assert client.post("/v1/chat/completions", json=CHAT, headers=headers).is_success, host
        for host in PAGES:
            headers = {"Host": host.encode("latin-1")}
            for path in ("/health", "/metrics", "/v1/models", "/docs", "/none"):
                refused = client.get(path, headers=headers)
                assert refused.status_code == 400, (host, path)
                assert refused.json()["error"]["param"] == "host"
            refused = client.post("/v1/messages", json=CHAT, headers=headers)
            assert refused.json()["error"]["type"] == "invalid_request_error"
            assert "http.allowed_hosts" in refused.json()["error"]["message"]


def test_a_named_host_is_served(service):
    with serving(service, allowed_hosts=["llm.example.com"]) as client:
        for host in ("llm.example.com", "LLM.example.com.:443", "127.0.0.1"):
            assert client.get("/health", headers={"Host": host}).status_code == 200
        assert client.get("/health", headers={"Host": "other.example.com"}).status_code == 400


@pytest.mark.parametrize(
    ("listens", "given", "allowed"),
    [
        ("127.0.0.1", None, []),
        ("localhost", None, []),
        ("0.0.0.0", None, ["*"]),
        ("10.1.2.3", None, ["*"]),
        ("127.0.0.1", ["a.example"], ["a.example"]),
        ("0.0.0.0", [], []),
    ],
)
def test_the_default_follows_the_address(monkeypatch, listens, given, allowed):
    client = SimpleNamespace(http_config=SimpleNamespace(host=listens))
    monkeypatch.setattr(app, "_get_global_client", lambda: client)
    assert app._allowed_hosts(AppConfig.from_args({"http": {"allowed_hosts": given}})) == allowed


@pytest.mark.parametrize(
    "host", ["https://a.example", "a.example:80", "A.example", "", "a..b", "*.b"]
)
def test_a_mistake_is_named(host: str):
    with pytest.raises(ConfigError, match=r"http.allowed_hosts: each host must be"):
        AppConfig.from_args({"http": {"allowed_hosts": [host]}})

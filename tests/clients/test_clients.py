"""The harness of `make clients` without a network: what it installs, and what becomes of a script's output."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from quire.cluster.bench.results.report import RESULTS, ROOT, Bar

# Tests run with --import-mode=importlib, which leaves their folder off the path.
sys.path.insert(0, str(Path(__file__).parent))

import environments
from checks import Outcome, Target, run
from earlier_results import with_others
from environments import Client
from tap import tap

CLIENTS = {client.name: client for client in Client.all()}
PIN = re.compile(r"[A-Za-z0-9._-]+==[^\s;@+]+")


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_versions_are_exact(client: Client):
    if client.is_of_npm:
        locked = json.loads(client.pins.read_text())["packages"][""]["dependencies"]
        wanted = json.loads((client.folder / "package.json").read_text())["dependencies"]
        assert locked == wanted and all(version[0].isdigit() for version in wanted.values())
    else:
        lines = client.pins.read_text().splitlines()
        assert lines and all(PIN.fullmatch(line) for line in lines)


def test_committed_results_name_every_client_with_its_version():
    result = json.loads((RESULTS / "clients.json").read_text())
    assert result["versions"] == {client.name: client.version for client in CLIENTS.values()}
    names = {bar["name"] for bar in result["bars"]}
    assert {name.split("/")[1] for name in names} == CLIENTS.keys()
    assert names >= {f"clients/{name}/finishes" for name in CLIENTS}


def test_every_committed_check_holds():
    bars = json.loads((RESULTS / "clients.json").read_text())["bars"]
    assert [bar["name"] for bar in bars if not bar["holds"]] == []


def test_the_documents_table_has_the_committed_results():
    """Client, version, and how many of its checks held."""
    result = json.loads((RESULTS / "clients.json").read_text())
    held: dict[str, list[bool]] = {name: [] for name in CLIENTS}
    for bar in result["bars"]:
        _, name, check = bar["name"].split("/")
        if check != "finishes":
            held[name].append(bar["holds"])
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "clients.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    assert {client.strip("`"): (version, found) for client, version, _, found in rows} == {
        name: (result["versions"][name].replace("==", " "), f"{sum(found)} of {len(found)}")
        for name, found in held.items()
    }


def test_results_of_clients_that_did_not_run_stay():
    kept = Bar("clients/a/x", 2.0, "requests", 3.0, False, {"why": 1})
    old, new = (Bar("clients/b/y", value, "ok", 1.0, False) for value in (0.0, 1.0))
    result = {"bars": [old.to_json(), kept.to_json()], "versions": {"a": "a==1", "b": "b==1"}}
    bars, versions = with_others(result, [new], {"b": "b==2"})
    assert bars == [kept, new]
    assert versions == {"a": "a==1", "b": "b==2"}


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    target = Target("http://127.0.0.1:1", "127.0.0.1:2", "first", "m", "folder", "other", tmp_path)
    for name, text in target.environment().items():
        monkeypatch.setenv(name, text)
    return target


def test_a_script_reports_each_check_whatever_it_raises(target, capsys):
    def holds(found: Target) -> None:
        assert found == target

    def fails(found: Target) -> None:
        raise ConnectionError("refused")

    print("a library's own line")
    run([holds, fails])
    lines = capsys.readouterr().out.splitlines()
    found = [outcome for line in lines if (outcome := Outcome.parse(line))]
    assert [(o.check, o.num) for o in found] == [("holds", 1), ("fails", 0)]
    assert "ConnectionError: refused" in found[1].error


def test_a_script_sees_nothing_of_this_process_python(target, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    found = environments.variables(Path("/env"), target.environment())
    assert found["PYTHONPATH"] == str(environments.SHARED)
    assert found["PATH"].startswith("/env/bin")
    assert found["HF_HUB_OFFLINE"] == "1"


# --------------------------------------------------------------------------------------------------
# The tap between an agent and the server
# --------------------------------------------------------------------------------------------------


class _Echo(BaseHTTPRequestHandler):
    """A server that answers with two events; the second one has the path and the body of the request."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        said = f"{self.path} {body.decode()}"
        self.wfile.write(f"event: begin\ndata: 1\n\nevent: end\ndata: {said}\n\n".encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/prefix"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_tap_narrows_and_records_no_text(echo):
    content = [{"type": "tool_result", "content": "secret"}]
    messages = [{"role": "system", "content": "secret"}, {"role": "user", "content": content}]
    body = json.dumps({"messages": messages, "tools": [{"name": "secret"}]}).encode()
    with tap(echo, lambda sent: sent.update(tool_choice="any")) as record:
        request = urllib.request.Request(f"{record.url}/v1/messages?beta=true", body)
        with urllib.request.urlopen(request) as answer:
            text = answer.read().decode()
    assert "/prefix/v1/messages?beta=true" in text and '"tool_choice": "any"' in text
    (exchange,) = record.exchanges
    assert (exchange.path, exchange.status) == ("/v1/messages", 200)
    assert exchange.sent == {
        "bytes": len(body),
        "fields": ["messages", "tools"],
        "tools": {"custom": 1},
        "items": {"system text": 1, "user tool_result": 1},
    }
    assert exchange.answered == {"bytes": len(text), "events": {"begin": 1, "end": 1}}
    assert "secret" not in repr(record)


def test_a_tap_is_a_proxy_that_reaches_nothing_else(echo):
    with tap(echo, lambda sent: None) as record:
        by_tap = urllib.request.ProxyHandler({"http": record.url})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.build_opener(by_tap).open("http://192.0.2.1/collect", timeout=10)
    assert dict(record.elsewhere) == {"192.0.2.1": 1} and not record.exchanges
    assert record.environment()["HTTPS_PROXY"] == record.url

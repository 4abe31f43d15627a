"""The harness of `make clients` without a network: what it installs, and what becomes of a script's output."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from quire.cluster.bench.results.report import RESULTS

# Tests run with --import-mode=importlib, which leaves their folder off the path.
sys.path.insert(0, str(Path(__file__).parent))

import environments
from checks import Outcome, Target, run
from environments import Client

CLIENTS = {client.name: client for client in Client.all()}
PIN = re.compile(r"[A-Za-z0-9._-]+==[^\s;@+]+")


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_versions_are_exact(client: Client):
    if client.is_node:
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


def test_committed_results_hold_but_for_what_is_not_served_yet():
    """A check of something that is served by now moves to those that have to hold."""
    bars = json.loads((RESULTS / "clients.json").read_text())["bars"]
    missed = [bar["name"] for bar in bars if not bar["holds"]]
    not_served = [bar["name"] for bar in bars if bar.get("details", {}).get("not_served_yet")]
    assert missed == not_served


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    target = Target("http://127.0.0.1:1", "127.0.0.1:2", "m", "folder", tmp_path)
    for name, text in target.environment().items():
        monkeypatch.setenv(name, text)
    return target


def test_a_script_reports_each_check_whatever_it_raises(target, capsys):
    def holds(found: Target) -> None:
        assert found == target

    def fails(found: Target) -> None:
        raise ConnectionError("refused")

    def absent(found: Target) -> None:
        raise ValueError("no tools")

    print("a library's own line")
    run([holds, fails], not_served=[absent])
    lines = capsys.readouterr().out.splitlines()
    found = [outcome for line in lines if (outcome := Outcome.parse(line))]
    assert [(o.check, o.num, o.is_served) for o in found] == [
        ("holds", 1, True),
        ("fails", 0, True),
        ("absent", 0, False),
    ]
    assert "ConnectionError: refused" in found[1].error


def test_a_script_sees_nothing_of_this_process_python(target, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    found = environments.variables(Path("/env"), target.environment())
    assert found["PYTHONPATH"] == str(environments.SHARED)
    assert found["PATH"].startswith("/env/bin")
    assert found["HF_HUB_OFFLINE"] == "1"

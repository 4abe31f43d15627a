"""Structured output on the real cluster: what clients get, and what a hostile one cannot do to others."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.system


def complete(cluster, structured_outputs: dict, **body) -> httpx.Response:
    body = {"prompt": "Once", "max_tokens": 100, "structured_outputs": structured_outputs, **body}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop", choice
    return choice["text"]


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def settled_bytes(pid: int) -> int:
    """Resident memory once the replica has backed its cache, which it does while it is idle."""
    while True:
        before = resident_bytes(pid)
        time.sleep(3)
        if resident_bytes(pid) - before < 1 << 20:
            return before


def test_each_form_gives_what_it_describes(cluster):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    assert text_of(complete(cluster, {"choice": ["yes", "no"]})) in ("yes", "no")
    assert text_of(complete(cluster, {"regex": "[a-c]{3}"})).strip("abc") == ""
    assert text_of(complete(cluster, {"grammar": 'start: "x"+ "y"'}, max_tokens=300)).endswith("y")
    for seed in range(6):
        assert json.loads(text_of(complete(cluster, {"json": schema}, seed=seed)))["n"] < 100


def test_schemas_that_explode_cost_others_neither_time_nor_memory(cluster):
    """1,009 bytes: one of them took a replica to 8 GB, and no later grammar was ever answered."""
    pids = cluster.pids("Replica")
    text_of(complete(cluster, {"choice": ["warm", "up"]}))
    before = {pid: settled_bytes(pid) for pid in pids}

    def attack(i: int) -> httpx.Response:
        parts = [{"type": "string", "pattern": f".*a{i + j}.*"} for j in range(24)]
        return complete(cluster, {"json": {"allOf": parts}}, cache_salt=f"attacker {i % 3}", n=2)

    with ThreadPoolExecutor(8) as pool:
        attacks = [pool.submit(attack, i) for i in range(8)]
        for i in range(8):
            began = time.monotonic()
            choice = {"choice": ["yes", "no", str(i)]}
            assert text_of(complete(cluster, choice, cache_salt="victim")) in choice["choice"]
            assert time.monotonic() - began < 5
        for attack in attacks:
            response = attack.result()
            error = response.json()["error"]
            assert response.status_code in (400, 429), response.text
            assert error["param"] == "structured_outputs.json", error
    assert cluster.pids("Replica") == pids
    for pid in pids:
        assert resident_bytes(pid) - before[pid] < 100 << 20

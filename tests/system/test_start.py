"""A start: what it prints and sets, and how one that cannot succeed ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from live import Cluster, take_ports

from quire.cluster.config.default_config import default_config
from quire.cluster.proxies.ray_settings import DEPLOYMENT_VARIABLES, HAPROXY_VARIABLE

pytestmark = pytest.mark.system


def environment(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(line.decode().split("=", 1) for line in lines if b"=" in line)


def test_routers_and_replicas_have_the_variables_that_the_file_does_not_give(cluster: Cluster):
    """MALLOC_ARENA_MAX and GRPC_EXPERIMENTS are read when a process starts: the hook would be too late."""
    expected = {**DEPLOYMENT_VARIABLES, HAPROXY_VARIABLE: "1"}
    for pid in (*cluster.pids("Router"), *cluster.pids("Replica")):
        assert expected.items() <= environment(pid).items()
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)


def test_the_terminal_says_what_ready_says(cluster: Cluster):
    engine = httpx.get(f"{cluster.url}/ready", timeout=60).json()["engine"]
    assert engine["model"] == "embedded" and engine["dtype"] == "float32"
    assert engine["kv_cache_tokens"] > engine["request_tokens"] * engine["concurrent_requests"] / 2
    printed = cluster.output.read_text()
    assert f"quire: 2 x model embedded, float32 on {engine['device']}" in printed
    assert f"KV cache {engine['kv_cache_tokens']:,} tokens: " in printed
    log = cluster.output.with_name("serve.log").read_text()
    assert re.search(r"ready: model embedded, float32 on .* loaded in imports [\d.]+ s, ", log)
    assert "{'" not in "".join(line for line in log.splitlines() if "ready:" in line)


def test_a_model_that_does_not_fit_ends_the_start_after_one_attempt(tmp_path):
    engine = {"max_memory_percent": 1e-6}  # of this machine: some kB
    config = default_config({"replicas": 1, "routers": 1, "device": "cpu", "engine": engine})
    take_ports(config)
    path, log = tmp_path / "cluster.yaml", tmp_path / "serve.log"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "quire.cluster.cli", "serve", str(path)]
    began = time.monotonic()
    result = subprocess.run(
        [*command, "--log-file", str(log)], capture_output=True, text=True, timeout=240
    )
    seconds = time.monotonic() - began
    print(f"{seconds:.0f} s\n{result.stdout}")
    assert result.returncode == 1
    failed = result.stdout[result.stdout.index("failed: application 'quire': replica on node '") :]
    assert "weights" in failed and "budget" in failed
    assert "Traceback" not in result.stdout
    assert len(re.findall(r"Adding 1 replica to Deployment\(name='Replica'", log.read_text())) == 1

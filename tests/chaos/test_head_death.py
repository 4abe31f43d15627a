"""Streams go on while Ray's head is dead, and a new head on the same volume takes the cluster over: `k8s/ha`.

Real Ray: a head without CPUs whose GCS writes into RocksDB, and two workers, each a process group of its own on this
machine. The head is killed under sixty streams. Each worker of k8s/ has a proxy, but two proxies cannot share this
machine's ports; so the clients connect to a router's own ports, as the proxy of its worker does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from chaos_load import NUM_STREAMS, Load, until_changed
from live import CHANGE_TIMEOUT_S, Cluster, wait_until, write_bars
from node_cluster import deployed

from quire.cluster.bench.results.report import Bar
from quire.cluster.local.ports import free_ports
from quire.cluster.local.process_session import session_pids
from quire.cluster.local.serve_api import ray_auth_header

NUM_WORKERS, AWAY_S = 2, 20.0
SMALL_STORE = ["--object-store-memory", str(80 * 1024**2)]
MAX_TOLD = 20  # failures

# `ray`, which sees no other node's processes, as on a machine of its own: it refuses to start a head while processes on
# this machine have its address.
_RAY = """
import functools, ray._private.services, ray.scripts.scripts
ray._private.services.find_gcs_addresses = functools.cache(set)
ray.scripts.scripts.main()
"""

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.slow,  # two minutes on two cores
    pytest.mark.timeout(900),
]


@dataclass
class Nodes:
    """The nodes' processes, each the leader of a session that holds all processes of its node."""

    folder: Path
    port: int  # of the GCS
    dashboard_port: int
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _RAY, "start", "--block", *options]
        with (self.folder / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        self.running.append(process)
        return process

    def start_head(self) -> subprocess.Popen[bytes]:
        options = ["--head", "--num-cpus=0", f"--port={self.port}", *SMALL_STORE]
        options += [f"--dashboard-port={self.dashboard_port}"]
        options += [f"--ray-client-server-port={free_ports(1)[0]}"]
        return self.start("head", *options)

    def start_worker(self, number: int) -> None:
        address = f"127.0.0.1:{self.port}"
        agent = f"--dashboard-agent-listen-port={free_ports(1)[0]}"
        options = [f"--address={address}", "--num-cpus=2", agent, *SMALL_STORE]
        self.start(f"worker{number}", *options)

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """End all processes of a node at once, as the loss of its machine does."""
        for pid in session_pids(node.pid):
            os.kill(pid, signal.SIGKILL)
        node.wait()
        self.running.remove(node)

    def num_alive(self) -> int:
        """How many nodes the dashboard knows."""
        url = f"http://127.0.0.1:{self.dashboard_port}/nodes?view=summary"
        request = urllib.request.Request(url, headers=ray_auth_header(os.environ))
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                nodes = json.load(response)["data"]["summary"]
        except OSError:
            return 0
        return sum(node["raylet"].get("state") == "ALIVE" for node in nodes)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    # What KubeRay sets for `gcsFaultToleranceOptions` with RocksDB.
    monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
    monkeypatch.setenv("RAY_gcs_storage_path", str(tmp_path / "gcs"))
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    found = Nodes(tmp_path, *free_ports(2))
    try:
        yield found
    finally:
        for node in [*found.running]:
            found.kill(node)


def router_ports(cluster: Cluster) -> tuple[int, int]:
    """The ports of a router for HTTP and gRPC; a proxy sends requests there."""
    env = cluster.config["controller_options"]["runtime_env"]["env_vars"]

    def first(protocol: str) -> int:
        low, high = (
            int(env[f"RAY_SERVE_DIRECT_INGRESS_{end}_{protocol}_PORT"]) for end in ("MIN", "MAX")
        )
        for port in range(low, high + 1):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    return port
        raise AssertionError(f"no router listens for {protocol} on {low} to {high}")

    return first("HTTP"), first("GRPC")


def test_streams_go_on_without_a_head_and_a_new_one_takes_over(nodes: Nodes) -> None:
    head = nodes.start_head()
    wait_until(lambda: nodes.num_alive() == 1, CHANGE_TIMEOUT_S, "the head runs")
    # One after the other: two that start at the same time can choose the same socket.
    for number in range(NUM_WORKERS):
        nodes.start_worker(number)
        num_nodes = number + 2
        wait_until(lambda n=num_nodes: nodes.num_alive() == n, CHANGE_TIMEOUT_S, "a worker joins")
    dashboard = f"http://127.0.0.1:{nodes.dashboard_port}"
    cluster = deployed(dashboard, nodes.folder / "head.out", num_replicas=NUM_WORKERS)
    before = {name: sorted(cluster.pids(name)) for name in ("Router", "Replica")}
    http_port, grpc_port = router_ports(cluster)
    load = Load(replace(cluster, http_port=http_port, grpc_port=grpc_port))
    begun_while_away = 0

    def lose_the_head() -> None:
        nonlocal begun_while_away
        time.sleep(2.0)
        nodes.kill(head)
        begun = load.num_streams
        time.sleep(AWAY_S)
        begun_while_away = load.num_streams - begun
        new = nodes.start_head()

        def is_done() -> bool:
            # Like KubeRay's: a head whose agent is slow to start, as on this full machine, ends and starts again.
            nonlocal new
            if new.poll() is not None:
                nodes.running.remove(new)
                new = nodes.start_head()
            return is_back(cluster)

        until_changed(is_done, "the new head's Serve runs the application")
        time.sleep(5.0)

    asyncio.run(load.run(lose_the_head))
    told = [line[:200] for line in load.bad[:MAX_TOLD]]
    write_bars(
        "chaos_head.json",
        [
            Bar("chaos/head_failures", len(load.bad), "streams", 0, details={"told": told}),
            Bar("chaos/head_not_ready", len(load.not_ready), "answers", 0),
            Bar("chaos/head_streams", load.num_streams, "streams", NUM_STREAMS, at_most=False),
        ],
    )
    assert not load.bad, f"{len(load.bad)} of {load.num_streams}: {told}"
    assert not load.not_ready, load.not_ready[:MAX_TOLD]
    assert begun_while_away > NUM_STREAMS
    assert {name: sorted(cluster.pids(name)) for name in before} == before


def is_back(cluster: Cluster) -> bool:
    try:
        return cluster.is_running()
    except OSError:
        return False

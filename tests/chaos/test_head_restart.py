"""No stream fails while the head of a Ray cluster is lost and starts again, as with the component `ha` of k8s/.

Real Ray: a head and two workers on this machine, started with `ray start` as KubeRay does, with Ray's token. The GCS
writes its state into RocksDB. Streams enter at a router, as they do through HAProxy on a worker; the head has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from chaos_load import NUM_STREAMS, Load, until_changed
from live import CHANGE_TIMEOUT_S, ROOT, Cluster, take_ports, wait_until, write_bars

from quire.cluster.bench.results.report import Bar
from quire.cluster.local.ports import free_ports
from quire.cluster.local.process_session import session_pids

AWAY_S = 10.0  # without a head
MAX_TOLD = 20  # failures

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.slow,  # two minutes on two cores
    pytest.mark.timeout(900),
]


class RayNodes:
    """`ray start` for a head and its workers."""

    def __init__(self, folder: Path):
        self.address = socket.gethostbyname(socket.gethostname())
        self.gcs_port, self.dashboard_port = free_ports(2)
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._head: subprocess.Popen[bytes] | None = None

    def start_head(self) -> None:
        # What KubeRay sets for `gcsFaultToleranceOptions.backend: rocksdb`.
        storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self._folder / "gcs")}
        options = [f"--port={self.gcs_port}", f"--dashboard-port={self.dashboard_port}"]
        self._head = self._start("head", ["--head", "--num-cpus=0", *options], storage)

    def start_worker(self, number: int) -> None:
        (agent_port,) = free_ports(1)
        options = ["--num-cpus=2", f"--dashboard-agent-listen-port={agent_port}"]
        options += [f"--address={self.address}:{self.gcs_port}"]
        variables = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}  # KubeRay's, for workers
        self._start(f"worker{number}", options, variables)

    def kill_head(self) -> None:
        assert self._head is not None
        _kill(self._head)

    def end(self) -> None:
        for process in reversed(self._processes):
            _kill(process)

    def _start(
        self, name: str, options: list[str], variables: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        command = [
            str(Path(sys.executable).parent / "ray"),
            "start",
            "--block",
            "--disable-usage-stats",
        ]
        command += [f"--node-ip-address={self.address}", "--object-store-memory=83886080", *options]
        with (self._folder / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=os.environ | variables,
                start_new_session=True,
            )
        self._processes.append(process)
        return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    for pid in session_pids(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(10)


def first_listening(ports: range) -> int | None:
    """The first of `ports` on which a process listens."""
    for port in ports:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return port
    return None


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    (tmp_path / "gcs").mkdir()
    nodes = RayNodes(tmp_path)
    try:
        nodes.start_head()
        for number in range(2):
            nodes.start_worker(number)
        yield nodes
    finally:
        nodes.end()


def test_no_stream_fails_while_the_head_is_away(nodes: RayNodes, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    take_ports(config)
    config["proxy_location"] = "HeadOnly"  # proxies of several nodes cannot share a machine's ports
    config["http_options"]["host"] = "0.0.0.0"
    args = config["applications"][0]["args"]
    args |= {"engine": {"deterministic": True}, "replica_resources": {"num_cpus": 1.5}}
    dashboard = f"http://127.0.0.1:{nodes.dashboard_port}"
    cluster = Cluster(0, 0, tmp_path / "head.out", dashboard, config)

    def is_running() -> bool:
        try:
            return cluster.is_running() and bool(cluster.serve_status()["applications"])
        except OSError:
            return False

    def answers() -> bool:
        with contextlib.suppress(OSError):
            cluster.serve_status()
            return True
        return False

    wait_until(answers, CHANGE_TIMEOUT_S, "the dashboard answers")
    cluster.deploy(config)
    wait_until(is_running, CHANGE_TIMEOUT_S, "Serve has started the application")
    env = config["controller_options"]["runtime_env"]["env_vars"]
    for protocol, attribute in (("HTTP", "http_port"), ("GRPC", "grpc_port")):
        first = int(env[f"RAY_SERVE_DIRECT_INGRESS_MIN_{protocol}_PORT"])
        port = first_listening(range(first, first + 50))
        assert port is not None
        setattr(cluster, attribute, port)

    took_s = []

    def lose_head() -> None:
        nodes.kill_head()
        began_s = time.monotonic()
        assert not answers()
        time.sleep(AWAY_S)
        nodes.start_head()
        until_changed(is_running, "Serve knows its application again")
        took_s.append(round(time.monotonic() - began_s, 1))
        time.sleep(5)  # streams go on after it

    load = Load(cluster)
    try:
        asyncio.run(load.run(lose_head))
    finally:
        told = [line[:200] for line in load.bad[:MAX_TOLD]]
        details = {"away_seconds": took_s, "told": told}
        write_bars(
            "chaos_head.json",
            [
                Bar("chaos/head_failures", len(load.bad), "streams", 0, details=details),
                Bar("chaos/head_not_ready", len(load.not_ready), "answers", 0),
                Bar("chaos/head_streams", load.num_streams, "streams", NUM_STREAMS, at_most=False),
            ],
        )
    assert not load.bad, f"{len(load.bad)} of {load.num_streams}: {told}"
    assert not load.not_ready, load.not_ready[:MAX_TOLD]

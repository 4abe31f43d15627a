"""A real cluster: `quire serve` on the repository's own cluster.yaml with other ports, and its clients."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import yaml
from patient_channel import PatientChannel
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from quire.cluster.bench.results.report import Bar, commit, write
from quire.cluster.local.ports import free_ports
from quire.cluster.local.process_session import ray_session, session_pids
from quire.cluster.local.serve_api import ray_auth_header
from quire.protos import control_pb2, control_pb2_grpc

ROOT = Path(__file__).parents[2]
SIZE = os.environ.get("CHAOS_SIZE", "ci")  # of the suites that count: `ci` or `long`
KV_CACHE_GIB = 0.25
# Within which Serve has started, replaced or ended processes, however slow the machine is: a limit for what hangs.
CHANGE_TIMEOUT_S = 240.0
_COMMIT = commit()  # that is tested: a long run outlives a commit
_windows = itertools.count(os.getpid())


@dataclass
class Cluster:
    """A running cluster and how to reach it."""

    http_port: int
    grpc_port: int
    output: Path  # what `quire serve` printed
    dashboard: str
    config: dict  # the Serve config that runs
    key: str = ""  # that its own questions need

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def openai(self, **kwargs) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **kwargs)

    def channel(self) -> PatientChannel:
        return PatientChannel(f"127.0.0.1:{self.grpc_port}")

    def deploy(self, config: dict) -> None:
        """What `serve deploy` does: give Serve another config."""
        self._dashboard("/api/serve/applications/", json.dumps(config).encode(), "PUT")

    def shut_down_serve(self) -> None:
        """What `serve shutdown` does."""
        self._dashboard("/api/serve/applications/", method="DELETE")

    def serve_status(self) -> dict:
        """Serve's details from the dashboard's REST API."""
        return json.loads(self._dashboard("/api/serve/applications/"))

    def is_running(self) -> bool:
        """Whether Serve has started or changed all that it was told."""
        applications = self.serve_status()["applications"].values()
        return all(application["status"] == "RUNNING" for application in applications)

    def every_router_knows_every_replica(self) -> bool:
        """They begin to answer with the first one. HAProxy gives the next connection to another router."""
        num_replicas = len(self.pids("Replica"))
        return all(len(self.loads()) == num_replicas for _ in range(4))

    def pids(self, deployment: str) -> list[int]:
        """Of the running replicas of a deployment, as Serve knows them: its news are a second old."""
        deployments = self.serve_status()["applications"]["quire"]["deployments"]
        replicas = deployments[deployment]["replicas"]
        return [r["pid"] for r in replicas if r["state"] == "RUNNING" and r["pid"]]

    def metrics(self, timeout_s: float = 60.0) -> list[Sample]:
        """What Prometheus scrapes from the HTTP port: all processes of the application, at most a second old."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=timeout_s) as response:
            text = response.read().decode()
        return [s for family in text_string_to_metric_families(text) for s in family.samples]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, over all processes."""
        found = [
            s.value for s in self.metrics() if s.name == name and labels.items() <= s.labels.items()
        ]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def buckets(self, name: str) -> Counter[float]:
        """Of a histogram, over all processes: upper bounds, and how many values are at most that."""
        found: Counter[float] = Counter()
        for sample in self.metrics():
            if sample.name == f"{name}_bucket":
                found[float(sample.labels["le"])] += int(sample.value)
        return found

    def ray_metrics(self) -> str:
        """What Ray's agent on this node exports."""
        nodes = json.loads(self._dashboard("/nodes?view=summary"))["data"]["summary"]
        port = nodes[0]["raylet"]["metricsExportPort"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
            return response.read().decode()

    def _dashboard(self, path: str, body: bytes | None = None, method: str = "GET") -> bytes:
        headers = {"Content-Type": "application/json", **ray_auth_header(os.environ)}
        request = urllib.request.Request(self.dashboard + path, body, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()

    def loads(self) -> list[control_pb2.ReplicaLoad]:
        with self.channel() as channel:
            reply = control_pb2_grpc.ControlStub(channel).GetLoads(
                control_pb2.GetLoadsRequest(),
                timeout=10,
                metadata=[("x-api-key", self.key)] if self.key else None,
            )
        return list(reply.replicas)


def processes(cluster: Cluster) -> dict[int, str]:
    """Command line of each process of the cluster that runs."""
    found = {}
    for pid in session_pids(os.getsid(cluster.pids("Router")[0])):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            found[pid] = command.replace(b"\0", b" ").decode()
    return found


def assert_serve_ends(cluster: Cluster, reason: str) -> None:
    """`quire serve` must print within ten seconds that it failed, and why."""
    took_s = wait_until(
        lambda: "\nfailed:" in cluster.output.read_text(), 30, "`quire serve` says that it failed"
    )
    print(f"said after {took_s:.1f} s")
    assert took_s < 10
    assert f"failed: {reason}" in cluster.output.read_text()


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Poll until `condition` holds; returns the seconds it took, up to a twentieth too many.

    The longer it waits, the less often it asks: most conditions are questions to Serve's dashboard, whose answers take
    processor time from the processes that are waited for.
    """
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            pytest.fail(f"not within {timeout_s} s: {what}")
        time.sleep(min(0.02 + waited_s / 20, 0.5))
    return time.monotonic() - began


def write_bars(name: str, bars: list[Bar]) -> None:
    """Print what a suite found; write it to the file `name` beside `CHAOS_OUT`, if that is given."""
    out = os.environ.get("CHAOS_OUT")
    for bar in bars:
        print(bar.to_json(), flush=True)
    if out:
        command = f"make chaos SIZE={SIZE}"
        write(Path(out).with_name(name), command, bars, show=False, commit=_COMMIT)


def take_ports(config: dict) -> None:
    """Give a Serve config ports of its own, HAProxy's among them."""
    ports = free_ports(6)
    config["http_options"]["port"], config["grpc_options"]["port"] = ports[:2]
    haproxy = config["controller_options"]["runtime_env"]["env_vars"]
    for name, port in zip(("STATS", "METRICS"), ports[2:4], strict=True):
        haproxy[f"RAY_SERVE_HAPROXY_{name}_PORT"] = str(port)
    # Where HAProxy sends what comes while it knows of no router: another cluster's proxy would answer there.
    for protocol, port in zip(("HTTP", "GRPC"), ports[4:], strict=True):
        haproxy[f"RAY_SERVE_FALLBACK_PROXY_{protocol}_PORT"] = str(port)
    # The proxy's way to the routers. Several processes may listen on one of these ports: those of another cluster
    # that took the same would get a part of this one's requests.
    first = next(_windows) % 20 * 50
    for protocol, lowest in (("HTTP", 30_000), ("GRPC", 40_000)):
        for end, port in (("MIN", lowest + first), ("MAX", lowest + first + 49)):
            haproxy[f"RAY_SERVE_DIRECT_INGRESS_{end}_{protocol}_PORT"] = str(port)


def start_cluster(
    directory: Path, change: Callable[[dict], None], key: str = ""
) -> Iterator[Cluster]:
    """Run `quire serve` on cluster.yaml as changed by `change`, until the fixture ends.

    With keys, `key` is one that may observe.
    """
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    take_ports(config)
    change(config)
    engine = config["applications"][0]["args"].setdefault("engine", {})
    if "num_blocks" not in engine:
        # An idle engine backs its cache with memory, which takes a processor for up to ten seconds for each GiB.
        engine.setdefault("kv_cache_gib", KV_CACHE_GIB)
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    output = directory / "serve.out"
    command = [sys.executable, "-m", "quire.cluster.cli", "serve", str(path)]
    command += [
        "--log-file",
        str(directory / "serve.log"),
        "--ready-timeout-s",
        str(CHANGE_TIMEOUT_S),
    ]
    with output.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        wait_until(
            lambda: process.poll() is not None or "\nready:" in output.read_text(),
            CHANGE_TIMEOUT_S + 20,
            "ready line",
        )
        assert process.poll() is None, output.read_text()
        dashboard = re.search(r"Ray dashboard: (\S+)", output.read_text())[1]
        cluster = Cluster(
            config["http_options"]["port"],
            config["grpc_options"]["port"],
            output,
            dashboard,
            config,
            key,
        )
        # Routers answer a moment before Serve says so.
        wait_until(cluster.is_running, CHANGE_TIMEOUT_S, f"Serve is done: {output.read_text()}")
        wait_until(
            cluster.every_router_knows_every_replica, CHANGE_TIMEOUT_S, "routers know all replicas"
        )
        session = ray_session(os.getsid(cluster.pids("Router")[0]))
        assert session is not None
        yield cluster
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            raise
    pools = Path("/dev/shm").glob(f"quire-kv-{session.replace('-', '_')[:40]}*")
    assert not list(pools), "`quire serve` leaves no pool of its replicas"

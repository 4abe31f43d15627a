"""A real cluster on this machine during a measurement: `quire serve` in its own process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cluster.bench.results.report import ROOT
from quire.cluster.local.ports import free_ports
from quire.cluster.local.serve_api import serve_details

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
# The proxy reaches the routers over ports from this range, and several processes may listen on one port. A second
# cluster with the same range would get a part of this cluster's requests.
_WINDOW = 50
_READY_TIMEOUT_S = 300
_STOP_TIMEOUT_S = 60
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """A cluster's addresses on the loopback, and its state in Serve."""

    http_port: int
    grpc_port: int
    dashboard: str  # URL
    startup_s: dict[str, float]  # by phase, and "total"

    def replicas(self, application: str, deployment: str) -> dict[str, int]:
        """Serve's id and the process id of every running replica of a deployment."""
        details = serve_details(self.dashboard)["applications"][application]["deployments"][
            deployment
        ]
        return {
            r["replica_id"]: r["pid"]
            for r in details["replicas"]
            if r["state"] == "RUNNING" and r["pid"]
        }

    def is_running(self) -> bool:
        """Whether Serve has started all replicas."""
        applications = serve_details(self.dashboard)["applications"].values()
        return all(application["status"] == "RUNNING" for application in applications)


@contextmanager
def live_cluster(config: dict[str, Any]) -> Iterator[LiveCluster]:
    """Run `quire serve` on a Serve config during the block, on free ports.

    Raises
    ------
    RuntimeError
        The cluster did not become ready; the message has the reason.
    """
    config = json.loads(json.dumps(config))
    _take_ports(config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.json")  # JSON is YAML
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "quire.cluster.cli", "serve", str(path)]
        command += ["--log-file", str(Path(folder, "serve.log"))]
        command += ["--ready-timeout-s", str(_READY_TIMEOUT_S)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("ready: "):
                    break
            else:
                raise RuntimeError("".join(lines))
            cluster = LiveCluster(
                config["http_options"]["port"],
                config["grpc_options"]["port"],
                _found(r"Ray dashboard: (\S+)", lines),
                _startup_s(lines),
            )
            # Routers answer shortly before Serve reports them as running.
            until_s = time.monotonic() + _READY_TIMEOUT_S
            while not cluster.is_running():
                if time.monotonic() > until_s:
                    raise RuntimeError(f"Serve is not done after {_READY_TIMEOUT_S} s")
                time.sleep(_POLL_S)
            yield cluster
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_TIMEOUT_S)


def cpu_s(pids: Iterable[int]) -> float:
    """User and system CPU seconds of these processes so far, with all threads, to 10 ms.

    Raises
    ------
    OSError
        One of the processes has ended.
    """
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _CLOCK_TICKS


def _take_ports(config: dict[str, Any]) -> None:
    """Give every listener of a Serve config a free port."""
    ports = free_ports(6)
    config["http_options"]["port"], config["grpc_options"]["port"] = ports[:2]
    variables = config["controller_options"]["runtime_env"]["env_vars"]
    for name, port in zip(("STATS", "METRICS"), ports[2:4], strict=True):
        variables[f"RAY_SERVE_HAPROXY_{name}_PORT"] = str(port)
    for protocol, port in zip(("HTTP", "GRPC"), ports[4:], strict=True):
        variables[f"RAY_SERVE_FALLBACK_PROXY_{protocol}_PORT"] = str(port)
    offset = os.getpid() % 16 * _WINDOW
    for protocol, lowest in (("HTTP", 31_000), ("GRPC", 41_000)):
        first = lowest + offset
        for end, port in (("MIN", first), ("MAX", first + _WINDOW - 1)):
            variables[f"RAY_SERVE_DIRECT_INGRESS_{end}_{protocol}_PORT"] = str(port)


def _startup_s(lines: list[str]) -> dict[str, float]:
    total_s = float(_found(r"start-up ([\d.]+) s: ", lines))
    startup = next(line for line in lines if line.startswith("start-up "))
    phases = re.findall(r"(Ray|imports|checkpoint|load|warm up) ([\d.]+) s", startup)
    return {"total": total_s, **{name: float(s) for name, s in phases}}


def _found(pattern: str, lines: list[str]) -> str:
    for line in lines:
        if match := re.match(pattern, line):
            return match[1]
    raise RuntimeError(f"`quire serve` has not printed {pattern!r}:\n{''.join(lines)}")

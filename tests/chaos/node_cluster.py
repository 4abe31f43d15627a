"""A Ray cluster of several nodes on this machine, with the repository's cluster.yaml on it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from live import CHANGE_TIMEOUT_S, ROOT, Cluster, take_ports, wait_until

from quire.cluster.local.ports import free_ports
from quire.replica.builtin_model import CHECKPOINT

# A stream cannot leave its router. On two cores with sixty of them, and a third of the replicas moving, it may take
# longer than the 80 s that a router has by default.
ROUTER_S = 120
DEADLINE_S = ROUTER_S + 120
# The embedded model, as if it had been downloaded.
HUB_ID, COMMIT = "quire/embedded", "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Nodes:
    """A Ray cluster of several nodes and the application on it."""

    cluster: Cluster
    process: subprocess.Popen[str]
    address: str  # of the GCS
    num_replicas: int

    def add(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("add\n")
        self.process.stdin.flush()

    def end(self) -> None:
        end(self.process)

    def placed(self) -> dict[str, Counter[str]]:
        """How many running replicas of each deployment a node has, by its id."""
        found: dict[str, Counter[str]] = {}
        deployments = self.cluster.serve_status()["applications"]["quire"]["deployments"]
        for name, deployment in deployments.items():
            for replica in deployment["replicas"]:
                if replica["state"] == "RUNNING":
                    found.setdefault(replica["node_id"], Counter())[name] += 1
        return found

    def is_complete(self) -> bool:
        total = sum(self.placed().values(), Counter())
        return self.cluster.is_running() and total == {"Router": 2, "Replica": self.num_replicas}

    def drain(self, node_id: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "quire.cluster.cli", "drain-node"]
        command += ["--address", self.address, "--node-id", node_id]
        command += ["--deadline-s", str(DEADLINE_S)]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S + 60)


def running_nodes(
    tmp_path: Path,
    engine: dict[str, Any] | None = None,
    model: str | None = None,
    num_replicas: int = 3,
) -> Iterator[Nodes]:
    """Run the nodes, a head and three workers, with an application.

    Parameters
    ----------
    num_replicas
        At most one for each worker.
    model
        A folder; None: `HUB_ID`, which one worker has. The others, and those that are added, get it from that one,
        because they cannot reach the hub.
    """
    homes = tmp_path / "homes"
    homes.mkdir()
    if model is None:
        model = HUB_ID
        cache = homes / "0/.cache/huggingface/hub" / f"models--{HUB_ID.replace('/', '--')}"
        shutil.copytree(CHECKPOINT, cache / "snapshots" / COMMIT)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text(COMMIT)
    (port,) = free_ports(1)
    script = Path(__file__).parent / "ray_nodes.py"
    output = tmp_path / "nodes.out"
    with output.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(script), str(port), str(homes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, output.read_text()
        cluster = deployed(f"http://127.0.0.1:{port}", output, engine, model, num_replicas)
        yield Nodes(cluster, process, json.loads(line)["address"], num_replicas)
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """End a cluster, also one that has ended."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait(120)


def deployed(
    dashboard: str,
    output: Path,
    engine: dict[str, Any] | None = None,
    model: str = "embedded",
    num_replicas: int = 3,
) -> Cluster:
    """Give Serve the repository's cluster.yaml with these options of the engine."""
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    take_ports(config)
    config["proxy_location"] = "HeadOnly"  # proxies of several nodes cannot share a machine's ports
    config["http_options"]["host"] = "0.0.0.0"
    args = config["applications"][0]["args"]
    args |= {"replicas": num_replicas, "routers": 2, "model": model}
    args |= {"served_model_name": "embedded", "dtype": "float32"}  # for `deterministic` on a CPU
    args["engine"] = {"deterministic": True, "peer_transport": "grpc", **(engine or {})}
    args["replica_resources"] = {"num_cpus": 1.5}
    # Streams of a replica that ends must move; those of a router have `ROUTER_S`.
    args["router"] = {"max_move_s": 120.0, "drain_timeout_s": 0.0, "max_wait_s": 900.0}
    config["applications"][0]["deployments"] = [
        {"name": "Router", "graceful_shutdown_timeout_s": ROUTER_S}
    ]
    env = config["controller_options"]["runtime_env"]["env_vars"]
    env["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "10"
    http_port, grpc_port = config["http_options"]["port"], config["grpc_options"]["port"]
    cluster = Cluster(http_port, grpc_port, output, dashboard, config)
    cluster.deploy(config)
    wait_until(cluster.is_running, CHANGE_TIMEOUT_S, "Serve has started the application")
    wait_until(cluster.every_router_knows_every_replica, CHANGE_TIMEOUT_S, "routers know replicas")
    return cluster


def explained(cluster: Cluster, answer_id: str) -> list[dict]:
    """The decisions for an answer, one for each attempt."""
    url = f"{cluster.url}/v1/router/explain?request_id={answer_id}"
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.loads(response.read())["data"]

"""A node with a TLS listener that drains: the listener ends, so `quire drain-node` returns before its deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from authority import Authority

from quire.cluster.local.ports import free_ports
from quire.cluster.tls.listener_actor import LEASE_S

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.slow,  # two raylets, and a listener's lease of 30 s
]
DEADLINE_S = 150
# A head and a worker on this machine, and a router's part that keeps their listeners. The worker's listener cannot have
# the ports, which the head's has; its actor runs all the same.
NODES = """
import asyncio, json, sys, ray
from ray.cluster_utils import Cluster
from quire.cluster.config.tls_section import TlsArgs
from quire.cluster.tls.tls_listeners import TlsListeners

async def main():
    room = {"num_cpus": 1, "object_store_memory": 80 * 1024**2}
    nodes = Cluster(initialize_head=True, head_node_args=room | {"include_dashboard": False})
    worker = nodes.add_node(**room)
    ray.init(address=nodes.address, log_to_driver=False)
    listeners = TlsListeners(TlsArgs(**json.loads(sys.argv[1])), "quire")
    await listeners.start()
    def listening():
        return [a for a in ray.util.list_named_actors(all_namespaces=True) if "quire-tls" in a["name"]]
    while len(listening()) < 2:
        await asyncio.sleep(0.2)
    # An actor has a name before it has a process.
    for one in listening():
        await ray.get_actor(**one).pid.remote()
    print(json.dumps({"address": nodes.address, "worker": worker.node_id}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps([a["name"] for a in listening()]), flush=True)
    await listeners.close()
    ray.shutdown()
    nodes.shutdown()

asyncio.run(main())
"""


def test_the_listener_of_a_drained_node_ends_before_the_deadline(tmp_path: Path) -> None:
    certificate, key = Authority().issue().write(tmp_path, "tls")
    http_port, grpc_port = free_ports(2)
    args = {"certificate_file": certificate, "key_file": key, "host": "127.0.0.1"}
    args |= {"http_port": http_port, "grpc_port": grpc_port}
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    with subprocess.Popen(
        [sys.executable, "-c", NODES, json.dumps(args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        found = json.loads(process.stdout.readline())
        began_s = time.monotonic()
        drained = subprocess.run(
            [
                *(sys.executable, "-m", "quire.cluster.cli", "drain-node"),
                *("--address", found["address"], "--node-id", found["worker"]),
                *("--deadline-s", str(DEADLINE_S)),
            ],
            env=environment,
            capture_output=True,
            text=True,
        )
        took_s = time.monotonic() - began_s
        print(drained.stdout, drained.stderr)
        process.stdin.close()
        left = json.loads(process.stdout.readline())
    assert drained.returncode == 0, drained.stdout + drained.stderr
    assert "left: 1 TlsListener" in drained.stdout
    assert LEASE_S - 10 < took_s < DEADLINE_S
    # That of the other node stays.
    assert [found["worker"] in name for name in left] == [False]

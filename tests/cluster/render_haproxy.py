"""Write HAProxy's configurations as Ray's proxy would, in a process with the environment of the proxy.

Takes a JSON object from stdin: `path` of the file to write, `host`, `ports` (of HTTP, gRPC, the
statistics and the metrics), and the ports of `http_servers` and of `grpc_servers`; several such objects in a list.
"""

import asyncio
import json
import sys
from pathlib import Path

from quire.cluster.proxies.ray_proxies import set_up

set_up()  # before Ray reads its settings, as a worker process does

from ray.serve._private import haproxy  # noqa: E402
from ray.serve._private.common import RequestProtocol  # noqa: E402
from ray.serve.config import HTTPOptions, gRPCOptions  # noqa: E402

SERVICERS = ["quire.protos.generation_pb2_grpc.add_GenerationServicer_to_server"]

NEVER = 100_000  # checks that must fail


def backend(protocol: RequestProtocol, ports: list[int]) -> haproxy.BackendConfig:
    """A single server counts as up whatever it answers: a busy machine delays the checks."""
    servers = [haproxy.ServerConfig(f"server{port}", "127.0.0.1", port) for port in ports]
    name = f"{protocol.value.lower()}-quire"
    fall = NEVER if len(servers) == 1 else None
    return haproxy.BackendConfig(
        name, "/", servers=servers, app_name="quire", protocol=protocol, health_check_fall=fall
    )


async def write(asked: dict) -> None:
    folder = Path(asked["path"]).parent
    http_port, grpc_port, stats_port, metrics_port = asked["ports"]
    config = haproxy.HAProxyConfig(
        http_options=HTTPOptions(host=asked["host"], port=http_port),
        grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=SERVICERS),
        stats_port=stats_port,
        metrics_port=metrics_port,
        is_head=True,
        has_received_routes=bool(asked["http_servers"]),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        metrics_socket_path=str(folder / "metrics.sock"),
    )
    backends = {}
    for protocol, ports in (
        (RequestProtocol.HTTP, asked["http_servers"]),
        (RequestProtocol.GRPC, asked["grpc_servers"]),
    ):
        if ports:
            backends[protocol.value] = backend(protocol, ports)
    api = haproxy.HAProxyApi(config, backends, asked["path"])
    api._generate_config_file_internal()


async def main() -> None:
    for asked in json.load(sys.stdin):
        await write(asked)
    print(haproxy.get_haproxy_binary())


asyncio.run(main())

"""A router's gRPC server takes no port that another process of the machine has."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest
from ray.serve._private import default_impl, http_util, replica
from ray.serve.config import gRPCOptions

from quire.cluster.local.ports import free_ports
from quire.cluster.proxies import ray_proxies


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "add_port_to_grpc_server", replica.add_port_to_grpc_server)
    monkeypatch.setattr(replica, "start_grpc_server", replica.start_grpc_server)
    monkeypatch.setattr(http_util, "is_ipv6", http_util.is_ipv6)
    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    ray_proxies.bind_grpc()


@pytest.fixture(params=["0.0.0.0", "127.0.0.1"])
def taken(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port on which another server listens, one that would share it."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((request.param, 0))
        server.listen()
        yield server.getsockname()[1]


async def start(port: int):
    return await replica.start_grpc_server(
        lambda **_: None,
        gRPCOptions(port=port),
        event_loop=asyncio.get_running_loop(),
        enable_so_reuseport=False,
    )


def test_a_port_of_another_process_is_refused_as_serve_expects_it(taken: int):
    with pytest.raises(RuntimeError, match=f"port {taken} is in use") as error:
        asyncio.run(start(taken))
    # So Serve marks the port as taken and asks for another one.
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.__cause__.errno == errno.EADDRINUSE


def test_two_servers_of_a_machine_do_not_share_a_port():
    async def is_started(port: int, then: Callable[[], Awaitable[object]]) -> bool:
        try:
            task, server = await start(port)
        except RuntimeError:
            return False
        try:
            await then()
        finally:
            await server.stop(None)
            await task
        return True

    async def nothing() -> None:
        pass

    async def run() -> None:
        (port,) = free_ports(1)
        second: list[bool] = []

        async def start_second() -> None:
            second.append(await is_started(port, nothing))

        assert await is_started(port, start_second)
        assert second == [False]
        assert await is_started(port, nothing), "the port is free again"

    asyncio.run(run())

"""A client that asks again does so on another connection."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from patient_channel import PatientChannel

METHOD = "/quire.test/WhoAsks"


@pytest.fixture
def address() -> Iterator[str]:
    """Of a server that answers with the client's port."""

    def who_asks(request: bytes, context: grpc.ServicerContext) -> bytes:
        return context.peer().encode()

    service, _, method = METHOD[1:].partition("/")
    handler = grpc.unary_unary_rpc_method_handler(who_asks)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_renewed_channels_have_connections_of_their_own_beside_the_old_ones(address):
    with PatientChannel(address) as channel, PatientChannel(address) as other:
        ask = channel.unary_unary(METHOD)
        peers = [ask(b""), ask(b""), other.unary_unary(METHOD)(b"")]
        for _ in range(3):
            channel.renew()
            peers.append(ask(b""))
    assert peers[0] == peers[1]
    assert len(set(peers)) == 5

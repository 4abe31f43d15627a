"""The exporting side: a gRPC server that streams blocks of this node's pool to other nodes.

It listens on the node's address, as the ports of Ray do. Only holders of its token get an answer. The token is random,
lives as long as the process, and travels in the bus' `Hello`, so the bus' own protection is the token's. It has no
method for clients, and no reflection.
"""

from __future__ import annotations

import hmac
import math
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from quire.protos.wire_codec import WireError
from quire.replica.kv_transport.block_messages import (
    MAX_KEYS,
    METHOD,
    BlockHeaders,
    ExportRequest,
    num_in_piece,
    split_keys,
)
from quire.replica.kv_transport.shared_pool import SharedPool
from quire.replica.node_pool.pool_layout import KEY_BYTES, LAYOUT_VERSION

# Exports at a time; further ones are refused, and their importers compute. Each holds `PIECE_BYTES` and what gRPC
# buffers for one stream.
MAX_EXPORTS = 2
_TOKEN_BYTES = 32
# After this time without a block no export is in progress.
_QUIET_S = 0.5


class BlockExport:
    """Serves a pool's blocks to importers.

    Parameters
    ----------
    pool
        Where the blocks are.
    host
        The address to listen on.

    Attributes
    ----------
    address
        `host:port` for importers.
    token
        What importers must show.
    num_exported
        Blocks sent so far.
    """

    def __init__(self, pool: SharedPool, host: str):
        self.token = secrets.token_hex(_TOKEN_BYTES)
        self.num_exported = 0
        self._exported_s = -math.inf
        self._pool = pool
        self._wanted = f"Bearer {self.token}".encode()
        service, method = METHOD.strip("/").split("/")
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(
            self._export
        )
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_EXPORTS, thread_name_prefix="quire-export"),
            maximum_concurrent_rpcs=MAX_EXPORTS,
            options=[("grpc.so_reuseport", 0)],
        )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {method: handler})]
        )
        port = self._server.add_insecure_port(f"{_bracketed(host)}:0")
        self.address = f"{_bracketed(host)}:{port}"
        self._server.start()

    def close(self, linger_s: float = 0.0) -> None:
        """End all exports, after `linger_s` at most: streams that have just left this replica pull their blocks."""
        end_s = time.monotonic() + linger_s
        while time.monotonic() < min(end_s, self._exported_s + _QUIET_S):
            time.sleep(_QUIET_S / 10)
        self._server.stop(grace=None).wait()

    def _export(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self._check_token(context)
        keys = self._keys(data, context)
        count = num_in_piece(self._pool.layout.slot_bytes)
        for begin in range(0, len(keys), count):
            headers, contents = self._pool.read(keys[begin : begin + count])
            if not headers:
                continue
            yield BlockHeaders(
                b"".join(header.key for header in headers),
                np.array([header.payer for header in headers], np.uint64),
                np.array([header.checksum for header in headers], np.uint32),
                np.array([header.routing_hash for header in headers], np.uint64),
            ).encode()
            self._exported_s = time.monotonic()
            yield contents
            self._exported_s = time.monotonic()
            self.num_exported += len(headers)

    def _check_token(self, context: grpc.ServicerContext) -> None:
        shown = dict(context.invocation_metadata()).get("authorization", "")
        shown = shown.encode() if isinstance(shown, str) else shown
        if not hmac.compare_digest(shown, self._wanted):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token of this replica is missing")

    def _keys(self, data: bytes, context: grpc.ServicerContext) -> list[bytes]:
        """The keys of a request; ends the call if it cannot be served."""
        try:
            request = ExportRequest.decode(data)
        except WireError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        own = LAYOUT_VERSION, self._pool.layout.slot_bytes
        if (request.layout_version, request.slot_bytes) != own:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this pool has layout version {own[0]} and slots of {own[1]} bytes, the importer has "
                f"{request.layout_version} and {request.slot_bytes}",
            )
        if len(request.keys) % KEY_BYTES or len(request.keys) > MAX_KEYS * KEY_BYTES:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"keys must be at most {MAX_KEYS} of {KEY_BYTES} bytes each, got {len(request.keys)} bytes",
            )
        return split_keys(request.keys)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

"""The exporting side: a gRPC server that streams blocks of this node's pool to other nodes.

It listens on the node's address, as the ports of Ray do. Only holders of its token get an answer. The token is random,
lives as long as the process, and travels in the bus' `Hello`, so the bus' own protection is the token's. It has no
method for clients, and no reflection.

A block that the engine of this process has on its device, but not in the pool, is published first: the running streams
of a replica that drains have such blocks.

With NIXL the contents do not travel in the stream: the importer reads the pool's memory itself.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from quire.protos.wire_codec import WireError
from quire.replica.kv_transport.block_messages import (
    LEND_METHOD,
    MAX_KEYS,
    METHOD,
    BlockHeaders,
    ExportRequest,
    Lender,
    num_in_piece,
    split_keys,
)
from quire.replica.kv_transport.nixl_memory import NixlMemory
from quire.replica.kv_transport.shared_pool import SharedPool
from quire.replica.node_pool.pool_layout import KEY_BYTES, LAYOUT_VERSION
from quire.replica.node_pool.slot_content import Content

# Exports at a time; further ones are refused, and their importers compute. Each holds `PIECE_BYTES` and what gRPC
# buffers for one stream.
MAX_EXPORTS = 8
_TOKEN_BYTES = 32
# Longest wait for the next block that the engine publishes, and the time between two looks.
_MAX_PUBLISH_S, _POLL_S = 1.0, 0.002
# After this time without a block no export is in progress: importers that wait in line have asked by then.
_QUIET_S = 1.5


class BlockExport:
    """Serves a pool's blocks to importers.

    Parameters
    ----------
    pool
        Where the blocks are.
    host
        The address to listen on.
    publish
        Makes the engine publish what it has of these blocks; returns those that will be in the pool soon.
    memory
        The pool's memory, which importers read by NIXL; None: without NIXL.

    Attributes
    ----------
    address
        `host:port` for importers.
    token
        What importers must show.
    num_exported
        Blocks sent so far.
    """

    def __init__(
        self,
        pool: SharedPool,
        host: str,
        publish: Callable[[list[bytes]], set[bytes]] = lambda keys: set(),
        memory: NixlMemory | None = None,
    ):
        self._memory = memory
        self.token = secrets.token_hex(_TOKEN_BYTES)
        self.num_exported = 0
        self._exported_s = -math.inf
        self._pool = pool
        self._publish = publish
        self._wanted = f"Bearer {self.token}".encode()
        service = METHOD.split("/")[1]
        calls = {METHOD: self._export} if memory is None else {LEND_METHOD: self._lend}
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            method.split("/")[2]: grpc.unary_stream_rpc_method_handler(call)
            for method, call in calls.items()
        }
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_EXPORTS, thread_name_prefix="quire-export"),
            maximum_concurrent_rpcs=MAX_EXPORTS,
            options=[("grpc.so_reuseport", 0)],
        )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, handlers)]
        )
        port = self._server.add_insecure_port(f"{_bracketed(host)}:0")
        self.address = f"{_bracketed(host)}:{port}"
        self._server.start()

    def close(self, linger_s: float = 0.0) -> None:
        """End all exports, after `linger_s` at most: streams that have just left this replica pull their blocks."""
        end_s = time.monotonic() + linger_s
        while time.monotonic() < min(end_s, self._exported_s + _QUIET_S):
            time.sleep(_QUIET_S / 30)
        self._server.stop(grace=None).wait()

    def _export(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        for piece in self._pieces(self._keys(data, context), context):
            headers, contents = self._pool.read(piece)
            if not headers:
                continue
            yield _block_headers(headers).encode()
            self._exported_s = time.monotonic()
            yield contents
            self._exported_s = time.monotonic()
            self.num_exported += len(headers)

    def _lend(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        assert self._memory is not None
        keys = self._keys(data, context)
        loan = _Loan(self._pool, self._memory)
        if not context.add_callback(loan.end):
            loan.end()
            return
        yield Lender(*self._memory.address).encode()
        for piece in self._pieces(keys, context):
            headers = loan.add(piece)
            if not headers:
                continue
            self._exported_s = time.monotonic()
            slots = [header.slot for header in headers]
            yield _block_headers(headers, slots).encode()
            self.num_exported += len(headers)
        yield _block_headers([]).encode()
        while not loan.ended.wait(_QUIET_S / 3):
            self._exported_s = time.monotonic()

    def _pieces(self, keys: list[bytes], context: grpc.ServicerContext) -> Iterator[list[bytes]]:
        """Yield the keys of a request, piece by piece, once their blocks are in the pool."""
        count = num_in_piece(self._pool.layout.slot_bytes)
        missing = self._pool.missing(keys)
        coming = self._publish(missing) if missing else set()
        for begin in range(0, len(keys), count):
            piece = keys[begin : begin + count]
            if not self._have_come(coming.intersection(piece), context):
                coming = set()
            yield piece

    def _have_come(self, coming: Collection[bytes], context: grpc.ServicerContext) -> bool:
        """Wait until the engine has published these blocks. Returns False if it does not: its pool may have no room."""
        left: Sequence[bytes] = list(coming)
        end_s = time.monotonic() + _MAX_PUBLISH_S
        while left:
            missing = self._pool.missing(left)
            now_s = time.monotonic()
            if len(missing) < len(left):
                end_s = now_s + _MAX_PUBLISH_S
            elif now_s > end_s or not context.is_active():
                return False
            left = missing
            # A replica that drains lingers for this export.
            self._exported_s = now_s
            if left:
                time.sleep(_POLL_S)
        return True

    def _check_token(self, context: grpc.ServicerContext) -> None:
        shown = dict(context.invocation_metadata()).get("authorization", "")
        shown = shown.encode() if isinstance(shown, str) else shown
        if not hmac.compare_digest(shown, self._wanted):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token of this replica is missing")

    def _keys(self, data: bytes, context: grpc.ServicerContext) -> list[bytes]:
        """The keys of a request; ends the call if it may not or cannot be served."""
        self._check_token(context)
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


class _Loan:
    """The leases of the slots that an importer reads, and help with reading, until its call ends.

    Attributes
    ----------
    ended
        The call has ended, so nothing more is leased.
    """

    def __init__(self, pool: SharedPool, memory: NixlMemory):
        self.ended = threading.Event()
        self._help = contextlib.ExitStack()
        self._help.enter_context(memory.lending())
        self._pool = pool
        self._slots: list[int] = []
        self._lock = threading.Lock()

    def add(self, keys: Sequence[bytes]) -> list[Content]:
        """Lease those of these blocks that the pool has; return their headers with the slots."""
        with self._lock:
            if self.ended.is_set():
                return []
            headers = self._pool.lend(keys)
            self._slots += [header.slot for header in headers]
            return headers

    def end(self) -> None:
        with self._lock:
            self.ended.set()
            slots, self._slots = self._slots, []
            self._help.close()
        if slots:
            self._pool.release(slots)


def _block_headers(headers: Sequence[Content], slots: Sequence[int] = ()) -> BlockHeaders:
    return BlockHeaders(
        b"".join(header.key for header in headers),
        np.array([header.payer for header in headers], np.uint64),
        np.array([header.checksum for header in headers], np.uint32),
        np.array([header.routing_hash for header in headers], np.uint64),
        np.array(slots, np.uint64),
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

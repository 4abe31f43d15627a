"""The importing side: fetches blocks from another node and publishes them in the pool of this one.

Nothing that a peer sends is trusted. A block is written only if its key is the one that was asked for, and published
only if length and checksum fit. What is published is an ordinary block of the pool: the engine leases and verifies it
again before it uses it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import grpc

from quire.protos.wire import BlockSource
from quire.protos.wire_codec import WireError
from quire.replica.kv_transport.block_messages import (
    LEND_METHOD,
    MAX_KEYS,
    METHOD,
    PIECE_BYTES,
    BlockHeaders,
    ExportRequest,
    Lender,
    WantedBlock,
    num_in_piece,
    split_keys,
)
from quire.replica.kv_transport.nixl_memory import LenderAddress, NixlError, NixlMemory
from quire.replica.kv_transport.shared_pool import SharedPool
from quire.replica.node_pool.pool_layout import LAYOUT_VERSION
from quire.replica.node_pool.slot_content import Content

# Connections to peers that are kept; the least recently used ends first.
_MAX_CHANNELS = 16
# A peer that could not be reached is not asked again before this time.
_AVOIDED_S = 10.0
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class ImportResult(NamedTuple):
    """What an import has done."""

    num_blocks: int
    num_bytes: int
    seconds: float
    # Why fewer blocks than wanted have come; empty: all have.
    reason: str = ""


class BlockImport:
    """Imports blocks, one call at a time.

    Parameters
    ----------
    pool
        Where the blocks go.
    memory
        Reads them from the exporter's pool by NIXL; None: they come in the stream.

    Attributes
    ----------
    num_imported, num_refused
        Blocks published so far, and blocks that were not, because they are wrong or there is no room.
    """

    def __init__(self, pool: SharedPool, memory: NixlMemory | None = None):
        self._pool = pool
        self._memory = memory
        self._channels: OrderedDict[str, grpc.Channel] = OrderedDict()
        # Address of a peer that could not be reached to the time from which it is asked again.
        self._avoided: dict[str, float] = {}
        # One import at a time: the next one finds what this one has brought, and both take as long as at once.
        self._lock = threading.Lock()
        self.num_imported = 0
        self.num_refused = 0

    def run(
        self,
        source: BlockSource,
        wanted: Sequence[WantedBlock],
        timeout_s: float,
        cancelled: threading.Event | None = None,
    ) -> ImportResult:
        """Import the blocks of one sequence that this node lacks, in their order, until a needed one is missing.

        Parameters
        ----------
        timeout_s
            Time after which the import ends, with the blocks that have come.
        cancelled
            Ends the import after the running piece when it is set.
        """
        began_s = time.monotonic()
        if not self._lock.acquire(timeout=timeout_s):
            return ImportResult(0, 0, timeout_s, "another import took too long")
        try:
            lacking = set(self._pool.missing([block.key for block in wanted]))
            missing = [block for block in wanted if block.key in lacking][:MAX_KEYS]
            left_s = timeout_s - (time.monotonic() - began_s)
            if not missing or left_s <= 0:
                return ImportResult(0, 0, 0.0, "it is late" if missing else "")
            if time.monotonic() < self._avoided.get(source.address, 0.0):
                return ImportResult(0, 0, 0.0, "the peer could not be reached a moment ago")
            began_s = time.monotonic()
            count, reason = self._fetch(source, missing, left_s, cancelled)
            self.num_imported += count
            num_bytes = count * self._pool.layout.slot_bytes
            return ImportResult(count, num_bytes, time.monotonic() - began_s, reason)
        finally:
            self._lock.release()

    def _fetch(
        self,
        source: BlockSource,
        missing: Sequence[WantedBlock],
        timeout_s: float,
        cancelled: threading.Event | None,
    ) -> tuple[int, str]:
        """Returns the number of published blocks, and why there are fewer than wanted."""
        layout = self._pool.layout
        request = ExportRequest(
            LAYOUT_VERSION, layout.slot_bytes, b"".join(block.key for block in missing)
        )
        method: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel(
            source.address
        ).unary_stream(METHOD if self._memory is None else LEND_METHOD)
        call = method(
            request.encode(),
            timeout=timeout_s,
            metadata=(("authorization", f"Bearer {source.token}"),),
        )
        progress = _Progress(missing)
        try:
            memory = self._memory
            pieces = self._sent(call) if memory is None else self._lent(call, memory)
            reason = self._receive(pieces, progress, cancelled)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAVAILABLE:
                self._avoid(source)
            reason = f"{code.name}: {error.details()}"
        except NixlError as error:
            self._avoid(source)
            reason = str(error)
        except WireError as error:
            reason = str(error)
        finally:
            call.cancel()
            self._pool.release(progress.slots)
        return len(progress.slots), reason

    def _avoid(self, source: BlockSource) -> None:
        self._avoided[source.address] = time.monotonic() + _AVOIDED_S

    def _receive(
        self,
        pieces: Iterator[_Piece],
        progress: _Progress,
        cancelled: threading.Event | None,
    ) -> str:
        """Publish the blocks of an export. Returns why it ended before the last one."""
        most = num_in_piece(self._pool.layout.slot_bytes)
        for headers, take in pieces:
            if len(headers) > most or not progress.expects([header.key for header in headers]):
                self.num_refused += len(headers)
                return "the peer lacks a block, or sent one that was not asked for"
            slots = take(headers)
            progress.slots += slots
            if len(slots) < len(headers):
                self.num_refused += len(headers) - len(slots)
                return "a block was damaged on its way, or the pool has no room"
            if cancelled is not None and cancelled.is_set():
                return "it was cancelled"
        return "" if progress.is_complete else "the peer has no more"

    def _sent(self, call: Iterator[bytes]) -> Iterator[_Piece]:
        """The pieces of an export whose contents come in its stream."""
        for message in call:
            headers = _headers(BlockHeaders.decode(message))
            yield _Piece(headers, lambda headers: self._pool.write(headers, next(call, b"")))

    def _lent(self, call: Iterator[bytes], memory: NixlMemory) -> Iterator[_Piece]:
        """The pieces of an export that lends its slots."""
        lender = Lender.decode(next(call, b""))
        address = LenderAddress(lender.agent, lender.begin)
        for message in call:
            lent = BlockHeaders.decode(message)
            headers, there = _headers(lent), lent.slots.tolist()
            if not headers:
                return
            if len(there) != len(headers):
                raise WireError(f"BlockHeaders: {len(headers)} keys, {len(there)} slots")
            read = functools.partial(memory.read, address, there)
            yield _Piece(headers, functools.partial(self._pool.take, read=read))

    def _channel(self, address: str) -> grpc.Channel:
        channel = self._channels.pop(address, None)
        if channel is None:
            options = [*_OPTIONS, ("grpc.max_receive_message_length", self._most_bytes)]
            channel = grpc.insecure_channel(address, options=options)
        self._channels[address] = channel
        if len(self._channels) > _MAX_CHANNELS:
            _, oldest = self._channels.popitem(last=False)
            oldest.close()
        return channel

    @property
    def _most_bytes(self) -> int:
        """The longest message that a peer may send: the contents of a piece."""
        return max(self._pool.layout.slot_bytes, PIECE_BYTES) + 1024

    def close(self) -> None:
        """End the connections, and with them a running import."""
        for channel in list(self._channels.values()):
            channel.close()


class _Piece(NamedTuple):
    """Some blocks of an export."""

    headers: list[Content]
    # Writes the blocks and publishes them; returns their slots, fewer if some are wrong or there is no room.
    take: Callable[[list[Content]], list[int]]


class _Progress:
    """Where an import is in the list of the wanted blocks."""

    def __init__(self, wanted: Sequence[WantedBlock]):
        self._wanted = wanted
        self._next = 0
        # Of the published blocks, in the order of the sequence.
        self.slots: list[int] = []

    def expects(self, keys: Sequence[bytes]) -> bool:
        """Whether these are the next wanted blocks, without a gap that makes them useless. Moves behind them."""
        for key in keys:
            while self._next < len(self._wanted) and self._wanted[self._next].key != key:
                if self._wanted[self._next].is_needed:
                    return False
                self._next += 1
            if self._next == len(self._wanted):
                return False
            self._next += 1
        return True

    @property
    def is_complete(self) -> bool:
        return not any(block.is_needed for block in self._wanted[self._next :])


def _headers(headers: BlockHeaders) -> list[Content]:
    keys = split_keys(headers.keys)
    columns = [headers.payers, headers.checksums, headers.routing_hashes]
    if any(len(column) != len(keys) for column in columns):
        raise WireError(f"BlockHeaders: {len(keys)} keys, {[len(column) for column in columns]}")
    rows = zip(keys, *(column.tolist() for column in columns), strict=True)
    return [Content(-1, *row) for row in rows]

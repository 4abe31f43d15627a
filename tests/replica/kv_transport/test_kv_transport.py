"""Blocks from one node's pool to another's: never a wrong byte, no lost slot, and no answer without the token."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from pool_process import bytes_of, key_of, open_pool, put
from transport_nodes import HOST, LAYOUT, Node, wanted

from quire.protos.wire import BlockSource
from quire.replica.kv_transport import block_export, block_messages, nixl_memory
from quire.replica.kv_transport.block_messages import (
    LEND_METHOD,
    METHOD,
    BlockHeaders,
    ExportRequest,
    Lender,
    WantedBlock,
)
from quire.replica.kv_transport.kv_transport import KvTransport
from quire.replica.node_pool.pool_layout import LAYOUT_VERSION
from quire.replica.node_pool.slot_checks import checksum


@pytest.fixture(params=["grpc", "nixl"])
def nodes(request, tmp_path: Path, monkeypatch) -> Iterator[tuple[Node, Node]]:
    # Several pieces, so that an export can end between two.
    monkeypatch.setattr(block_messages, "PIECE_BYTES", 4 * LAYOUT.slot_bytes)
    uses_nixl = request.param == "nixl"
    if uses_nixl:
        pytest.importorskip("nixl")
    made = [Node.made(tmp_path / name, uses_nixl=uses_nixl) for name in ("a", "b")]
    yield made[0], made[1]
    for node in made:
        node.end()


NO_SLOTS = np.empty(0, np.uint64)


def replace_read(node: Node, make) -> None:
    """Replace what an export does with the blocks of a piece by `make` of it."""
    pool = node.transport._pool
    name = "read" if node.transport._memory is None else "lend"
    setattr(pool, name, make(getattr(pool, name)))


def test_blocks_come_over_and_are_found_by_the_engines_of_the_node(nodes):
    a, b = nodes
    slots = put(a.pool, *range(20))
    a.pool._views.routing_hash[slots] = np.arange(1, 21, dtype=np.uint64) << np.uint64(40)
    result = b.transport.import_blocks(a.transport.source, wanted(*range(20)), 10)
    assert (result.num_blocks, result.num_bytes, result.reason) == (20, 20 * LAYOUT.slot_bytes, "")
    assert b.has(*range(21)) == [True] * 20 + [False]
    here = [b.pool.content(b.pool.find(key_of(n))) for n in range(20)]
    there = [a.pool.content(slot) for slot in slots]
    assert [one._replace(slot=0) for one in here] == [one._replace(slot=0) for one in there]
    assert {one.payer for one in here} == {32} and all(one.routing_hash for one in here)
    again = b.transport.import_blocks(a.transport.source, wanted(*range(20)), 10)
    assert (again.num_blocks, again.reason) == (0, ""), "nothing is sent twice"


def test_an_import_ends_at_the_first_needed_block_that_the_peer_lacks(nodes):
    a, b = nodes
    put(a.pool, 0, 1, 2, 4, 5, 6, 8)
    result = b.transport.import_blocks(a.transport.source, wanted(*range(9)), 10)
    assert result.reason and b.has(*range(9))[3:] == [False] * 6
    # Blocks of a sliding window that have been passed are not needed.
    some = [WantedBlock(key_of(n), is_needed=n != 7) for n in (4, 5, 6, 7, 8)]
    assert b.transport.import_blocks(a.transport.source, some, 10).num_blocks == 4
    assert b.has(4, 5, 6, 7, 8) == [True, True, True, False, True]


@pytest.mark.parametrize("nodes", ["grpc"], indirect=True)
def test_no_blocks_without_the_token_or_in_another_layout(nodes, tmp_path):
    a, b = nodes
    put(a.pool, 0)
    address = a.transport.source.address
    for token in ("", "0" * 64, a.transport.source.token[:-1], b.transport.source.token):
        result = b.transport.import_blocks(BlockSource(address, token), wanted(0), 10)
        assert result.num_blocks == 0 and "UNAUTHENTICATED" in result.reason
    with grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            list(channel.unary_stream(METHOD)(b"anything", timeout=10))
        for method in ("/quire.Generation/Generate", "/grpc.health.v1.Health/Check"):
            with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                channel.unary_unary(method)(b"", timeout=10)
        shown = [("authorization", f"Bearer {a.transport.source.token}")]
        for request, message in (
            (b"anything", "checksum does not fit"),
            (ExportRequest(LAYOUT_VERSION + 1, 512, key_of(0)).encode(), "layout version"),
            (ExportRequest(LAYOUT_VERSION, 513, key_of(0)).encode(), "slots of 512 bytes"),
            (ExportRequest(LAYOUT_VERSION, 512, key_of(0)[1:]).encode(), "of 32 bytes each"),
        ):
            with pytest.raises(grpc.RpcError, match=message):
                list(channel.unary_stream(METHOD)(request, metadata=shown, timeout=10))
    assert b.has(0) == [False]
    assert a.transport.source.token not in f"{a.transport.source!r} {a.transport.source}"


def test_a_block_that_is_damaged_in_the_senders_pool_is_not_taken(nodes):
    a, b = nodes
    slots = put(a.pool, *range(8))
    a.pool.slots[slots[5], 17] ^= 1
    b.transport.import_blocks(a.transport.source, wanted(*range(8)), 10)
    found = b.has(*range(8))
    assert found[:4] == [True] * 4 and found[5:] == [False] * 3


class HostileExport(block_export.BlockExport):
    """Sends headers and contents with one random fault."""

    def __init__(self, pool, chance: random.Random):
        self._chance = chance
        super().__init__(pool, HOST)

    def _export(self, data, context):
        keys = self._keys(data, context)
        messages = []
        for begin in range(0, len(keys), 4):
            names = keys[begin : begin + 4]
            blocks = [bytes_of(key, LAYOUT.slot_bytes) for key in names]
            sums = np.array([checksum(block) for block in blocks], np.uint32)
            zeros = np.zeros(len(names), np.uint64)
            headers = [b"".join(names), zeros, sums, zeros]
            messages += [headers, b"".join(block.tobytes() for block in blocks)]
        i = self._chance.randrange(len(messages))
        fault = self._chance.randrange(5)
        if isinstance(messages[i], list):
            keys_of, payers, sums_of, hashes = messages[i]
            messages[i] = [
                [key_of(10**6) + keys_of[32:], payers, sums_of, hashes],
                [keys_of[32:] + keys_of[:32], payers, sums_of, hashes],
                [keys_of[:-1], payers, sums_of, hashes],
                [keys_of, payers, sums_of ^ np.uint32(1), hashes],
                [keys_of, payers, sums_of, hashes[:-1]],
            ][fault]
        elif fault == 0:
            messages[i] = messages[i][:-1]
        elif fault == 1:
            j = self._chance.randrange(len(messages[i]))
            flipped = bytes([messages[i][j] ^ 1 << j % 8])
            messages[i] = messages[i][:j] + flipped + messages[i][j + 1 :]
        elif fault == 2:
            messages[i] = messages[i][LAYOUT.slot_bytes :] + bytes(LAYOUT.slot_bytes)
        elif fault == 3:
            del messages[i]
        else:
            messages[i:] = []
        for message in messages:
            headers = isinstance(message, list)
            yield BlockHeaders(*message, NO_SLOTS).encode() if headers else message


@pytest.mark.parametrize("nodes", ["grpc"], indirect=True)
def test_whatever_a_peer_sends_no_wrong_byte_is_found_and_no_slot_is_lost(nodes):
    a, b = nodes
    chance = random.Random(7)
    hostile = HostileExport(a.transport._pool, chance)
    source = BlockSource(hostile.address, hostile.token)
    try:
        num_short = 0
        for n in range(150):
            names = range(10 * n, 10 * n + 10)
            result = b.transport.import_blocks(source, wanted(*names), 10)
            found = b.has(*names)
            assert sum(found) == result.num_blocks
            num_short += result.num_blocks < 10
            assert bool(result.reason) == (result.num_blocks < 10)
            assert b.has(10**6) == [False]
        assert num_short > 130
        b.check()
    finally:
        hostile.close()


def test_random_exports_and_imports_in_both_directions(nodes):
    """Both nodes fill their pools at random, evict, and pull from each other from several threads."""
    chance = random.Random(3)
    stop = threading.Event()
    pulled: list[int] = []  # blocks of each pull

    def pull(node: Node, peer: Node, seed: int) -> None:
        own = random.Random(seed)
        while not stop.is_set():
            begin = own.randrange(60)
            names = range(begin, begin + own.randrange(1, 12))
            result = node.transport.import_blocks(peer.transport.source, wanted(*names), 5)
            pulled.append(result.num_blocks)

    a, b = nodes
    end_s = time.monotonic() + 60
    with ThreadPoolExecutor(4) as threads:
        pulls = [threads.submit(pull, *pair, n) for n, pair in enumerate([(a, b), (b, a)] * 2)]
        num_turns = 0
        while num_turns < 150 or (sum(pulled) <= 20 and time.monotonic() < end_s):
            num_turns += 1
            node = chance.choice((a, b))
            names = [chance.randrange(70) for _ in range(chance.randrange(1, 6))]
            slots = node.pool.claim(len(names))
            if slots is not None:
                node.pool.release(slots)
                put(node.pool, *names)
            node.has(*names)
        stop.set()
        for one in pulls:
            one.result()
    assert sum(pulled) > 20


def test_a_cancelled_import_keeps_what_is_complete_and_loses_no_slot(nodes):
    a, b = nodes
    put(a.pool, *range(40))
    cancelled = threading.Event()
    num_read = 0

    def counting(read):
        def count(keys):
            nonlocal num_read
            num_read += len(keys)
            if num_read > 20:
                cancelled.set()
            return read(keys)

        return count

    replace_read(a, counting)
    result = b.transport.import_blocks(a.transport.source, wanted(*range(40)), 10, cancelled)
    assert 0 < result.num_blocks < 40 and result.reason == "it was cancelled"
    assert b.has(*range(40)) == [n < result.num_blocks for n in range(40)]
    b.check()


def test_a_late_import_ends_at_its_time_and_the_next_one_goes_on(nodes):
    a, b = nodes
    put(a.pool, *range(12))
    blocked = threading.Event()
    replace_read(a, lambda read: lambda keys: blocked.wait(10) and read(keys))
    result = b.transport.import_blocks(a.transport.source, wanted(*range(12)), 0.2)
    assert (result.num_blocks, result.reason[:17]) == (0, "DEADLINE_EXCEEDED")
    blocked.set()
    assert b.transport.import_blocks(a.transport.source, wanted(*range(12)), 10).num_blocks == 12


@pytest.mark.parametrize("nodes", ["grpc"], indirect=True)
def test_exports_at_a_time_are_bounded(nodes):
    a, b = nodes
    put(a.pool, *range(4))
    read, blocked, entered = a.transport._pool.read, threading.Event(), threading.Semaphore(0)

    def wait_and_read(keys):
        entered.release()
        assert blocked.wait(10)
        return read(keys)

    a.transport._pool.read = wait_and_read
    request = ExportRequest(LAYOUT_VERSION, LAYOUT.slot_bytes, key_of(0)).encode()
    shown = [("authorization", f"Bearer {a.transport.source.token}")]
    with grpc.insecure_channel(a.transport.source.address) as channel:
        calls = [
            channel.unary_stream(METHOD)(request, metadata=shown, timeout=10)
            for _ in range(block_export.MAX_EXPORTS)
        ]
        assert all(entered.acquire(timeout=10) for _ in calls)
        result = b.transport.import_blocks(a.transport.source, wanted(0), 10)
        assert result.num_blocks == 0 and "RESOURCE_EXHAUSTED" in result.reason
        blocked.set()
        assert all(len(list(call)) == 2 for call in calls)


def test_a_full_pool_takes_no_more_and_evicts_nothing_that_is_retained(nodes):
    a, b = nodes
    put(a.pool, *range(8))
    slots = put(b.pool, *range(100, 100 + LAYOUT.num_slots))
    b.pool.retain(slots[:-6])
    result = b.transport.import_blocks(a.transport.source, wanted(*range(8)), 10)
    assert result.num_blocks == 4 and "no room" in result.reason
    assert b.has(*range(8)) == [True] * 4 + [False] * 4
    assert all(b.has(*range(100, 100 + LAYOUT.num_slots - 6)))


def test_a_sender_that_dies_in_the_middle_leaves_whole_blocks_and_is_avoided(nodes, tmp_path):
    _, b = nodes
    kind = "grpc" if b.transport._memory is None else "nixl"
    victim_folder = tmp_path / "victim"
    victim_folder.mkdir()
    child = subprocess.Popen(
        [
            *(sys.executable, Path(__file__).parents[1] / "export_victim.py"),
            *(victim_folder, "40", str(LAYOUT.slot_bytes), kind),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        # NIXL prints what it does.
        lines = (line for line in child.stdout if "NIXL" not in line)
        source = BlockSource(*next(lines).split())

        def kill() -> None:
            if next(lines, "") == "half\n":
                child.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        result = b.transport.import_blocks(source, wanted(*range(40)), 20)
    finally:
        child.kill()
        child.wait()
        killer.join()
    assert result.num_blocks < 40
    # Whoever finds out first. NIXL connects with its first read: BACKEND is its name for a refused connection.
    of_nixl = kind == "nixl" and any(n in result.reason for n in ("DISCONNECT", "ERR_BACKEND"))
    assert "UNAVAILABLE" in result.reason or of_nixl
    assert b.has(*range(40)) == [n < result.num_blocks for n in range(40)]
    b.check()
    again = b.transport.import_blocks(source, wanted(*range(40)), 20)
    assert "a moment ago" in again.reason and again.seconds == 0


def test_the_transport_is_no_engine(tmp_path):
    engine = open_pool(tmp_path, LAYOUT)
    transport = KvTransport("test", tmp_path, LAYOUT, HOST)
    assert engine.counts().members == 1 and engine.is_reporter()
    engine.close()
    later = open_pool(tmp_path, LAYOUT)
    assert not later.is_new, "the transport keeps the pool"
    assert later.is_reporter()
    other = KvTransport("test", tmp_path, LAYOUT, HOST)
    assert later.counts().members == 1
    for member in (later, transport, other):
        member.close()
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------
# NIXL
# --------------------------------------------------------------------------------------------------

nixl_only = pytest.mark.parametrize("nodes", ["nixl"], indirect=True)


@nixl_only
def test_slots_are_lent_to_holders_of_the_token_until_their_call_ends(nodes):
    a, _ = nodes
    slots = put(a.pool, *range(6))
    request = ExportRequest(LAYOUT_VERSION, LAYOUT.slot_bytes, b"".join(map(key_of, range(6))))
    with grpc.insecure_channel(a.transport.source.address) as channel:
        lend = channel.unary_stream(LEND_METHOD)
        for token in ("", "0" * 64):
            # Not even where the memory is.
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                next(lend(request.encode(), metadata=[("authorization", f"Bearer {token}")]))
        shown = [("authorization", f"Bearer {a.transport.source.token}")]
        call = lend(request.encode(), metadata=shown, timeout=30)
        lender, *pieces = (next(call) for _ in range(4))
        assert Lender.decode(lender).begin == a.transport._pool.slots.ctypes.data
        lent = [BlockHeaders.decode(piece).slots.tolist() for piece in pieces]
        assert lent == [slots[:4], slots[4:], []]
        pool = a.transport._pool._pool
        assert all(pool.is_leased(slot) for slot in slots)
        call.cancel()
        end_s = time.monotonic() + 30
        while pool.num_leased():
            assert time.monotonic() < end_s
            time.sleep(0.01)


class HostileLender(block_export.BlockExport):
    """Lends slots with one random fault."""

    def __init__(self, node: Node, chance: random.Random):
        self._node, self._chance = node, chance
        super().__init__(node.transport._pool, HOST, memory=node.transport._memory)

    def _lend(self, data, context):
        messages = list(self._honest(self._keys(data, context)))
        i, fault = self._chance.randrange(1, len(messages)), self._chance.randrange(7)
        headers, slots = messages[i]
        if fault == 0:
            messages[i] = headers, slots[::-1]  # each block has another one's bytes
        elif fault == 1:
            messages[i] = headers, slots + np.uint64(10**6)  # no memory of the pool
        elif fault == 2:
            messages[i] = headers, slots[:-1]
        elif fault == 3:
            messages[i] = headers._replace(checksums=headers.checksums ^ np.uint32(1)), slots
        elif fault == 4:
            messages[i] = headers._replace(keys=key_of(10**6) + headers.keys[32:]), slots
        elif fault == 5:
            messages[i:] = []
        else:
            return  # says nothing at all
        yield Lender(*self._memory.address).encode()
        for headers, slots in messages:
            yield BlockHeaders(*headers, slots).encode()
        yield BlockHeaders(*Headers.of([]), NO_SLOTS).encode()
        ended = threading.Event()
        context.add_callback(ended.set)
        with self._memory.lending():
            ended.wait(10)

    def _honest(self, keys):
        for begin in range(0, len(keys), 2):
            names = keys[begin : begin + 2]
            found = [self._node.pool.find(key) for key in names]
            yield Headers.of(names), np.array(found, np.uint64)


class Headers(NamedTuple):
    """The fields of `BlockHeaders`."""

    keys: bytes
    payers: np.ndarray
    checksums: np.ndarray
    routing_hashes: np.ndarray

    @classmethod
    def of(cls, keys: list[bytes]) -> Headers:
        sums = [checksum(bytes_of(key, LAYOUT.slot_bytes)) for key in keys]
        zeros = np.zeros(len(keys), np.uint64)
        return cls(b"".join(keys), zeros, np.array(sums, np.uint32), zeros)


@nixl_only
def test_whatever_a_lender_says_no_wrong_byte_is_found_and_no_slot_is_lost(nodes):
    a, b = nodes
    put(a.pool, *range(40))
    hostile = HostileLender(a, random.Random(11))
    source = BlockSource(hostile.address, hostile.token)
    try:
        num_short = 0
        for n in range(60):
            names = [(n + i) % 40 for i in range(8)]
            result = b.transport.import_blocks(source, wanted(*names), 10)
            assert sum(b.has(*names)) >= result.num_blocks
            num_short += bool(result.reason)
            assert b.has(10**6) == [False]
            b.pool.drop_cached()
            b.transport._importer._avoided.clear()
        assert num_short == 60
        b.check()
    finally:
        hostile.close()
    names = wanted(*range(8))
    assert b.transport.import_blocks(a.transport.source, names, 10).reason == "", "still usable"


@nixl_only
def test_a_read_that_does_not_end_keeps_its_slots(nodes, monkeypatch):
    a, b = nodes
    put(a.pool, *range(4))
    monkeypatch.setattr(nixl_memory, "_STUCK_S", 0.05)
    agent = b.transport._memory._agent
    monkeypatch.setattr(agent, "transfer", lambda handle: "PROC")
    monkeypatch.setattr(agent, "check_xfer_state", lambda handle: "PROC")
    result = b.transport.import_blocks(a.transport.source, wanted(*range(4)), 10)
    assert (result.num_blocks, result.reason) == (0, "a read takes more than 0.05 s")
    pool = b.transport._pool._pool
    assert pool.num_leased() == 4, "something may still write to them"
    pool.release([slot for slot in range(LAYOUT.num_slots) if pool.is_leased(slot)])


def test_without_the_package_the_option_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ValueError, match=r"peer_transport is nixl, .* install quire\[nixl\]"):
        Node.made(tmp_path / "a", uses_nixl=True)

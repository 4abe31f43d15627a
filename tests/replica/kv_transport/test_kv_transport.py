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
from pool_process import adopt, bytes_of, key_of, open_pool, put

from quire.protos.wire import BlockSource
from quire.replica.kv_transport import block_export, block_messages
from quire.replica.kv_transport.block_messages import (
    METHOD,
    BlockHeaders,
    ExportRequest,
    WantedBlock,
)
from quire.replica.kv_transport.kv_transport import KvTransport
from quire.replica.node_pool.node_pool import NodePool
from quire.replica.node_pool.pool_layout import LAYOUT_VERSION, PoolLayout
from quire.replica.node_pool.slot_checks import checksum

HOST = "127.0.0.1"
LAYOUT = PoolLayout(48, 512)


class Node(NamedTuple):
    """A node's pool, an engine's membership of it, and its transport."""

    pool: NodePool
    transport: KvTransport

    def has(self, *names: int) -> list[bool]:
        """Which blocks an engine of the node can use; each is read and compared."""
        return [adopt(self.pool, name) for name in names]

    def check(self) -> None:
        self.transport.check()
        self.pool.check()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch) -> Iterator[tuple[Node, Node]]:
    # Several pieces, so that an export can end between two.
    monkeypatch.setattr(block_messages, "PIECE_BYTES", 4 * LAYOUT.slot_bytes)
    made = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        pool = open_pool(folder, LAYOUT)
        made.append(Node(pool, KvTransport("test", folder, LAYOUT, HOST)))
    yield made[0], made[1]
    for node in made:
        node.check()
        node.transport.close()
        node.pool.close()


def wanted(*names: int) -> list[WantedBlock]:
    return [WantedBlock(key_of(name)) for name in names]


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


def test_a_block_that_is_damaged_in_the_senders_pool_is_not_sent(nodes):
    a, b = nodes
    slots = put(a.pool, *range(8))
    a.pool.slots[slots[5], 17] ^= 1
    b.transport.import_blocks(a.transport.source, wanted(*range(8)), 10)
    assert b.has(*range(8))[5:] == [False] * 3 and a.pool.counts().damaged == 1


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
            yield BlockHeaders(*message).encode() if isinstance(message, list) else message


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
    read = a.transport._pool.read
    num_read = 0

    def read_slowly(keys):
        nonlocal num_read
        num_read += len(keys)
        if num_read > 20:
            cancelled.set()
        return read(keys)

    a.transport._pool.read = read_slowly
    result = b.transport.import_blocks(a.transport.source, wanted(*range(40)), 10, cancelled)
    assert 0 < result.num_blocks < 40 and result.reason == "it was cancelled"
    assert b.has(*range(40)) == [n < result.num_blocks for n in range(40)]
    b.check()


def test_a_late_import_ends_at_its_time_and_the_next_one_goes_on(nodes):
    a, b = nodes
    put(a.pool, *range(12))
    read, blocked = a.transport._pool.read, threading.Event()
    a.transport._pool.read = lambda keys: blocked.wait(10) and read(keys)
    result = b.transport.import_blocks(a.transport.source, wanted(*range(12)), 0.2)
    assert (result.num_blocks, result.reason[:17]) == (0, "DEADLINE_EXCEEDED")
    blocked.set()
    assert b.transport.import_blocks(a.transport.source, wanted(*range(12)), 10).num_blocks == 12


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
    victim_folder = tmp_path / "victim"
    victim_folder.mkdir()
    child = subprocess.Popen(
        [
            *(sys.executable, Path(__file__).parents[1] / "export_victim.py"),
            *(victim_folder, "40", str(LAYOUT.slot_bytes)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        source = BlockSource(*child.stdout.readline().split())

        def kill() -> None:
            if child.stdout.readline() == "half\n":
                child.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        result = b.transport.import_blocks(source, wanted(*range(40)), 20)
    finally:
        child.kill()
        child.wait()
        killer.join()
    assert result.num_blocks < 40 and "UNAVAILABLE" in result.reason
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

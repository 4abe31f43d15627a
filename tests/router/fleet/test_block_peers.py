"""Which replica pulls from which, at what price, and what the request then says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from routing_fleets import fleet_of, idle

from quire.protos.routing_hash import ROUTING_BLOCK_TOKENS
from quire.protos.wire import BlockSource, CacheEvents, Completion, Frame, Hello, Load
from quire.router.fleet.block_peers import BlockPeers
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.cost import CostPolicy
from quire.router.policy.cost_terms import PULL_OVERHEAD_S
from quire.router.policy.policy import RouteRequest

TOKEN_BYTES = 1000


def hello_of(name: str, node: str, exports: bool = True) -> Hello:
    source = BlockSource(f"{name}:1", f"token of {name}") if exports else BlockSource()
    facts = ["m", "r", "float32", 100, 4096, 8192, 32, [2], {}]
    return Hello(name, "e", *facts, node=node, exports=source, kv_token_bytes=TOKEN_BYTES)


def peers_of(**nodes: str) -> BlockPeers:
    peers = BlockPeers()
    for name, node in nodes.items():
        peers.add(name, hello_of(name, node.strip("-"), exports="-" not in node))
    return peers


def pulls(peers: BlockPeers, **held: float) -> dict[str, tuple[float, str]]:
    """What each replica could pull, and from which."""
    names = list(held)
    on_device = np.array(list(held.values()))
    found = peers.prefixes(names, np.array([on_device / 2, on_device / 2]), 0.0)
    if found is None:
        return {}
    rows = [names[row] for row in found.rows]
    return {n: (t, row) for n, t, row in zip(names, found.tokens, rows, strict=True) if t}


def test_a_replica_pulls_from_the_other_node_that_holds_most():
    peers = peers_of(a="1", b="1", c="2", d="3", off="-2")
    assert pulls(peers, a=640, b=0, c=128, d=256, off=6400) == {
        # `b` shares the pool of `a`, so it does not pull from it. `off` neither exports nor pulls.
        "b": (256, "d"),
        "c": (512, "a"),
        "d": (384, "a"),
    }
    assert pulls(peers, a=0, b=0, c=0, d=0, off=64) == {}
    assert pulls(peers, a=64, b=64, c=64, d=64) == {}
    assert pulls(peers) == {}
    peers.remove("a")
    peers.remove("unknown")
    assert pulls(peers, a=640, c=0, d=64) == {"c": (64, "d")}
    peers.add("d", hello_of("d", "3", exports=False))
    assert pulls(peers, c=0, d=64) == {}


def test_only_replicas_of_one_node_pull_nothing():
    assert pulls(peers_of(a="1", b="1"), a=640, b=0) == {}
    assert pulls(peers_of(a="1"), a=640) == {}


def test_the_price_follows_the_measured_pulls_and_forgets_them():
    peers = peers_of(a="1", b="2")
    prior = peers.s_per_token(0.0)
    assert prior == pytest.approx(TOKEN_BYTES / 0.25e9)
    for _ in range(50):
        done = Completion("stop", 1, 1, 0, pulled_bytes=100 << 20, pull_s=1.0 + PULL_OVERHEAD_S)
        peers.measured(done, 1.0)
    assert peers.s_per_token(1.0) == pytest.approx(TOKEN_BYTES / (100 << 20), rel=0.02)
    assert peers.s_per_token(1000.0) == pytest.approx(prior, rel=0.02)
    peers.measured(Completion("stop", 1, 1, 0), 1000.0)
    assert peers.s_per_token(1000.0) == pytest.approx(prior, rel=0.02)
    # One that failed makes the next ones dearer.
    peers.measured(Completion("stop", 1, 1, 0, pull_s=0.5), 1000.0)
    assert peers.s_per_token(1000.0) > 5 * prior


def test_a_stream_that_has_left_a_replica_pulls_its_blocks_from_that_node():
    peers = peers_of(a="1", a2="1", b="2")
    rows = [idle(gpu_tokens=640), idle()]

    def handed_over(left: str, target: str, num_tokens: int = 4000, is_alive: bool = False):
        fleet = fleet_of(rows, 3000)
        fleet.replicas = [target, "other"]
        ranking = CostPolicy().choose(RouteRequest(3000), fleet.only(0), 0.0, random.Random(0))
        return peers.handover(left, ranking, num_tokens, 0.0, is_alive=is_alive)

    hint = handed_over("a", "b")
    # Not from the one that may be dead, while its node has another.
    assert (hint.source.address, hint.start, hint.end) == ("a2:1", 640, 4000)
    assert hint.max_wait_s == pytest.approx(3360 * 1e-4, rel=1e-3)
    assert handed_over("a", "b", is_alive=True).source.address == "a:1", "it has the newest blocks"
    peers.remove("a2")
    assert handed_over("a", "b").source.address == "a:1", "it drains"
    assert handed_over("b", "b") is handed_over("unknown", "b") is None
    assert handed_over("a", "a2") is None, "it neither exports nor pulls any more"
    assert handed_over("a", "b", num_tokens=660) is None, "computing is faster"
    peers.remove("a")
    assert handed_over("a", "b") is None, "no replica of the node is left"
    peers.add("a3", hello_of("a3", "1"))
    assert handed_over("a", "b").source.address == "a3:1"
    assert handed_over("a", "a3") is None, "it finds them in its own pool"


def test_the_request_names_the_source_and_its_time():
    """Two nodes; `a` holds the prompt and is busy, so `b` gets the request, with a hint to pull from `a`."""
    table = ReplicaTable(PrefixIndex(), attention_context_tokens=1e9)
    hashes = np.arange(1, 101, dtype=np.uint64)
    for name, node in (("a", "1"), ("b", "2")):
        table.add(name, "e")
        table.peers.add(name, hello_of(name, node))
    tokens = len(hashes) * ROUTING_BLOCK_TOKENS
    digest = int(np.bitwise_xor.reduce(hashes))
    busy = Load(queued_prefill_tokens=100_000, prefill_s_per_token=1e-4)
    events = [CacheEvents(1, hashes, np.empty(0, np.uint64))]
    table.on_frame("a", Frame("e", events=events, events_seq=1, digest=digest, load=busy), 0.0)
    table.on_frame("b", Frame("e", load=Load(prefill_s_per_token=1e-4)), 0.0)
    fleet = table.fleet(hashes, tokens + 10, 0.0)
    ranking = CostPolicy().choose(RouteRequest(tokens + 10), fleet, 0.0, random.Random(0))
    best = ranking[0]
    assert (best.replica, best.pull_from, best.pulled_tokens) == ("b", "a", tokens)
    hint = table.peers.hint(ranking)
    assert hint.source == BlockSource("a:1", "token of a") and (hint.start, hint.end) == (0, tokens)
    assert hint.max_wait_s == pytest.approx(tokens * 1e-4, rel=0.01), "as long as it computes"
    booking = table.book(ranking, hashes, tokens + 10, 0.0)
    assert booking.prefill_tokens == 10, "what is pulled is not computed"
    table.end(booking, 0.0)
    table.remove("a")
    assert table.peers.hint(ranking) is None, "the source has gone meanwhile"

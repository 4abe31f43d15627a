"""A request starts with a prefix that another node has computed, and its tokens do not change."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pool_victim import OPTIONS, prompts_of

from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import BlockSource, PullHint
from quire.replica.config import EngineArgs, SizingError, check_args
from quire.replica.engine import Engine
from quire.replica.kv_cache import publishing
from quire.replica.kv_cache.groups import FULL_ATTENTION, LayerGroup
from quire.replica.kv_cache.prefix_entries import ContentChain
from quire.replica.kv_transport.block_messages import WantedBlock
from quire.replica.kv_transport.peer_blocks import wanted_blocks
from quire.replica.node_pool.pool_file import PoolPlace
from quire.replica.serving import peer_pulls
from quire.replica.serving.peer_pulls import PeerPulls
from quire.replica.serving.prompt_publishing import kv_token_bytes

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
BLOCK_SIZE = 32
# Longer than a pull takes on a busy machine.
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    monkeypatch.setattr(peer_pulls, "_MAX_WAIT_S", WAIT_S)
    monkeypatch.setattr(peer_pulls, "_MAX_ENGINE_S", WAIT_S)


def generate(engine: Engine, prompt) -> tuple[list[int], list[int]]:
    """Ids of the prompt and of the answer."""
    (output,) = engine.generate([prompt], GREEDY, progress=False)
    return list(output.prompt_token_ids), list(output.token_ids)


class Node:
    """A node with one engine."""

    def __init__(self, folder: Path):
        folder.mkdir()
        place = PoolPlace("node", folder=folder)
        self.engine = Engine(node_pool=place, **OPTIONS)
        self.pulls = PeerPulls(self.engine, place, "127.0.0.1")

    def pull(self, prompt_ids: list[int], hint: PullHint, namespace: str = ""):
        return asyncio.run(self.pulls.run("request", np.array(prompt_ids), namespace, hint))

    @property
    def num_hit_on_host(self) -> int:
        return self.engine.snapshot()["prefix"]["tokens_hit_on_host"]

    def close(self) -> None:
        self.engine.check()
        self.pulls.transport.check()
        self.pulls.close()
        self.engine.close()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[tuple[Node, Node]]:
    folder = tmp_path_factory.mktemp("nodes")
    made = Node(folder / "a"), Node(folder / "b")
    yield made
    for node in made:
        node.close()
    assert not list(folder.glob("*/*")), "the pools are removed"


def test_a_pulled_prefix_is_restored_and_the_tokens_are_equal(nodes):
    a, b = nodes
    prompts = prompts_of(2)
    for prompt in prompts:
        ids, expected = generate(a.engine, prompt)
        end_s = time.monotonic() + 60
        while a.engine.call(lambda scheduler: len(scheduler.memory.publishing)).result():
            assert time.monotonic() < end_s
            time.sleep(0.01)
        hint = PullHint(a.pulls.source, 0, len(ids), WAIT_S)
        # Another tenant's names are others, so nothing is found.
        assert b.pull(ids, hint, "another tenant").num_blocks == 0
        pulled = b.pull(ids, hint)
        assert (pulled.num_blocks, pulled.reason) == ((len(ids) - 1) // BLOCK_SIZE, "")
        assert pulled.num_bytes == pulled.num_blocks * BLOCK_SIZE * kv_token_bytes(b.engine)
        before = b.num_hit_on_host
        assert generate(b.engine, ids)[1] == expected
        assert b.num_hit_on_host - before == pulled.num_blocks * BLOCK_SIZE


def test_blocks_of_a_running_request_are_published_when_a_peer_asks_for_them(nodes, monkeypatch):
    a, b = nodes
    monkeypatch.setattr(publishing, "_PREFILL_SHARE", 0.0)
    share = a.engine.call(lambda s: s.memory.publishing.max_share).result()
    # About a block in half a second, were it not for the peer.
    a.engine.call(lambda s: setattr(s.memory.publishing, "max_share", 1e-9)).result()
    ids = [7 * i % 997 for i in range(1000)]
    stream = a.engine.stream(ids, dataclasses.replace(GREEDY, max_tokens=2000))
    try:
        next(stream)
        waiting = a.engine.call(lambda s: len(s.memory.publishing)).result()
        num_blocks = (len(ids) - 1) // BLOCK_SIZE
        assert waiting > num_blocks / 2, "the budget has published them already"
        pulled = b.pull(ids, PullHint(a.pulls.source, 0, len(ids), WAIT_S))
        assert next(stream).finish_reason is None, "it still runs"
        assert (pulled.num_blocks, pulled.reason) == (num_blocks, "")
    finally:
        stream.close()
        a.engine.call(lambda s: setattr(s.memory.publishing, "max_share", share)).result()
    before = b.num_hit_on_host
    expected = generate(a.engine, ids)[1]
    assert generate(b.engine, ids)[1] == expected
    assert b.num_hit_on_host - before == num_blocks * BLOCK_SIZE


def test_a_pull_that_fails_or_is_late_only_costs_its_time(nodes):
    a, b = nodes
    ids, expected = generate(a.engine, prompts_of(3)[2])
    before = b.num_hit_on_host
    for source, wait_s in ((a.pulls.source, 0.0), (BlockSource("127.0.0.1:1", "token"), 0.5)):
        pulled = b.pull(ids, PullHint(source, 0, len(ids), wait_s))
        assert pulled.num_blocks == 0 and pulled.reason
    assert generate(b.engine, ids)[1] == expected
    assert b.num_hit_on_host == before


def test_an_aborted_pull_ends_at_once(nodes):
    a, b = nodes
    ids = list(range(1000))

    async def pull_and_abort() -> int:
        hint = PullHint(a.pulls.source, 0, len(ids), 30.0)
        running = asyncio.create_task(b.pulls.run("key", np.array(ids), "", hint))
        waiting = asyncio.create_task(b.pulls.wait_for("key"))
        await asyncio.sleep(0)
        assert b.pulls.abort("key") and not b.pulls.abort("other")
        await waiting
        result = await running
        assert not b.pulls.abort("key")
        return result.num_blocks

    assert asyncio.run(pull_and_abort()) == 0


def test_only_the_blocks_that_the_next_token_sees_are_wanted():
    window = LayerGroup(window=40)
    ids, chain = np.arange(100, dtype=np.int32), ContentChain("tenant")
    digests = [chain.extend(ids[i * 16 : (i + 1) * 16].tobytes()) for i in range(6)]

    def wanted(start: int, end: int, groups) -> list[tuple[int, int, bool]]:
        key = lambda digest, g: digest + bytes([g])  # noqa: E731
        found = wanted_blocks(ids, "tenant", start, end, 16, groups, key)
        assert all(isinstance(block, WantedBlock) for block in found)
        return [(digests.index(b.key[:-1]), b.key[-1], b.is_needed) for b in found]

    assert wanted(0, 50, [FULL_ATTENTION]) == [(i, 0, True) for i in range(3)]
    assert wanted(20, 100, [FULL_ATTENTION]) == [(i, 0, True) for i in range(1, 6)]
    assert wanted(0, 96, [FULL_ATTENTION])[-1] == (5, 0, True)
    assert wanted(0, 80, [FULL_ATTENTION, window]) == [
        *((i, 0, True) for i in range(3)),
        *((2, 1, False), (3, 0, True), (3, 1, False), (4, 0, True), (4, 1, False)),
    ]


def test_an_unknown_transport_is_refused():
    check_args(EngineArgs(peer_transport="nixl"))
    with pytest.raises(SizingError, match="peer_transport must be one of off, grpc, nixl"):
        check_args(EngineArgs(peer_transport="pigeon"))

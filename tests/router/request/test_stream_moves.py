"""KV goes where streams go: with a stream that leaves a draining replica, and to a replica that joins.

Real actors, engines, pools and transports, and the real bus, without Ray.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
import ray
from local_serve import LocalReplica, start_replica, until

from quire.protos.wire import Submit
from quire.replica.core.request import Request
from quire.replica.kv_cache import publishing
from quire.replica.kv_transport import block_export
from quire.replica.node_pool.pool_file import PoolPlace
from quire.replica.request_table.rows import RowTable
from quire.replica.scheduler.admission import Admission, Offer
from quire.replica.serving import actor as actor_module
from quire.replica.serving import ahead_restores, peer_pulls
from quire.replica.serving.ahead_restores import NO_ROUTER
from quire.router.fleet import block_peers
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import Ranking
from quire.router.request import hand_over
from quire.router.request.hand_over import HandOver
from quire.router.transport import newcomers
from quire.router.transport.bus import Bus
from quire.router.transport.transport import Attempt
from tests.router.request.test_service import (
    GREEDY,
    SAMPLED,
    TOKENIZER,
    expected,
    read,
    reference,
    stack_of,
)

__all__ = ["reference"]  # a fixture
BLOCK_SIZE = 16
OPTIONS = dict(
    model="embedded",
    device="cpu",
    num_blocks=256,
    block_size=BLOCK_SIZE,
    max_batch_tokens=256,
    max_model_len=1024,
    num_threads=1,
    node_pool_gib=0.03,
    restore="always",
    peer_transport="grpc",
)


def story(number: int) -> str:
    """About 500 tokens."""
    return "".join(f"Clerk {number} binds sheet {i * i} of {i}. " for i in range(28))


@pytest.fixture
def nodes(request, runner, monkeypatch, tmp_path) -> Iterator[list[LocalReplica]]:
    """Two replicas, each with the pool of its own node. Their engines publish nothing by themselves.

    The parameter has the node of each replica: with "aa" both are on the node "a".
    """
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(publishing, "_PREFILL_SHARE", 0.0)
    # However slow the machine is, a request waits for its blocks.
    monkeypatch.setattr(block_peers, "_LEAST_WAIT_S", 60.0)
    monkeypatch.setattr(hand_over, "MAX_AHEAD_S", 60.0)
    monkeypatch.setattr(newcomers, "_MAX_S", 60.0)
    # Else it computes a block and a half again, because that is faster than a call; or all, after a slow pull.
    monkeypatch.setattr(block_peers, "PULL_OVERHEAD_S", 0.0)
    monkeypatch.setattr(block_peers.BlockPeers, "measured", lambda peers, completion, now_s: None)
    monkeypatch.setattr(peer_pulls, "_MAX_WAIT_S", 60.0)
    monkeypatch.setattr(peer_pulls, "_MAX_ENGINE_S", 60.0)
    monkeypatch.setattr(block_export, "_MAX_PUBLISH_S", 60.0)
    monkeypatch.setattr(ahead_restores, "_MAX_S", 60.0)
    # These prompts take a tenth of a second to compute, if that is known.
    monkeypatch.setattr(hand_over, "_MIN_RESTORED_S", -1.0)

    async def start(name: str, node: str) -> LocalReplica:
        (tmp_path / node).mkdir(exist_ok=True)
        place = PoolPlace("node", folder=tmp_path / node)
        monkeypatch.setattr(actor_module, "_pool_place", lambda app_name: place)
        replica = await start_replica(name, monkeypatch, **OPTIONS)
        replica.actor._node = node
        replica.engine.call(lambda s: setattr(s.memory.publishing, "max_share", 1e-9)).result()
        return replica

    async def start_all() -> list[LocalReplica]:
        node_names = getattr(request, "param", "ab")
        return [await start(name, node) for name, node in zip("abc", node_names, strict=False)]

    replicas = runner.run(start_all())
    yield replicas
    for replica in replicas:
        replica.actor._pulls.transport.check()
        replica.actor._pulls.close()
        replica.engine.close()


def is_ahead(key: object) -> bool:
    """Whether this is a key of a request that only brings blocks to the device."""
    return isinstance(key, tuple) and key[0] == NO_ROUTER


@pytest.fixture
def computed(monkeypatch) -> dict[object, int]:
    """Key of a router's request to the tokens that an engine computes at its begin."""
    found: dict[object, int] = {}
    claim = RowTable.claim

    def recorded_claim(rows: RowTable, request: Request, *args) -> int:
        row = claim(rows, request, *args)
        if not is_ahead(request.key):
            found[request.key] = request.num_tokens - int(rows.num_computed[row])
        return row

    monkeypatch.setattr(RowTable, "claim", recorded_claim)
    return found


@pytest.fixture
def restored(monkeypatch) -> Counter[object]:
    """Key of a request to the blocks that its admission copies to the device."""
    found: Counter[object] = Counter()
    take = Admission.take

    def recorded_take(admission: Admission, request: Request, offer: Offer) -> None:
        found[request.key] += len(offer.hit.to_restore())
        take(admission, request, offer)

    monkeypatch.setattr(Admission, "take", recorded_take)
    return found


def recorded_submits(bus: Bus, monkeypatch) -> list[Submit]:
    """The requests that the bus sends to replicas from now on."""
    submits: list[Submit] = []

    def submit(request: Submit, route: list[str]) -> Attempt:
        submits.append(request)
        return type(bus).submit(bus, request, route)

    monkeypatch.setattr(bus, "submit", submit)
    return submits


def assert_is_whole(answer, reference) -> None:
    """Assert that 400 greedy tokens after `story(3)` are those of an engine alone."""
    whole = expected(reference, story(3), **(GREEDY | dict(max_tokens=400)))
    assert answer.token_ids == whole.token_ids


def recorded_pulls(bus: Bus, monkeypatch) -> list[str]:
    """The replicas that the bus lets pull blocks from now on."""
    pulled: list[str] = []

    async def pull(submit: Submit, replica: str) -> bool:
        pulled.append(replica)
        return await type(bus).pull(bus, submit, replica)

    monkeypatch.setattr(bus, "pull", pull)
    return pulled


@pytest.mark.parametrize("nodes", ["ab", "aa"], indirect=True, ids=["other node", "same node"])
def test_a_drained_stream_takes_its_blocks_along(runner, nodes, reference, computed, restored):
    prompts, params = [story(number) for number in range(4)], [GREEDY, SAMPLED]
    params = [params[i % 2] | dict(max_tokens=300) for i in range(4)]

    async def run() -> None:
        async with stack_of(nodes) as stack:
            bus, submits = stack.cluster.bus, []
            bus.drain_timeout_s = 0.0

            def submit(request: Submit, route: list[str]):
                submits.append((request, route[0]))
                return type(bus).submit(bus, request, route)

            stack.cluster.bus.submit = submit
            opened = await asyncio.gather(
                *(stack.open(p, **fields) for p, fields in zip(prompts, params, strict=True))
            )
            left = submits[0][1]
            target = next(replica for replica in nodes if replica.name != left)
            moving = [i for i, (_, name) in enumerate(submits) if name == left]
            stack.cluster.membership.update(frozenset({target.name}))
            answers = await asyncio.gather(*(read(stream) for stream in opened))
            for prompt, fields, answer in zip(prompts, params, answers, strict=True):
                assert answer.token_ids == expected(reference, prompt, **fields).token_ids
            moved = [request for request, name in submits[4:] if name == target.name]
            assert len(moved) == len(moving) > 0
            again = [computed[stack.cluster.router_id, r.stream_id] for r in moved]
            # The last one that has tokens, and one that it may fill between the last copy and its end.
            assert max(again) <= 2 * BLOCK_SIZE
            # All was copied while it ran, so it waits for no pull, and for no copy to the device.
            assert all(request.pull is None for request in moved)
            # A neighbour may have published a few more blocks since.
            own = [restored[stack.cluster.router_id, r.stream_id] for r in moved]
            assert max(own) < 448 // BLOCK_SIZE
            ahead = [count for key, count in restored.items() if is_ahead(key)]
            assert len(ahead) == len(moved) and min(ahead) >= 448 // BLOCK_SIZE
            assert len(stack.observer.moves) == len(moved)
            # What `explain` says of them is what they have had there.
            for i in moving:
                explain = answers[i].stream.explain
                prompt = submits[i][0].prompt_ids.tolist()
                (request,) = [r for r in moved if r.prompt_ids[: len(prompt)].tolist() == prompt]
                num_known = (
                    len(request.prompt_ids) - computed[stack.cluster.router_id, request.stream_id]
                )
                assert explain.answered_attempt == explain.attempts == 2
                assert explain.cached_tokens == min(num_known, len(prompt)) > 0

    runner.run(run())


@pytest.mark.parametrize("nodes", ["ab", "aa"], indirect=True, ids=["other node", "same node"])
def test_a_stream_that_is_soon_computed_leaves_without_a_restore(
    runner, nodes, reference, restored, monkeypatch
):
    monkeypatch.setattr(hand_over, "_MIN_RESTORED_S", 3600.0)

    async def run() -> None:
        async with stack_of(nodes) as stack:
            stack.cluster.bus.drain_timeout_s = 0.0
            stream = await stack.open(story(3), max_tokens=400)
            pulled = recorded_pulls(stack.cluster.bus, monkeypatch)
            target = next(r for r in nodes if r.name != stream.explain.replica)
            stack.cluster.membership.update(frozenset({target.name}))
            answer = await read(stream)
            assert_is_whole(answer, reference)
            assert answer.stream.explain.replica == target.name
            assert not any(map(is_ahead, restored))
            is_near = nodes[0].actor._node == nodes[1].actor._node
            assert pulled == ([] if is_near else [target.name] * 2)

    runner.run(run())


@pytest.mark.parametrize("nodes", ["abc"], indirect=True)
def test_a_stream_goes_where_its_blocks_are_though_the_next_decision_is_another(
    runner, nodes, reference, monkeypatch
):
    """Else its new replica would copy them again, while the client waits."""

    async def run() -> None:
        async with stack_of(nodes) as stack:
            service, bus = stack.service, stack.cluster.bus
            bus.drain_timeout_s = 0.0
            stream = await stack.open(story(3), max_tokens=400)
            left = stream.explain.replica
            others = [replica for replica in nodes if replica.name != left]
            # Each decision is for another replica than the one before.
            service.policy = make_policy("round_robin")
            pulled = recorded_pulls(bus, monkeypatch)
            stack.cluster.membership.update(frozenset(replica.name for replica in others))
            answer = await read(stream)
            assert_is_whole(answer, reference)
            assert len(set(pulled)) == 1
            assert answer.stream.explain.replica == pulled[0]

    runner.run(run())


@pytest.mark.parametrize("nodes", ["abc"], indirect=True)
def test_a_drained_stream_goes_to_the_replacement_that_is_listed_at_the_same_moment(
    runner, nodes, reference, monkeypatch
):
    """Serve drains a node's replicas in the moment in which their replacements are ready."""

    async def run() -> None:
        async with stack_of(nodes) as stack:
            bus, policy = stack.cluster.bus, stack.service.policy
            bus.drain_timeout_s = 0.0
            submits = recorded_submits(bus, monkeypatch)
            stack.cluster.membership.update(frozenset("ab"))
            stream = await stack.open(story(3), max_tokens=400)
            left = stream.explain.replica
            assert left in ("a", "b")

            class Idle:
                """The one that joins is best."""

                def choose(self, request, fleet, now_s, rng) -> Ranking:
                    return policy.choose(request, fleet, now_s, rng).led_by("c")

            stack.service.policy = Idle()
            stack.cluster.membership.update(frozenset("abc") - {left})
            answer = await read(stream)
            assert_is_whole(answer, reference)
            assert answer.stream.explain.replica == "c"
            assert submits[-1].pull is None, "it has got its blocks ahead"

    runner.run(run())


@pytest.mark.parametrize("nodes", ["abc"], indirect=True)
@pytest.mark.parametrize("late", [False, True], ids=["while it decodes", "when it leaves"])
def test_a_stream_passes_over_a_replica_that_has_its_blocks_and_no_room(
    runner, nodes, reference, computed, monkeypatch, late
):
    """A replica that joins serves it sooner. It gets the blocks ahead too, or pulls them from the first."""
    copy_ahead, is_crowded = HandOver.copy_ahead, not late

    async def crowded_after(hand_over: HandOver, attempt: Attempt) -> None:
        nonlocal is_crowded
        await copy_ahead(hand_over, attempt)
        is_crowded = True

    monkeypatch.setattr(HandOver, "copy_ahead", crowded_after)

    async def run() -> None:
        async with stack_of(nodes) as stack:
            bus, policy = stack.cluster.bus, stack.service.policy
            bus.drain_timeout_s = 0.0
            submits = recorded_submits(bus, monkeypatch)
            stream = await stack.open(story(3), max_tokens=400)
            left = stream.explain.replica
            pulled = recorded_pulls(bus, monkeypatch)

            class Crowded:
                """The first replica that has got blocks is crowded, by an hour."""

                def choose(self, request, fleet, now_s, rng) -> Ranking:
                    ranking = policy.choose(request, fleet, now_s, rng)
                    crowded = pulled[:1] if is_crowded else []
                    ranking.terms[:, 0] += [3600.0 * (n in crowded) for n in ranking.names()]
                    (best, *_) = sorted(ranking, key=lambda score: sum(score.terms.values()))
                    return ranking.led_by(best.replica)

            stack.service.policy = Crowded()
            others = frozenset(replica.name for replica in nodes if replica.name != left)
            stack.cluster.membership.update(others)
            answer = await read(stream)
            assert_is_whole(answer, reference)
            first, last = pulled[0], answer.stream.explain.replica
            assert {first, last} == others
            request = submits[-1]
            if late:
                (passed_over,) = (replica for replica in nodes if replica.name == first)
                assert request.pull.source == passed_over.actor._pulls.source
            else:
                assert request.pull is None and pulled[-1] == last
            assert computed[stack.cluster.router_id, request.stream_id] <= 3 * BLOCK_SIZE

    runner.run(run())


def test_a_stream_gets_further_credit_while_its_replica_drains(runner, nodes, reference):
    """So it stays until its end, or until the end of `drain_timeout_s`."""

    async def run() -> None:
        async with stack_of(nodes) as stack:
            bus = stack.cluster.bus
            bus.drain_timeout_s, bus.credit_tokens = 3600.0, 64
            stream = await stack.open(story(3), max_tokens=400)
            target = next(r for r in nodes if r.name != stream.explain.replica)
            stack.cluster.membership.update(frozenset({target.name}))
            answer = await read(stream)
            assert answer.stream.explain.attempts == 1
            assert_is_whole(answer, reference)

    runner.run(run())


def test_what_did_not_come_ahead_is_pulled_by_the_request(
    runner, nodes, reference, computed, monkeypatch
):
    async def run() -> None:
        async with stack_of(nodes) as stack:
            bus, submits = stack.cluster.bus, recorded_submits(stack.cluster.bus, monkeypatch)
            bus.drain_timeout_s = 0.0

            async def failing_pull(submit: Submit, replica: str) -> bool:
                return False

            monkeypatch.setattr(bus, "pull", failing_pull)
            stream = await stack.open(story(3), max_tokens=400)
            target = next(r for r in nodes if r.name != stream.explain.replica)
            stack.cluster.membership.update(frozenset({target.name}))
            answer = await read(stream)
            assert_is_whole(answer, reference)
            request = submits[-1]
            assert request.pull is not None and request.pull.start == 0
            assert computed[stack.cluster.router_id, request.stream_id] <= BLOCK_SIZE

    runner.run(run())


@pytest.mark.parametrize("nodes", ["aa"], indirect=True)
def test_a_drained_stream_of_a_node_leaves_though_its_last_blocks_are_not_published(
    runner, nodes, reference, restored, monkeypatch
):
    """The pool may have no room. What is there is restored ahead of the stream."""

    async def run() -> None:
        async with stack_of(nodes) as stack:
            bus, asked = stack.cluster.bus, []
            bus.drain_timeout_s = 0.0

            async def failing_publish(submit: Submit, replica: str) -> bool:
                asked.append(replica)
                return False

            monkeypatch.setattr(bus, "publish", failing_publish)
            stream = await stack.open(story(3), max_tokens=400)
            left = stream.explain.replica
            target = next(r for r in nodes if r.name != left)
            stack.cluster.membership.update(frozenset({target.name}))
            answer = await read(stream)
            assert_is_whole(answer, reference)
            assert answer.stream.explain.attempts == 2
            assert asked == [left, left], "before each of two rounds"
            assert any(map(is_ahead, restored))

    runner.run(run())


def test_a_target_that_does_not_answer_holds_no_stream(runner, nodes, reference, monkeypatch):
    monkeypatch.setattr(hand_over, "MAX_AHEAD_S", 0.2)

    async def hang(submit: bytes, *, route: list[str]) -> bytes:
        await asyncio.sleep(1000)
        raise AssertionError

    async def run() -> None:
        async with stack_of(nodes) as stack:
            stack.cluster.bus.drain_timeout_s = 0.0
            stream = await stack.open(story(3), max_tokens=400)
            target = next(r for r in nodes if r.name != stream.explain.replica)
            monkeypatch.setattr(target.actor, "pull", hang)
            stack.cluster.membership.update(frozenset({target.name}))
            answer = await read(stream)
            assert_is_whole(answer, reference)
            assert answer.stream.explain.attempts == 2
            # The bus gives the call up when its router does.
            for call in [c for c in target.calls if c.get_name() == "pull"]:
                call.cancel()

    runner.run(run())


def test_a_replica_that_joins_holds_what_others_share_before_its_first_request(
    runner, nodes, reference, computed
):
    """A system prompt that several requests had; a prompt that only one had stays where it is."""
    system, (first, second) = story(7), nodes

    async def run() -> None:
        async with stack_of(nodes) as stack:
            membership, transport = stack.cluster.membership, second.actor._pulls.transport
            membership.update(frozenset({first.name}))
            await until(lambda: second.name not in stack.cluster.table, 60)
            for number in range(4):
                await stack.answer(f"{system}Question {number}: ", max_tokens=4)
            await stack.answer(story(8), max_tokens=4)
            assert not transport.num_imported
            membership.update(frozenset({first.name, second.name}))
            shared = len(TOKENIZER.encode(system)) // 64 * 64
            await until(lambda: transport.num_imported == shared // BLOCK_SIZE, 60)
            # The other one is busy with something else, or has gone.
            membership.update(frozenset({second.name}))
            await until(lambda: first.name not in stack.cluster.table, 60)
            for prompt, most in ((f"{system}A last question: ", 100), (story(8), 600)):
                computed.clear()
                answer = await stack.answer(prompt)
                (num_computed,) = computed.values()
                assert most / 6 < num_computed < most
                assert answer.token_ids == expected(reference, prompt, **GREEDY).token_ids
            assert transport.num_imported == shared // BLOCK_SIZE

    runner.run(run())

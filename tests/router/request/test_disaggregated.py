"""Policy `disaggregated`: a prefill replica computes a prompt, and the stream continues on a replica that decodes.

Real actors, engines, pools and transports, and the real bus, without Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import ray
from local_serve import LocalReplica, perfect, start_replica, until

from quire.protos.wire import Frame
from quire.replica.core.request import Request
from quire.replica.kv_cache import publishing
from quire.replica.node_pool.pool_file import PoolPlace
from quire.replica.request_table.rows import RowTable
from quire.replica.serving import actor as actor_module
from quire.router.admission.fair_queue import TOKENS_PER_GENERATED
from quire.router.fleet import block_peers
from quire.router.fleet.prefill_speeds import MeasuredSpeed
from quire.router.policy.by_name import make_policy
from quire.router.request import hand_over
from tests.router.request.test_service import (
    GREEDY,
    SAMPLED,
    TOKENIZER,
    Records,
    Stack,
    expected,
    read,
    reference,
    stack_of,
)
from tests.router.request.test_stream_moves import BLOCK_SIZE, OPTIONS, story

__all__ = ["reference"]  # a fixture
# By the hash of its name the first one is the prefill replica of any two of them.
PREFILL, NEIGHBOUR, DISTANT = "c", "a", "b"


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def take_equal_speed(speed: MeasuredSpeed, s_per_token: float, now_s: float) -> None:
    speed.s_per_work, speed.measured_s = 1e-4, now_s


@pytest.fixture(scope="module")
def started(runner, patch, tmp_path_factory) -> Iterator[dict[str, LocalReplica]]:
    """Two replicas of one node, and one of another. Their engines publish nothing by themselves."""
    patch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    patch.setattr(publishing, "_PREFILL_SHARE", 0.0)
    # Copies are priced below computing, and waited for, however slow the machine is.
    patch.setattr(block_peers, "_LEAST_WAIT_S", 60.0)
    patch.setattr(block_peers, "PULL_OVERHEAD_S", 0.0)
    patch.setattr(block_peers, "_PRIOR_BYTES_PER_S", 1e12)
    # The replicas are equally fast, though one has had prompts of one token only, which take longer for each token.
    patch.setattr(MeasuredSpeed, "take", take_equal_speed)
    folder = tmp_path_factory.mktemp("nodes")

    async def start(name: str, node: str) -> LocalReplica:
        (folder / node).mkdir(exist_ok=True)
        place = PoolPlace("node", folder=folder / node)
        patch.setattr(actor_module, "_pool_place", lambda app_name: place)
        replica = await start_replica(name, patch, **OPTIONS)
        replica.actor._node = node
        replica.engine.call(lambda s: setattr(s.memory.publishing, "max_share", 1e-9)).result()
        return replica

    async def start_all() -> list[LocalReplica]:
        nodes = {PREFILL: "one", NEIGHBOUR: "one", DISTANT: "two"}
        return [await start(name, node) for name, node in nodes.items()]

    replicas = runner.run(start_all())
    yield {replica.name: replica for replica in replicas}
    for replica in replicas:
        replica.actor._pulls.transport.check()
        replica.actor._pulls.close()
        replica.engine.close()


@pytest.fixture
def replicas(started) -> Iterator[dict[str, LocalReplica]]:
    yield started
    for replica in started.values():
        replica.dead, replica.network = False, perfect
        replica.engine.call(lambda scheduler: scheduler.clear_cache()).result()


@pytest.fixture
def held(monkeypatch) -> list[int]:
    """The tokens that need not be computed, of each request that an engine begins."""
    found: list[int] = []
    claim = RowTable.claim

    def recorded_claim(rows: RowTable, request: Request, *args) -> int:
        row = claim(rows, request, *args)
        found.append(int(rows.num_computed[row]))
        return row

    monkeypatch.setattr(RowTable, "claim", recorded_claim)
    # These prompts take a tenth of a second to compute, if that is known.
    monkeypatch.setattr(hand_over, "_MIN_RESTORED_S", -1.0)
    return found


class Prefills(Records):
    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[str] = []
        self.stalls: list[float] = []

    def on_prefill(self, outcome: str) -> None:
        self.outcomes.append(outcome)

    def on_handover(self, stall_s: float) -> None:
        self.stalls.append(stall_s)


@asynccontextmanager
async def split_stack(replicas: dict[str, LocalReplica], decode: str) -> AsyncIterator[Stack]:
    """A router over the prefill replica and another one, on which a stream runs whose client does not read."""
    async with stack_of([replicas[PREFILL], replicas[decode]]) as stack:
        stack.cluster.table.prefill_pool.share = 0.25
        # The other stream's delay weighs more than anything else.
        stack.service.policy = make_policy("disaggregated", eta=1e6)
        stack.observer = stack.service.observer = Prefills()
        stack.cluster.bus.credit_tokens = 16
        other = await stack.open("A", max_tokens=400)
        stack.cluster.bus.credit_tokens = None
        assert other.explain.replica == decode
        try:
            yield stack
        finally:
            await other.aclose()


@pytest.mark.parametrize(
    ("decode", "params"),
    [(NEIGHBOUR, SAMPLED), (DISTANT, GREEDY)],
    ids=["same node", "other node"],
)
def test_a_stream_moves_after_its_first_token_and_its_prompt_is_computed_once(
    runner, replicas, reference, held, decode, params
):
    prompt, params = story(len(params)), params | dict(max_tokens=100)
    num_tokens = len(TOKENIZER.encode(prompt))

    async def run() -> None:
        async with split_stack(replicas, decode) as stack:
            charged, charge = [], stack.service.gate.charge
            stack.service.gate.charge = lambda payer, tokens: charged.append((payer, tokens))
            held.clear()
            stream = await stack.open(prompt, tenant="one", **params)
            assert stream.explain.replica == PREFILL
            answer = await read(stream)
            stack.service.gate.charge = charge
            # The second one brings the blocks to the device, while the first one still runs.
            on_prefill, ahead, on_decode = held
            assert answer.token_ids == expected(reference, prompt, **params).token_ids
            assert on_prefill == 0 and num_tokens - min(ahead, on_decode) <= BLOCK_SIZE
            assert stack.observer.outcomes == ["moved"] and not stack.observer.moves
            assert len(stack.observer.stalls) == 1
            assert (answer.stream.explain.attempts, answer.stream.explain.num_handovers) == (2, 1)
            usage = answer.stream.usage
            assert (usage.prompt_tokens, usage.cached_tokens) == (num_tokens, 0)
            paid = sum(tokens for payer, tokens in charged if payer == "one")
            assert paid == num_tokens + TOKENS_PER_GENERATED * usage.completion_tokens
            first, second = stack.service.ring.find("test")[1:]
            assert first["policy"] == "disaggregated" and second["left_replica"] == PREFILL
            assert first["ranking"][0]["terms"]["handover_s"] > 0
            assert [one["ranking"][0]["replica"] for one in (first, second)] == [PREFILL, decode]

    runner.run(run())


def test_the_next_turn_and_a_short_prompt_go_to_the_replica_that_decodes(
    runner, replicas, reference
):
    async def run() -> None:
        async with split_stack(replicas, NEIGHBOUR) as stack:
            stack.service.policy = make_policy("disaggregated")
            short = await stack.answer("B", max_tokens=2)
            stack.service.policy = make_policy("disaggregated", eta=1e6)
            first = await stack.answer(story(3), max_tokens=100)
            stack.service.policy = make_policy("disaggregated")
            turn = f"{story(3)}{first.text} More?"
            second = await stack.answer(turn, max_tokens=20)
            assert [a.stream.explain.attempts for a in (short, first, second)] == [1, 2, 1]
            assert second.stream.explain.replica == NEIGHBOUR
            assert second.stream.usage.cached_tokens >= 448
            whole = expected(reference, turn, **(GREEDY | dict(max_tokens=20)))
            assert second.token_ids == whole.token_ids

    runner.run(run())


def test_choices_of_one_prompt_move_too(runner, replicas, reference):
    params = SAMPLED | dict(max_tokens=60)

    async def run() -> None:
        async with split_stack(replicas, NEIGHBOUR) as stack:
            stream = await stack.open(story(4), n=2, **params)
            found: dict[int, list[int]] = {0: [], 1: []}
            async for delta in stream:
                found[delta.choice] += delta.token_ids
            assert stack.observer.outcomes == ["moved", "moved"]
            assert found[0] == expected(reference, story(4), **params).token_ids
            second = expected(reference, story(4), **params, choice=1)
            assert found[1] == second.token_ids

    runner.run(run())


def hold(replica: LocalReplica) -> None:
    """The replica's frames do not arrive any longer."""

    async def nothing(frame: Frame) -> list[Frame | bytes]:
        return []

    replica.network = nothing


def test_a_prompt_whose_prefill_replica_dies_is_computed_elsewhere(runner, replicas, reference):
    async def run() -> None:
        async with split_stack(replicas, NEIGHBOUR) as stack:
            prefill = replicas[PREFILL]
            hold(prefill)
            opened = asyncio.create_task(stack.open(story(5), max_tokens=40))
            await until(lambda: prefill.actor._finished)
            await prefill.die()
            answer = await read(await opened)
            whole = expected(reference, story(5), **(GREEDY | dict(max_tokens=40)))
            assert answer.token_ids == whole.token_ids
            assert answer.stream.explain.replica == NEIGHBOUR
            assert stack.observer.outcomes == ["failed"]
            stack.cluster.membership.update(frozenset({NEIGHBOUR}))

    runner.run(run())


@pytest.mark.parametrize("problem", ["it hangs", "it has no room", "the other one leaves"])
def test_a_stream_stays_if_its_blocks_cannot_be_moved(
    runner, replicas, reference, monkeypatch, problem
):
    monkeypatch.setattr(hand_over, "MAX_AHEAD_S", 0.01)
    asked = asyncio.Event()

    async def publish(submit: bytes, *, route: list[str]) -> bool:
        asked.set()
        if problem == "it hangs":
            await asyncio.sleep(1000)
        return problem == "the other one leaves"

    async def run() -> None:
        async with split_stack(replicas, NEIGHBOUR) as stack:
            prefill = replicas[PREFILL]
            monkeypatch.setattr(prefill.actor, "publish", publish)
            stream = await stack.open(story(6), max_tokens=60)
            if problem == "the other one leaves":
                stack.cluster.membership.update(frozenset({PREFILL}))
            answer = await read(stream)
            whole = expected(reference, story(6), **(GREEDY | dict(max_tokens=60)))
            assert answer.token_ids == whole.token_ids
            if problem != "the other one leaves":
                assert asked.is_set() and stack.observer.outcomes == ["stayed"]
                assert answer.stream.explain.replica == PREFILL
            for call in [c for c in prefill.calls if c.get_name() == "publish"]:
                call.cancel()

    runner.run(run())


def test_a_client_that_leaves_ends_the_prefill(runner, replicas):
    """`Stack` checks at its end that no replica has anything left."""

    async def run() -> None:
        async with split_stack(replicas, NEIGHBOUR) as stack:
            prefill = replicas[PREFILL]
            hold(prefill)
            opened = asyncio.create_task(stack.open(story(7), max_tokens=40))
            await until(lambda: prefill.actor._finished)
            opened.cancel()
            await until(lambda: not prefill.actor._finished)
            assert opened.cancelled() or isinstance(opened.exception(), asyncio.CancelledError)
            assert stack.observer.outcomes == []
            prefill.network = perfect

    runner.run(run())

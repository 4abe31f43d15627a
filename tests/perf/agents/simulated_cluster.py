"""Routers and replicas in virtual time: an event loop that jumps to its next timer, so no core of this machine matters.

The scheduler, the prefix cache and the host tier of each replica, the routers' table and index, and the policy are the
product's. The device is that of `paced_replica`. A message between a router and a replica takes `NETWORK_S`. With a
`Network` each replica is on a node of its own, with the node's pool as its host tier, and pulls what a router's hint
names (`simulated_nodes.py`). There is no admission, no text and no failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import selectors
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from quire.cluster.bench.load.clients import Answer, RequestFailed
from quire.protos.routing_hash import RoutingHasher
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import LEASE_S, Completion, Frame, TokenDelta
from quire.replica.config import EngineConfig
from quire.replica.core.delta_batch import DeltaBatch
from quire.replica.core.request import Request
from quire.replica.kv_transport.block_import import ImportResult
from quire.replica.scheduler.scheduler import Scheduler
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import RouteRequest
from quire.router.transport.bus import LEASE_RENEWALS
from tests.perf.agents.simulated_nodes import Network, SimulatedNode, SimulatedTransport
from tests.perf.cluster.paced_replica import Pace, PacedRunner

NETWORK_S = 0.001
HEARTBEAT_S = 0.5
# A router tells replicas so often what they need not retain any longer.
RENEWAL_S = LEASE_S / LEASE_RENEWALS
T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Adds the time for which the loop would sleep to `now_s`, instead of sleeping."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("every task waits, and no timer is left")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while every task sleeps."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, as `asyncio.run` does, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


class SimulatedReplica:
    """A scheduler and its device, in the order of `quire.replica.loop`.

    Parameters
    ----------
    node
        Its pool is the host tier; None: the host tier is private.

    Attributes
    ----------
    transport
        Exports and pulls blocks; None: it doesn't.
    """

    def __init__(
        self, name: str, config: EngineConfig, pace: Pace, node: SimulatedNode | None = None
    ):
        self.name = name
        self._loop = asyncio.get_running_loop()
        self.scheduler = Scheduler(config, node_pool=None if node is None else node.join())
        publishing, blocks = self.scheduler.memory.publishing, self.scheduler.memory.host.blocks
        if publishing is not None:
            # The host's own time counts for nothing here, so a run on a busy machine is the same.
            publishing._clock = blocks._clock = self._loop.time
        self.on_frame: list[Callable[[str, Frame], None]] = []
        self.transport: SimulatedTransport | None = None
        self._block_s = pace.copied_block_s
        text_ids = np.arange(300, 400)
        self._runner = PacedRunner(text_ids, config.block_size, pace, self._loop.time)
        self._mail: deque[Request] = deque()
        self._wake = asyncio.Event()
        self._answers: dict[Any, asyncio.Queue[TokenDelta]] = {}

    def submit(self, request: Request, answer: asyncio.Queue[TokenDelta]) -> None:
        """Queue a request; its deltas go to `answer`."""
        self._answers[request.key] = answer
        self._mail.append(request)
        self.wake()

    def wake(self) -> None:
        """Let an idle engine look for work."""
        self._wake.set()

    async def run(self) -> None:
        """Run steps without end; one is launched while another one runs."""
        scheduler, in_flight = self.scheduler, deque()
        while True:
            while self._mail:
                refused = scheduler.add(self._mail.popleft())
                assert refused is None
            plan = scheduler.plan(self._loop.time())
            if plan is not None:
                in_flight.append(self._runner.launch(plan))
            if in_flight and (plan is None or len(in_flight) > 1):
                step = in_flight.popleft()
                await asyncio.sleep(max(0.0, step.ends_s - self._loop.time()))
                result = self._runner.result(step)
                self._send(scheduler.commit(step.plan, result, self._loop.time()))
            elif plan is None:
                self._send(DeltaBatch(scheduler.take_ended()))
                scheduler.check_idle()
                pairs = scheduler.plan_idle_copies()
                await asyncio.sleep(len(pairs) * self._block_s)
                scheduler.end_idle_copies()
                if not len(pairs) and not self._mail:
                    await self._sleep(scheduler.next_deadline_s())

    async def _sleep(self, until_s: float | None) -> None:
        """Sleep until something changes; None: until mail comes."""
        self._wake.clear()
        seconds = None if until_s is None else max(0.0, until_s - self._loop.time())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    async def send_heartbeats(self) -> None:
        """Report the load when no step does."""
        while True:
            self._send(DeltaBatch([]))
            await asyncio.sleep(HEARTBEAT_S)

    def _send(self, deltas: DeltaBatch) -> None:
        events = self.scheduler.events
        batch = events.flush()
        frame = Frame(
            events.epoch,
            events=[] if batch is None else [batch],
            events_seq=events.seq,
            digest=events.digest,
            load=self.scheduler.load(),
        )
        for on_frame in self.on_frame:
            self._loop.call_later(NETWORK_S, on_frame, self.name, frame)
        for delta in deltas:
            # After the frame, as in the bus.
            self._loop.call_later(NETWORK_S, self._answers[delta.key].put_nowait, delta)
            if delta.finish_reason is not None:
                del self._answers[delta.key]


class SimulatedRouter:
    """A router's view of the replicas, and its policy."""

    def __init__(self, replicas: Sequence[SimulatedReplica], policy: str, seed: int):
        self._loop = asyncio.get_running_loop()
        self._replicas = {replica.name: replica for replica in replicas}
        self._policy = make_policy(policy)
        self._rng = random.Random(seed)
        self._table = ReplicaTable(PrefixIndex())
        # Replica and key of each session's last turn, if its blocks are retained.
        self._retained: dict[str, tuple[SimulatedReplica, int]] = {}
        for replica in replicas:
            config, epoch = replica.scheduler.config, replica.scheduler.events.epoch
            self._hasher = RoutingHasher(config.model_name, config.revision)
            self._table.add(replica.name, epoch, config.block_size)
            first = Frame(epoch, snapshot=np.empty(0, np.uint64))
            self._table.on_frame(replica.name, first, self._loop.time())
            if replica.transport is not None:
                self._table.peers.add(replica.name, replica.transport.hello())
            replica.on_frame.append(self._on_frame)

    def _on_frame(self, replica: str, frame: Frame) -> None:
        action = self._table.on_frame(replica, frame, self._loop.time())
        assert action.resync_from is None, action.reason

    async def complete(
        self, key: int, prompt_ids: Sequence[int], max_tokens: int, session: str, retain_s: float
    ) -> Answer:
        """Place a request and wait for its answer."""
        loop, table, ids = self._loop, self._table, np.array(prompt_ids, np.int32)
        hashes = self._hasher.hashes(ids)
        fleet = table.fleet(hashes, len(ids), loop.time(), session)
        ranking = self._policy.choose(
            RouteRequest(len(ids), session), fleet, loop.time(), self._rng
        )
        booking = table.book(ranking, hashes, len(ids), loop.time(), session)
        best = ranking[0]
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request = Request(
            key,
            ids,
            params,
            arrival_s=loop.time(),
            retain_s=retain_s,
            num_expected_cached=best.held_tokens,
        )
        deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()
        replica, hint = self._replicas[best.replica], table.peers.hint(ranking)
        await asyncio.sleep(NETWORK_S)
        pulled = ImportResult(0, 0, 0.0)
        if hint is not None and replica.transport is not None:
            pulled = await replica.transport.pull(request, hint)
        replica.submit(request, deltas)
        answer = Answer(prompt_tokens=len(ids), replica=best.replica)
        answer.predicted_tokens = request.num_expected_cached
        await take_answer(deltas, answer, lambda: table.answered(booking, loop.time()))
        table.end(booking, loop.time(), answer.num_tokens)
        self._end_retention(session)
        if retain_s:
            self._retained[session] = replica, key
        if hint is not None:
            facts = len(ids), answer.num_tokens, answer.cached_tokens
            pull = {"pulled_bytes": pulled.num_bytes, "pull_s": pulled.seconds}
            table.peers.measured(Completion("length", *facts, **pull), loop.time())
        return answer

    def _end_retention(self, session: str) -> None:
        """Let the replica of the session's turn before this one retain its blocks no longer."""
        if session in self._retained:
            replica, key = self._retained.pop(session)
            self._loop.call_later(RENEWAL_S, replica.scheduler.drop_retained, key)


async def take_answer(
    deltas: asyncio.Queue[TokenDelta], answer: Answer, on_first: Callable[[], object]
) -> None:
    """Receive an answer to its end.

    Raises
    ------
    RequestFailed
        The replica has refused the request.
    """
    clock = asyncio.get_running_loop().time
    while True:
        delta = await deltas.get()
        if delta.facts.error is not None:
            raise RequestFailed(delta.facts.error.message)
        if not answer.tokens:
            on_first()
            answer.cached_tokens = delta.facts.num_cached_tokens
            answer.host_cached_tokens = delta.facts.num_host_cached_tokens
        answer.arrivals_s.append(clock())
        answer.tokens.append(len(delta.token_ids))
        answer.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            return


class SimulatedCluster:
    """Replicas behind routers that take requests in turns; a client of `load_generator`.

    Construct and close it in a running `VirtualTimeLoop`.

    Parameters
    ----------
    network
        Between the nodes of the replicas; None: the host tiers are private, and nothing is pulled.
    """

    def __init__(
        self,
        config: EngineConfig,
        pace: Pace,
        policy: str,
        *,
        num_replicas: int,
        num_routers: int,
        retain_s: float,
        network: Network | None = None,
    ):
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._nodes: list[SimulatedNode] = []
        if network is None:
            self.replicas = [SimulatedReplica(str(i), config, pace) for i in range(num_replicas)]
        else:
            self.replicas = self._on_nodes(config, pace, num_replicas, network)
        self._routers = [SimulatedRouter(self.replicas, policy, i) for i in range(num_routers)]
        self._retain_s = retain_s
        self._keys = itertools.count()
        self._tasks = [
            asyncio.ensure_future(task)
            for replica in self.replicas
            for task in (replica.run(), replica.send_heartbeats())
        ]

    def _on_nodes(
        self, config: EngineConfig, pace: Pace, num_replicas: int, network: Network
    ) -> list[SimulatedReplica]:
        """Replicas that each have a node and its pool, and pull from one another."""
        self._folder = tempfile.TemporaryDirectory(prefix="quire-agents-")
        clock = asyncio.get_running_loop().time
        replicas = []
        transports: dict[str, SimulatedTransport] = {}
        for i in range(num_replicas):
            node = SimulatedNode(f"node{i}", Path(self._folder.name), config.num_host_blocks, clock)
            replica = SimulatedReplica(str(i), config, pace, node)
            parts = node, replica.scheduler, replica.wake, network, transports
            replica.transport = transports[replica.name] = SimulatedTransport(replica.name, *parts)
            self._nodes.append(node)
            replicas.append(replica)
        return replicas

    async def complete(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        session: str = "",
        retain: bool = False,
    ) -> Answer:
        for task in self._tasks:
            if task.done():
                task.result()
        key = next(self._keys)
        router = self._routers[key % len(self._routers)]
        retain_s = self._retain_s if retain else 0.0
        return await router.complete(key, prompt_ids, max_tokens, session, retain_s)

    async def close(self) -> None:
        """Stop the replicas."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self._nodes:
            node.close()
        if self._folder is not None:
            self._folder.cleanup()

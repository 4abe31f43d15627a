"""A bound for routing of agents: replicas that share one cache of all their sizes, where every hit costs nothing.

The devices, the schedulers and the rules of a step are those of `simulated_cluster`. All replicas are on one node,
whose pool is as large as all devices and host tiers together; all that is computed is in the pool soon, and copies take
no time. The dispatcher knows what every replica has yet to compute. No router can have more hits, or know more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quire.cluster.bench.load.clients import Answer
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import TokenDelta
from quire.replica.config import EngineConfig
from quire.replica.core.request import Request
from tests.perf.agents.simulated_cluster import NETWORK_S, SimulatedReplica, take_answer
from tests.perf.agents.simulated_nodes import SimulatedNode
from tests.perf.cluster.paced_replica import Pace

RULES = ("least_tokens", "least_requests")


class PooledOracle:
    """The replicas with one cache; a client of `load_generator`.

    Construct and close it in a running `VirtualTimeLoop`.

    Parameters
    ----------
    rule
        `least_tokens`: to the replica with the fewest tokens to compute; among equals, to the one with the fewest
        requests. `least_requests`: the other way round.
    """

    def __init__(self, config: EngineConfig, pace: Pace, rule: str, *, num_replicas: int):
        if rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
        self._loop = asyncio.get_running_loop()
        self._folder = tempfile.TemporaryDirectory(prefix="quire-oracle-")
        num_slots = num_replicas * (config.num_blocks + config.num_host_blocks)
        config = dataclasses.replace(config, num_host_blocks=num_slots, restore="always")
        pace = dataclasses.replace(pace, copied_block_s=0.0)
        self._node = SimulatedNode("one", Path(self._folder.name), num_slots, self._loop.time)
        self.replicas = [
            SimulatedReplica(str(i), config, pace, self._node) for i in range(num_replicas)
        ]
        self._rule = rule
        self._keys = itertools.count()
        # Tokens to compute, and requests that have not ended.
        self._tokens: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        # Tokens of each session so far.
        self._known: dict[str, int] = {}
        self._tasks = [asyncio.ensure_future(replica.run()) for replica in self.replicas]

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
        known = self._known.get(session, self._known.get(session.removesuffix("-branch"), 0))
        known = min(known, len(prompt_ids) - 1)
        missing = len(prompt_ids) - known
        replica = min(self.replicas, key=self._order)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        request = Request(
            next(self._keys),
            np.array(prompt_ids, np.int32),
            params,
            arrival_s=self._loop.time(),
            num_expected_cached=known,
        )
        self._tokens[replica.name] += missing
        self._requests[replica.name] += 1
        deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self._loop.call_later(NETWORK_S, replica.submit, request, deltas)
        answer = Answer(prompt_tokens=len(prompt_ids), replica=replica.name)

        def on_first() -> None:
            self._tokens[replica.name] -= missing

        await take_answer(deltas, answer, on_first)
        self._requests[replica.name] -= 1
        self._known[session] = len(prompt_ids) + answer.num_tokens
        return answer

    def _order(self, replica: SimulatedReplica) -> tuple[int, int]:
        tokens, requests = self._tokens[replica.name], self._requests[replica.name]
        return (tokens, requests) if self._rule == "least_tokens" else (requests, tokens)

    async def close(self) -> None:
        """Stop the replicas."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._node.close()
        self._folder.cleanup()

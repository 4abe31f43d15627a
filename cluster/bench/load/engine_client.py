"""An engine in this process with the interface of a server's client (`clients.Client`), for `load_generator`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Hashable, Sequence
from typing import Any

from quire.cluster.bench.load.cache_watch import CacheSample
from quire.cluster.bench.load.clients import Answer, RequestFailed
from quire.protos.errors import QuireError
from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.engine import Engine
from quire.replica.loop import LoopOutput

# The default of `session.retain_s` in a cluster.
_RETAIN_S = 90.0


class EngineClient:
    """Owns an engine. All methods run in one event loop, except `_on_output`, which the engine's thread calls.

    Parameters
    ----------
    args
        Fields of `quire.replica.config.EngineArgs`.
    """

    def __init__(self, **args: Any):
        self._engine = Engine(on_output=self._on_output, **args)
        self.config = self._engine.config
        self.checkpoint = self._engine.checkpoint
        self.startup_s = self._engine.startup_s
        self.samples: list[CacheSample] = []  # one per iteration of the engine's loop
        # Drafted tokens of all ended requests, and those that were right.
        self.num_drafted = self.num_accepted = 0
        self._keys = itertools.count()
        self._sinks: dict[Hashable, tuple[asyncio.AbstractEventLoop, asyncio.Queue]] = {}

    def _on_output(self, output: LoopOutput) -> None:
        """Pass a step's deltas (new tokens of a request) to the requests' queues. The engine's thread calls this."""
        now_s, load = time.perf_counter(), output.load
        self.samples.append(
            CacheSample(
                now_s, load.blocks_free, load.blocks_cached, load.blocks_in_use, load.blocks_total
            )
        )
        found: dict[asyncio.AbstractEventLoop, list] = {}
        for delta in output.deltas:
            if sink := self._sinks.get(delta.key):
                found.setdefault(sink[0], []).append((sink[1], delta))
        # Wake each event loop once per step, not once per token.
        for loop, deltas in found.items():
            loop.call_soon_threadsafe(_hand_out, now_s, deltas)

    async def complete(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        session: str = "",
        retain: bool = False,
    ) -> Answer:
        key = next(self._keys)
        queue: asyncio.Queue = asyncio.Queue()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._sinks[key] = (asyncio.get_running_loop(), queue)
        answer = Answer(prompt_tokens=len(prompt_ids))
        try:
            retain_s = _RETAIN_S if retain else 0.0
            self._engine.submit(Request(key, prompt_ids, params, retain_s=retain_s))
            while True:
                now_s, delta = await queue.get()
                if delta.facts.error is not None:
                    raise delta.facts.error
                if delta.token_ids:
                    if not answer.tokens:
                        answer.cached_tokens = delta.facts.num_cached_tokens
                    answer.arrivals_s.append(now_s)
                    answer.tokens.append(len(delta.token_ids))
                    answer.token_ids += delta.token_ids
                if delta.finish_reason is not None:
                    self.num_drafted += delta.facts.num_drafted or 0
                    self.num_accepted += delta.facts.num_accepted or 0
                    return answer
        except QuireError as error:
            raise RequestFailed(error.message) from None
        finally:
            del self._sinks[key]

    def telemetry(self) -> dict[str, Any]:
        """Counters and mean times of the engine's steps (`Engine.telemetry`)."""
        return self._engine.telemetry()

    async def close(self) -> None:
        self._engine.close()


def _hand_out(now_s: float, deltas: list) -> None:
    for queue, delta in deltas:
        queue.put_nowait((now_s, delta))

"""Brings the KV of streams to the device before they move here, one stream after the other.

```
 turn ─▶ pull the rest ─▶ a request of no router ─▶ its blocks are on the device ─▶ the stream comes ─▶ next turn
                           └ adopts the blocks, computes what is missing and one token, which is dropped
```

So a stream's own request finds its blocks on the device. Without this it would verify and copy them while its client
waits. Without turns it would wait for the restores of all streams that leave a replica with it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from quire.protos.errors import QuireError
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Completion, Submit
from quire.replica.core.adapter import Adapter
from quire.replica.core.request import Request

if TYPE_CHECKING:
    from quire.replica.engine import Engine

# Instead of a router's id in the keys of these requests.
NO_ROUTER = ""
# The same instead of a stream's number, for the flight recorder: routers count from 1.
_NO_STREAM = 0
# Longest wait for the turn, and longest restore: then the stream's own request does the work.
_MAX_WAIT_S, _MAX_S = 22.0, 5.0
# Longest time from the end of a restore to its stream.
_MAX_HOLD_S = 1.0


class AheadRestores:
    """The restores of one replica; lives in its event loop."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._numbers = itertools.count()
        self._ended: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._turn = asyncio.Lock()
        # The request id of the stream that has the turn and will come, and what ends its turn otherwise.
        self._expected = ""
        self._late: asyncio.TimerHandle | None = None

    async def run(
        self, submit: Submit, adapter: Adapter | None, pull: Callable[[], Awaitable[Completion]]
    ) -> Completion:
        """Pull what is missing of a prompt's KV, restore it on the device and retain it there for `Submit.retain_s`.

        Returns
        -------
        What `pull` returns. If the turn is late, or that is an error, nothing is restored.
        """
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            return await pull()
        is_restored = False
        try:
            completion = await pull()
            if completion.error is None:
                await self._restore(submit, adapter)
                is_restored = True
            return completion
        finally:
            if is_restored:
                self._expected = submit.request_id
                self._late = asyncio.get_running_loop().call_later(_MAX_HOLD_S, self._end_turn)
            else:
                self._turn.release()

    def on_submitted(self, request_id: str) -> None:
        """Take in that a request of this id is in the engine's line."""
        if self._late is not None and request_id == self._expected:
            self._late.cancel()
            self._end_turn()

    def _end_turn(self) -> None:
        self._late = None
        self._turn.release()

    async def _restore(self, submit: Submit, adapter: Adapter | None) -> None:
        key = NO_ROUTER, next(self._numbers)
        ended = self._ended[key] = asyncio.get_running_loop().create_future()
        request = Request(
            key,
            submit.prompt_ids,
            SamplingParams(max_tokens=submit.num_emitted + 1, temperature=0.0),
            # It needs no more room than its stream, which comes from another replica.
            num_emitted=submit.num_emitted,
            tenant=submit.tenant,
            stream_id=_NO_STREAM,
            arrival_s=time.monotonic(),
            priority=submit.priority,
            # Else routers would take it for a prompt that is to be computed.
            num_expected_cached=len(submit.prompt_ids),
            payer=submit.payer,
            retain_s=submit.retain_s,
            adapter=adapter,
        )
        try:
            self._engine.submit(request)
            async with asyncio.timeout(_MAX_S):
                await ended
        except (QuireError, TimeoutError):
            pass
        finally:
            del self._ended[key]
            if not ended.done() or ended.cancelled():
                self._engine.abort(key)

    def on_end(self, key: tuple[str, int]) -> None:
        """Take in that a request has ended; one of a router is ignored."""
        ended = self._ended.get(key)
        if ended is not None and not ended.done():
            ended.set_result(None)

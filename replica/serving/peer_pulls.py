"""Pulls prefixes from other nodes before their requests are admitted.

```
 generate(Submit with a hint) ─▶ import from the peer ─▶ engine.submit ─▶ admission adopts what has come
                                  └ late, failed: the engine computes the rest
```

A stream that will move here is pulled ahead of its request, while its replica still runs it (`Replica.pull`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from quire.protos.adapter_ref import cache_namespace
from quire.protos.errors import QuireError, Unavailable
from quire.protos.wire import BlockSource, Completion, PullHint, Submit
from quire.replica.kv_transport.block_import import ImportResult
from quire.replica.kv_transport.kv_transport import KvTransport
from quire.replica.kv_transport.peer_blocks import wanted_blocks
from quire.replica.node_pool.pool_file import PoolPlace

if TYPE_CHECKING:
    from quire.replica.engine import Engine

logger = logging.getLogger("ray.serve")
# Longest wait of a request, also if its router allows more, and longest pull ahead of a request.
_MAX_WAIT_S, _MAX_AHEAD_S = 10.0, 30.0
# A pull ahead of at most this many tokens does not wait for the long ones. It brings the rest of a stream, which then
# leaves. If the rests waited until the long pulls of all streams had ended, all streams would leave at once.
_SHORT_TOKENS = 512
# Longest wait for the engine's answer, which comes between two steps.
_MAX_ENGINE_S = 2.0


class PeerPulls:
    """The pulls of one replica; lives in its event loop.

    Parameters
    ----------
    engine
        An engine in the node's pool.
    place
        Where this pool is.
    host
        The node's address.

    Raises
    ------
    NixlMissingError
        `peer_transport` is nixl, and NIXL cannot start.
    """

    def __init__(self, engine: Engine, place: PoolPlace, host: str):
        assert engine.pool_blocks is not None
        self._blocks = engine.pool_blocks
        self._config = engine.config
        layout = self._blocks.pool.layout
        self._engine = engine
        self.transport = KvTransport(
            place.name,
            place.folder,
            layout,
            host,
            self._publish,
            uses_nixl=engine.config.peer_transport == "nixl",
        )
        # One at a time, in the order of arrival: two requests with one prefix pull it once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-import")
        # The same for long pulls ahead of requests.
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="quire-import-ahead")
        self._running: dict[Hashable, tuple[threading.Event, asyncio.Future[ImportResult]]] = {}

    @property
    def source(self) -> BlockSource:
        return self.transport.source

    async def run(
        self,
        key: Hashable,
        token_ids: np.ndarray,
        namespace: str,
        hint: PullHint,
        *,
        is_ahead: bool = False,
    ) -> ImportResult:
        """Pull what a hint names, for at most its time. Never raises an error: what has not come is computed.

        Parameters
        ----------
        is_ahead
            No request waits for it yet.
        """
        cancelled = threading.Event()
        wait_s = min(hint.max_wait_s, _MAX_AHEAD_S if is_ahead else _MAX_WAIT_S)
        end_s = time.monotonic() + wait_s
        is_long = is_ahead and hint.end - hint.start > _SHORT_TOKENS
        pull = functools.partial(self._pull, token_ids, namespace, hint, end_s, cancelled, is_long)
        thread = self._ahead if is_long else self._thread
        future = asyncio.get_running_loop().run_in_executor(thread, pull)
        self._running[key] = cancelled, future
        try:
            await asyncio.wait({future}, timeout=wait_s)
            if not future.done() or future.cancelled():
                return ImportResult(0, 0, wait_s, "it is late")
            return future.result()
        finally:
            # The thread may still write a block; it does not touch the request.
            cancelled.set()
            future.cancel()
            del self._running[key]

    async def wait_for(self, key: Hashable) -> None:
        """Wait for the end of a request's pull, if it has one."""
        if key in self._running:
            await asyncio.wait({self._running[key][1]})

    def abort(self, key: Hashable) -> bool:
        """End the pull of a request. Returns whether it had one."""
        if key not in self._running:
            return False
        cancelled, future = self._running[key]
        cancelled.set()
        future.cancel()
        return True

    def close(self, linger_s: float = 0.0) -> None:
        """End all pulls, and exports after `linger_s` at most."""
        for key in list(self._running):
            self.abort(key)
        for thread in (self._thread, self._ahead):
            thread.shutdown(wait=False, cancel_futures=True)
        self.transport.close(linger_s)

    def _publish(self, keys: list[bytes]) -> set[bytes]:
        """Let the engine publish what its device has of these blocks. Returns those that will come."""
        try:
            return self._engine.call(lambda s: s.publish_soon(keys)).result(_MAX_ENGINE_S)
        except (QuireError, TimeoutError):
            # The engine is at its end, or does not answer.
            return set()

    def _pull(
        self,
        token_ids: np.ndarray,
        namespace: str,
        hint: PullHint,
        end_s: float,
        cancelled: threading.Event,
        is_long: bool,
    ) -> ImportResult:
        try:
            config = self._config
            wanted = wanted_blocks(
                token_ids,
                namespace,
                hint.start,
                hint.end,
                config.block_size,
                config.groups,
                self._blocks.key,
            )
            left_s = end_s - time.monotonic()
            if left_s <= 0 or cancelled.is_set():
                return ImportResult(0, 0, 0.0, "it is late")
            result = self.transport.import_blocks(
                hint.source, wanted, left_s, cancelled, is_ahead=is_long
            )
            if is_long:
                # Routers learn of the blocks now, also from an idle engine.
                self._engine.call(lambda scheduler: None)
        except Exception as error:
            logger.warning("a pull from %s failed", hint.source.address, exc_info=error)
            return ImportResult(0, 0, 0.0, str(error))
        if result.reason:
            logger.info(
                "pulled %d blocks from %s: %s", result.num_blocks, hint.source, result.reason
            )
        return result


async def pull_ahead(pulls: PeerPulls | None, submit: Submit) -> Completion:
    """Pull what `Submit.pull` names, for a request that will come later; the error says why not all has come."""
    pulled = ImportResult(0, 0, 0.0, "this replica pulls nothing")
    if submit.pull is None:
        pulled = ImportResult(0, 0, 0.0, "")
    elif pulls is not None:
        pulled = await pulls.run(
            (submit.router_id, submit.stream_id),
            submit.prompt_ids,
            cache_namespace(submit.tenant, submit.adapter),
            submit.pull,
            is_ahead=True,
        )
    error = Unavailable(pulled.reason).to_wire() if pulled.reason else None
    return Completion(
        "error" if error else "abort",
        *(len(submit.prompt_ids), 0, 0),
        error=error,
        pulled_bytes=pulled.num_bytes,
        pull_s=pulled.seconds,
    )

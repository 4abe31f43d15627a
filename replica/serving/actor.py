"""The replica's Serve deployment: a thin layer around one engine.

```
 router ──generate(Submit)──▶ future of the request ◀── finish ──┐
        ◀─────Completion─────                                     │
 router ──attach()──────────▶ attach stream ◀── frames ── AttachedRouters ◀── LoopOutput ── engine thread
 router ──abort(ids)────────▶ engine.abort
```

The unary call `generate` stays open until its request ends, so Serve counts the request as ongoing for cancellation,
draining and autoscaling, and fails the call when the replica dies. The tokens travel in the frames of the attach
stream. A request also ends when it loses its reader: its call is cancelled, it is aborted, the router's attach stream
ends or, if all of these fail, its lease (renewed periodically by the router) expires.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import functools
import gc
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import ray
from ray import serve

from quire.protos.adapter_ref import AdapterRef
from quire.protos.engine_facts import describe, describe_phases, engine_facts
from quire.protos.errors import Aborted, QuireError, Unavailable
from quire.protos.metric_families import Page
from quire.protos.wire import LEASE_S, Completion, Hello, PullHint, Submit
from quire.protos.wire_codec import Part, parts_of
from quire.replica.config import EngineArgs
from quire.replica.core.adapter import Adapter
from quire.replica.core.request import Request
from quire.replica.engine import Engine
from quire.replica.kv_transport.block_import import ImportResult
from quire.replica.loop import LoopOutput
from quire.replica.node_pool.pool_file import PoolPlace, pool_name
from quire.replica.ranks.rank_links import RankEnd
from quire.replica.serving.ahead_restores import AheadRestores
from quire.replica.serving.arrivals import Arrivals
from quire.replica.serving.attached_routers import AttachedRouters
from quire.replica.serving.completions import ended, failed
from quire.replica.serving.final_errors import final_errors
from quire.replica.serving.leases import Leases, StreamKey
from quire.replica.serving.node_checkpoints import bring_models
from quire.replica.serving.peer_pulls import PeerPulls, pull_ahead
from quire.replica.serving.prompt_publishing import kv_token_bytes, publish_prompt
from quire.replica.serving.rank_actor import actor_starter
from quire.replica.serving.ray_metrics import RayMetrics
from quire.replica.serving.replica_metrics import ReplicaMetrics

logger = logging.getLogger("ray.serve")
_LEASE_CHECKS = 10  # per `LEASE_S`
# A thread that computes may keep the interpreter's lock from another one for so long; Python's default is 5 ms. The
# engine's thread gives the lock up in each product and copy, and waits to get it back. Beside one busy thread a step of
# the embedded model with 8 streams took 15 to 49 ms with the default, 9 ms with this; alone 3 ms. A shorter one
# gives a little more (6 ms with 0.1 ms), at the price of more switches in every process that is busy anyway.
_SWITCH_INTERVAL_S = 5e-4
# A replica that drains ends its exports after this time at most.
_LINGER_S = 5.0


class Replica:
    """One engine behind Serve handle calls.

    Parameters
    ----------
    engine_args
        Fields of `EngineArgs`.
    heartbeat_ms
        Milliseconds from the last frame to the first heartbeat; while the replica is idle, the interval grows to 1000.
    """

    engine_class: type[Engine] = Engine

    # Ray Serve awaits the constructor.
    async def __init__(  # type: ignore[misc]
        self, engine_args: dict[str, Any], heartbeat_ms: int
    ):
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._event_loop = asyncio.get_running_loop()
        self._finished: dict[StreamKey, asyncio.Future[Completion]] = {}
        # Requests that were aborted during their pull.
        self._aborted: set[StreamKey] = set()
        self._node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        args = EngineArgs(**engine_args)
        place = _pool_place(serve.get_replica_context().app_name)
        with final_errors("replica"):
            await asyncio.to_thread(bring_models, args)
            self._engine = await asyncio.to_thread(
                self.engine_class,
                args,
                on_output=self._on_output,
                flight_path=_flight_folder() / self._replica_id,
                node_pool=place,
                start_rank=actor_starter() if args.tensor_parallel > 1 else None,
            )
        assert self._engine.recorder is not None
        self._engine.recorder.catch_fatal_signals()
        # Exclude the objects of torch and the model from garbage collections: they stay alive, and scanning them would
        # delay steps.
        gc.collect()
        gc.freeze()
        # Collect again: CPython starts a full collection only after new objects exceed 25% of the last survivors.
        gc.collect()
        with final_errors("replica"):
            self._pulls = _peer_pulls(self._engine, place)
        self._attachments = AttachedRouters(
            self._engine.epoch, self._on_detach, heartbeat_s=heartbeat_ms / 1000
        )
        self._arrivals = Arrivals()
        self._restores = AheadRestores(self._engine)
        self._engine.watch(self._end_process)
        self._engine.watch_ranks(self._end_with_rank)
        self._router_queues: dict[
            str, float
        ] = {}  # router id to this replica's share of its queued prefill, seconds
        self._leases = Leases(LEASE_S)
        self._reaper = asyncio.create_task(self._reap())
        self._metrics = ReplicaMetrics(
            self._engine, None if self._pulls is None else self._pulls.transport
        )
        self._ray_metrics = RayMetrics(self._metrics.metrics)
        hello = self._hello()
        phases = describe_phases(hello.startup_s)
        logger.info("ready: %s; loaded in %s", describe(engine_facts(hello)), phases)

    # -- the bus -----------------------------------------------------------------------------------------

    async def attach(self, router_id: str, *, route: list[str]) -> AsyncIterator[bytes | Part]:
        """Stream `Hello`, a snapshot of the cache, and frames until the router detaches. Long frames are sent in parts.

        The request router (`serve_router`) uses `route`, the id of the intended replica. Serve may still send the call
        to another replica. That one sends `Hello` only, because a second attachment would end the router's first one.
        """
        yield self._hello().encode()
        if route != [self._replica_id]:
            return
        frames = self._frames(router_id)
        self._leases.attach(router_id, time.monotonic())
        snapshot = asyncio.create_task(self._send_snapshot(router_id))
        try:
            async for frame in frames:
                for part in parts_of(frame):
                    yield part
        finally:
            snapshot.cancel()
            await frames.aclose()

    def _hello(self) -> Hello:
        """The constant facts about this replica."""
        hello = self._engine.hello(self._replica_id, self._node)
        if self._pulls is not None:
            hello = dataclasses.replace(hello, exports=self._pulls.source)
        return dataclasses.replace(hello, kv_token_bytes=kv_token_bytes(self._engine))

    def _frames(self, router_id: str) -> AsyncGenerator[bytes, None]:
        """Frames of a router's attach stream. `faulty_actor.py` overrides this method to inject faults."""
        return self._attachments.stream(router_id, self._engine.load)

    async def resync(self, router_id: str, from_seq: int, *, route: list[str]) -> None:
        """Send the batches of cache events after number `from_seq` in the router's attach stream.

        Sends a snapshot instead if these events are no longer stored, or if `from_seq` is -1.
        """
        events = await asyncio.wrap_future(
            self._engine.call(lambda scheduler: scheduler.events.since(from_seq))
        )
        if events is None:
            await self._send_snapshot(router_id)
        else:
            self._attachments.send_events(router_id, events)

    async def generate(self, submit: bytes, *, route: list[str]) -> bytes:
        """Run one request to its end and return its `Completion`; its tokens travel in frames."""
        request = Submit.decode(submit)
        key = (request.router_id, request.stream_id)
        if request.router_id not in self._attachments:
            error = Unavailable("this router is not attached to the replica")
            return failed(error, request).encode()
        finished = asyncio.get_running_loop().create_future()
        self._finished[key] = finished
        self._leases.begin(key, time.monotonic())
        try:
            source = self._attachments.source(request.router_id)
            adapter = await self._adapter(request.adapter)
            engine_request = _engine_request(key, source, request, adapter)
            # Serve may have sent the request to another replica than the one that lacks these tokens.
            is_meant = route[:1] == [self._replica_id]
            pulled = await self._pull(engine_request, request.pull if is_meant else None)
            if request.fork_of is not None:
                await self._wait_for_parent((request.router_id, request.fork_of))
            self._arrivals.tell(key)
            self._engine.submit(engine_request)
            self._restores.on_submitted(request.request_id)
            completion = await finished
            if pulled is not None:
                completion = dataclasses.replace(
                    completion, pulled_bytes=pulled.num_bytes, pull_s=pulled.seconds
                )
            return completion.encode()
        except QuireError as error:
            return failed(error, request).encode()
        except asyncio.CancelledError:
            self._abort(key)
            raise
        finally:
            self._finished.pop(key, None)
            self._leases.end(key)
            self._aborted.discard(key)

    async def _pull(self, request: Request, hint: PullHint | None) -> ImportResult | None:
        """Pull a prefix of the request from another node.

        Raises
        ------
        Aborted
            The request was aborted meanwhile; the engine does not know it.
        """
        if self._pulls is None or hint is None:
            return None
        token_ids = request.token_ids
        pulled = await self._pulls.run(request.key, token_ids, request.chain.tenant, hint)
        if request.key in self._aborted:
            self._aborted.discard(request.key)
            raise Aborted("the request was aborted before it started")
        num_tokens = pulled.num_blocks * self._engine.config.block_size
        # Models with several layer groups have several blocks for the same tokens.
        request.num_pulled_tokens = min(num_tokens, hint.end - hint.start)
        return pulled

    async def pull(self, submit: bytes, *, route: list[str]) -> bytes:
        """Pull what `Submit.pull` names, for a request that will come later. Returns a `Completion`.

        With `Submit.retain_s` the prompt's KV is on the device then, also if there was nothing to pull.
        """
        is_meant, request = route == [self._replica_id], Submit.decode(submit)
        pull = functools.partial(pull_ahead, self._pulls if is_meant else None, request)
        if not (is_meant and request.retain_s):
            return (await pull()).encode()
        adapter = await self._adapter(request.adapter)
        return (await self._restores.run(request, adapter, pull)).encode()

    async def publish(self, submit: bytes, *, route: list[str]) -> bool:
        """Publish the blocks of a prompt; return whether the node's pool has all of them."""
        return route == [self._replica_id] and await publish_prompt(self._engine, submit)

    async def _wait_for_parent(self, parent: StreamKey) -> None:
        if self._pulls is not None:
            await self._pulls.wait_for(parent)
        await self._arrivals.wait(parent)

    def _abort(self, key: StreamKey) -> None:
        if self._pulls is not None and self._pulls.abort(key):
            self._aborted.add(key)
        else:
            self._engine.abort(key)

    async def _adapter(self, ref: AdapterRef | None) -> Adapter | None:
        """The adapter of a request; a thread reads it if it is not in memory."""
        if ref is None:
            return None
        known = self._engine.known_adapter(ref)
        return await asyncio.to_thread(self._engine.adapter, ref) if known is None else known

    async def load_adapter(self, ref: list[str], *, route: list[str]) -> dict[str, Any]:
        """Read an adapter to host memory; return the error (`QuireError.to_wire`) if it cannot be used, else {}."""
        try:
            await self._adapter(AdapterRef.from_wire(ref))
        except QuireError as error:
            return error.to_wire()
        return {}

    async def forget_adapter(self, digest: str, *, route: list[str]) -> None:
        """Free the memory of an adapter."""
        self._engine.forget_adapter(digest)

    async def renew(
        self,
        router_id: str,
        stream_ids: list[int],
        queued_prefill_s: float = 0.0,
        unretained: list[int] | None = None,
        *,
        route: list[str],
    ) -> None:
        """Extend the leases of a router and its streams by `LEASE_S`.

        `queued_prefill_s` is this replica's share of the prefill queued at the router, in seconds. The blocks of the
        streams in `unretained` need not be retained (`Submit.retain_s`) any longer.
        """
        if unretained:
            self._engine.drop_retained([(router_id, stream) for stream in unretained])
        if router_id in self._attachments:
            self._router_queues[router_id] = queued_prefill_s
        self._leases.renew(router_id, stream_ids, time.monotonic())

    async def grant(self, router_id: str, credit: dict[int, int], *, route: list[str]) -> bool:
        """Allow the router's streams more output tokens. `credit` maps stream id to the total number allowed.

        Returns False, without effect, if Serve sent the call to a replica other than the one that runs the streams.
        """
        if route != [self._replica_id]:
            return False
        self._engine.grant({(router_id, stream): end for stream, end in credit.items()})
        return True

    async def ping(self, *, route: list[str]) -> None:
        """Do nothing. A router's first call through a handle makes Serve send it the list of running replicas."""

    async def abort(self, router_id: str, stream_ids: list[int], *, route: list[str]) -> None:
        """Abort these requests if they have not ended."""
        for stream_id in stream_ids:
            self._abort((router_id, stream_id))

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change options that need no restart (`LIGHT_FIELDS`); Serve calls this with their new values."""
        await asyncio.to_thread(self._engine.reconfigure, user_config)

    # -- what Serve calls --------------------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, Any]:
        config = self._engine.config
        return {
            "epoch": self._engine.epoch,
            "model": config.model_name,
            "blocks": config.num_blocks,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Values for `cluster/autoscaling.py`; Serve collects them a few times per look-back period."""
        load = self._engine.load()
        queued_s = load.queued_prefill_tokens * load.prefill_s_per_token
        return {
            "queued_prefill_s": queued_s + sum(self._router_queues.values()),
            "kv_in_use": load.blocks_in_use / load.blocks_total if load.blocks_total else 0.0,
            "num_requests": float(load.num_running + load.num_waiting),
        }

    def check_health(self) -> None:
        self._engine.check_health()

    def __del__(self) -> None:
        engine, pulls = getattr(self, "_engine", None), getattr(self, "_pulls", None)
        if pulls is not None:
            pulls.close(_LINGER_S)
        if engine is not None:
            engine.close()

    # -- introspection -----------------------------------------------------------------------------------

    async def snapshot(self, *, route: list[str]) -> dict[str, Any]:
        """Blocks, rows and queues as plain data, after an integrity check."""

        def take(scheduler: Any) -> dict[str, Any]:
            scheduler.check()
            return scheduler.snapshot()

        state = await asyncio.wrap_future(self._engine.call(take))
        return {
            **state,
            "fused": self._engine.fused,
            "replica": self._replica_id,
            "epoch": self._engine.epoch,
            "attached_routers": len(self._attachments),
            "open_calls": len(self._finished),
            "load": self._engine.load()._asdict(),
        }

    async def metrics_page(
        self, labels: dict[str, str], vllm_names: bool, *, route: list[str]
    ) -> tuple[str, Page]:
        """This replica's id and its metrics, labelled with `labels` and the replica's id."""
        own = {**labels, "replica": self._replica_id}
        return self._replica_id, self._metrics.page(own, vllm_names=vllm_names)

    # -- from the engine's thread and back ---------------------------------------------------------------

    def _on_output(self, output: LoopOutput) -> None:
        """Hand a step's output to the event loop, with one call per step. Runs in the engine's thread."""
        self._event_loop.call_soon_threadsafe(self._publish, output)

    def _publish(self, output: LoopOutput) -> None:
        self._attachments.publish(output)
        self._metrics.on_output(output)
        for delta in output.deltas.whole:
            if delta.finish_reason is not None:
                self._restores.on_end(delta.key)
                future = self._finished.get(delta.key)
                if future is not None and not future.done():
                    future.set_result(ended(delta.facts))

    def _end_process(self, complaint: str) -> None:
        """End the process after a hang of the device; Serve notices it immediately and starts another replica."""
        assert self._engine.recorder is not None
        self._engine.recorder.report(complaint)
        logger.error("%s: ending this process", complaint)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    def _end_with_rank(self, end: RankEnd) -> None:
        """End the process after the end of another rank. A rank that was killed is no request's fault: no report."""
        if end.error is not None:
            self._end_process(str(end))
        logger.error("%s: ending this process", end)
        os._exit(1)

    def _on_detach(self, router_id: str) -> None:
        """Abort the requests of a detached router, because their streams have no reader."""
        self._router_queues.pop(router_id, None)
        for key in list(self._finished):
            if key[0] == router_id:
                self._abort(key)

    async def _reap(self) -> None:
        """Detach silent routers and abort streams with expired leases."""
        while True:
            await asyncio.sleep(LEASE_S / _LEASE_CHECKS)
            for router_id in self._leases.expire_routers():
                if router_id in self._attachments:
                    logger.warning("detached %s: it has been silent for %.0f s", router_id, LEASE_S)
                    self._attachments.detach(router_id)
            for key in self._leases.expired_streams():
                logger.warning(
                    "aborted stream %s: its lease has not been renewed for %.0f s", key, LEASE_S
                )
                self._abort(key)

    async def _send_snapshot(self, router_id: str) -> None:
        snapshot = await asyncio.wrap_future(
            self._engine.call(lambda scheduler: scheduler.events.snapshot())
        )
        self._attachments.send_snapshot(router_id, *snapshot)


def _pool_place(app_name: str) -> PoolPlace | None:
    """Where the replicas of this application and this node find their pool; None without Ray.

    The name has the Ray session and the node, because several nodes may share one machine.
    """
    if not ray.is_initialized():
        return None
    node_id = ray.get_runtime_context().get_node_id()
    session = Path(ray._private.worker._global_node.get_session_dir_path()).name
    (node,) = (node for node in ray.nodes() if node["NodeID"] == node_id)
    store_bytes = int(node["Resources"].get("object_store_memory", 0))
    return PoolPlace(pool_name(session, app_name, node_id[:16]), store_bytes)


def _peer_pulls(engine: Engine, place: PoolPlace | None) -> PeerPulls | None:
    """The replica's transport to other nodes; None: the option is off, or the engine has no pool of the node."""
    if engine.config.peer_transport == "off" or place is None or engine.pool_blocks is None:
        return None
    return PeerPulls(engine, place, ray.util.get_node_ip_address())


def _flight_folder() -> Path:
    """The folder for the flight recorder: in the directory of this Ray session, or a temporary one without Ray."""
    if not ray.is_initialized():
        return Path(tempfile.mkdtemp(prefix="quire-"))
    return Path(ray._private.worker._global_node.get_session_dir_path()) / "quire"


def _engine_request(
    key: StreamKey, source: int, submit: Submit, adapter: Adapter | None
) -> Request:
    now = time.monotonic()
    return Request(
        key,
        submit.prompt_ids,
        submit.params,
        num_emitted=submit.num_emitted,
        tenant=submit.tenant,
        source=source,
        stream_id=submit.stream_id,
        arrival_s=now,
        deadline_s=None if submit.deadline_s is None else now + submit.deadline_s,
        priority=submit.priority,
        fork_of=None if submit.fork_of is None else (submit.router_id, submit.fork_of),
        credit_tokens=submit.credit_tokens,
        alone=submit.alone,
        num_expected_cached=submit.num_expected_cached,
        payer=submit.payer,
        retain_s=submit.retain_s,
        adapter=adapter,
        prediction_ids=submit.prediction_ids,
    )

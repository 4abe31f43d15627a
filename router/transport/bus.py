"""The router's side of the bus: one attach stream for every replica, one unary call for every request.

This module uses Serve's handles and makes no routing decision. It works around these properties of Serve (Ray 2.60):

* Calls from one request context share an internal id and are cancelled with the request. The shared id makes a request
  router that is not FIFO hang. So every call starts in a fresh `contextvars.Context`.
* Cancelling a call is best effort. So the bus also aborts an abandoned request explicitly.
* An open attach stream counts as an ongoing request and delays the drain of its replica. So the bus detaches when
  Serve has dropped the replica and its last request has ended.
* A request takes 22 ms of processor time if its calls and frames go through Ray's object store, and 18 ms over the gRPC
  server of every Serve replica (`ray-routers --mix hot`, AMD Zen 3). So they use gRPC, except for data longer than a
  gRPC message. Handles run in Serve's own thread: in the router's event loop (RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0)
  a request takes 1 ms less, but while replicas started and stopped, a router answered `/ready` once in four seconds.
* Over gRPC a stream can last as long as its replica: 300,000 frames leave 0.7 MB at the router and 0.4 MB at the
  replica. Through the object store Ray keeps the id of every item until the call ends: 12 and 8 MB for 100,000 frames.
* Over gRPC, the `CancelledError` of a replica that ends is raised in this process. So `answer_of` awaits every reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import itertools
import logging
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from grpc import RpcError
from ray.exceptions import RayActorError, RayError
from ray.serve.handle import DeploymentHandle

from quire.protos.errors import QuireError, Unavailable
from quire.protos.metric_families import Page
from quire.protos.wire import LEASE_S, Completion, Frame, Hello, Submit
from quire.protos.wire_codec import MAX_MESSAGE_BYTES
from quire.router.fleet import membership
from quire.router.fleet.replicas import ReplicaTable
from quire.router.transport.calls import OVER_GRPC, CallEnded, answer_of, next_message
from quire.router.transport.flow import Credit, by_replica, slow_client
from quire.router.transport.newcomers import Newcomers
from quire.router.transport.page_turns import PageTurns
from quire.router.transport.replica_deaths import ReplicaDeaths
from quire.router.transport.transport import Attempt, Lost

logger = logging.getLogger("ray.serve")
ATTACH_RETRY_S = 0.2
WATCH_PERIOD_S = 1.0
REPLACEMENT_S = 1.0  # longest wait of a draining replica's streams for its replacement
# Grants of credit are collected for this time and sent in one call to each replica.
GRANT_DELAY_S = 0.02
GRANT_RETRY_S = 0.2
# Number of renewals within the duration of a lease.
LEASE_RENEWALS = 4
# Methods whose arguments or replies may be longer than a gRPC message.
_LONG = frozenset({"publish", "pull", "snapshot"})
# Longest wait for the last frame after the completion: a replica sends both at once, over different connections.
LAST_FRAME_TIMEOUT_S = 10.0


class Bus:
    """The attach streams, frames and calls of one router.

    Parameters
    ----------
    handle
        Handle of the replicas' deployment.
    channel
        Name of the membership that the handle's `DecidedRouter` reports to.
    router_id
        Id of this router process, unique in the application; part of every stream and attachment.
    table
        Receives every frame and every change of the membership.
    drain_timeout_s
        Requests on a replica that Serve no longer lists may run for this time; then they migrate.
    credit_tokens
        Output tokens that a request may be ahead of its client (`flow.py`); None: no limit.
    slow_client_timeout_s
        A request ends if its client leaves arrived output unread for this time.
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        channel: str,
        router_id: str,
        table: ReplicaTable,
        *,
        drain_timeout_s: float = math.inf,
        credit_tokens: int | None = None,
        slow_client_timeout_s: float = math.inf,
    ):
        self.credit_tokens = credit_tokens
        self.slow_client_timeout_s = slow_client_timeout_s
        # Attempts that get further credit with the next `grant` call to their replicas.
        self._low_credit: set[Attempt] = set()
        # Replica to streams whose blocks it need not retain any longer; sent with the next renewal of leases.
        self._unretained: defaultdict[str, list[int]] = defaultdict(list)
        self.drain_timeout_s = drain_timeout_s
        # For arguments and replies that are longer than a gRPC message.
        self._by_reference = handle
        self._unary = handle.options(**OVER_GRPC)
        self._streaming = handle.options(stream=True, **OVER_GRPC)
        # Kept, because Serve makes a new handle for each access to a method.
        self._generate_method = self._unary.generate
        self._membership = membership.channel(channel)
        self._router_id = router_id
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._members: frozenset[str] = frozenset()
        self._links: dict[str, asyncio.Task[None]] = {}
        self._hellos: dict[str, Hello] = {}
        self._page_turns = PageTurns()
        self._replica_deaths = ReplicaDeaths()
        self._attempts: dict[int, Attempt] = {}
        # Unique among all routers: the records of a crashed replica name requests by stream id only
        # (`protos.flight_recorder`).
        self._stream_ids = itertools.count((secrets.randbits(30) << 32) + 1)
        # Keeps the tasks alive, because the event loop has only weak references to them.
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._newcomers = Newcomers(router_id, table, self.next_stream_id, self.pull)
        # Set when the first replica is ready.
        self._has_attached = asyncio.Event()
        # Returns the prefill seconds in the router's queue; replicas report them to Serve's autoscaler.
        self.queued_prefill_s: Callable[[], float] = lambda: 0.0

    def start(self) -> None:
        """Start the background tasks, and attach to all replicas that Serve lists."""
        self._spawn(self._first_call())
        self._spawn(self._watch())
        self._spawn(self._renew_leases())
        self._on_members(self._membership.listen(self._hear_members))

    async def first_attached(self, timeout_s: float) -> bool:
        """Wait until a replica takes requests for the first time; return False if none does within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._has_attached.wait()
        except TimeoutError:
            return False

    @property
    def hellos(self) -> dict[str, Hello]:
        """The hello messages of the attached replicas, by replica id."""
        return self._hellos

    def submit(self, submit: Submit, route: list[str]) -> Attempt:
        """Send a request to the first replica of `route` that accepts it.

        `submit.stream_id` must come from `next_stream_id`.
        """
        credit = None
        if self.credit_tokens is not None:
            credit = Credit(self.credit_tokens, submit.num_emitted)
            submit = dataclasses.replace(submit, credit_tokens=self.credit_tokens)
        # Serve may skip the first replica of the route; then the first frame corrects `Attempt.replica`.
        attempt = Attempt(
            submit.stream_id,
            route[0],
            on_cancel=self._cancel,
            credit=credit,
            on_low_credit=self._on_low_credit,
        )
        attempt.num_read = submit.num_emitted
        attempt.drops_retained = submit.retain_s > 0
        self._attempts[submit.stream_id] = attempt
        attempt.call = self._spawn(self._generate(attempt, submit.encode(), route))
        return attempt

    async def pull(self, submit: Submit, replica: str) -> bool:
        """Let a replica pull what `submit.pull` names; return whether its node has all of it now."""
        answer = Completion.decode(await self._call("pull", submit.encode(), route=[replica]))
        self._table.peers.measured(answer, time.monotonic())
        return answer.error is None

    async def publish(self, submit: Submit, replica: str) -> bool:
        """Let a replica publish a prompt's blocks; return whether its node's pool has them."""
        return bool(await self._call("publish", submit.encode(), route=[replica]))

    def next_stream_id(self) -> int:
        return next(self._stream_ids)

    async def crashed_with(self, replica: str, stream_id: int) -> bool:
        """Return whether a lost replica crashed in a step with this stream, and was not killed from outside."""
        return await self._replica_deaths.crashed_with(replica, stream_id)

    async def snapshot(self, replica: str) -> dict[str, Any]:
        """Return the replica's tables after its integrity check; for debugging and tests."""
        return await self._spawn(self._call("snapshot", route=[replica]))

    async def metrics_pages(
        self, labels: dict[str, str], vllm_names: bool, timeout_s: float
    ) -> tuple[dict[str, Page], int]:
        """Return the metrics of replicas that answer within `timeout_s`, by replica id, and the number of the others.

        Each sample gets `labels`, and its replica's id; with `vllm_names` it comes under vLLM's name too.
        """
        members = self._members
        # Keyed by the replica's own id: Serve may have sent a call to another replica than its route says.
        pages = dict(await self.ask_all("metrics_page", labels, vllm_names, timeout_s=timeout_s))
        return pages, len(members - pages.keys())

    async def ask_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of every replica; return the answers, not None, that arrive within `timeout_s`."""
        calls = [self._spawn(self._ask(replica, method, args)) for replica in self._members]
        if not calls:
            return []
        done, silent = await asyncio.wait(calls, timeout=timeout_s)
        for call in silent:
            call.cancel()
        answers = [call.result() for call in done if not call.cancelled()]
        return [answer for answer in answers if answer is not None]

    async def _ask(self, replica: str, method: str, args: tuple[Any, ...]) -> Any:
        call = getattr(self._unary, method).remote(*args, route=[replica])
        try:
            return await answer_of(call)
        except asyncio.CancelledError:
            call.cancel()
            raise
        except Exception as error:
            logger.info("%s call failed: %r", method, error)
            return None

    async def close(self) -> None:
        """Detach from all replicas and end all calls."""
        self._closed = True
        self._membership.unlisten(self._hear_members)
        tasks = [*self._links.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- requests ----------------------------------------------------------------------------------------

    async def _generate(self, attempt: Attempt, submit: bytes, route: list[str]) -> None:
        """Wait for the unary call, which lasts until the request ends, and put its outcome into the attempt."""
        is_long = len(submit) > MAX_MESSAGE_BYTES
        method = self._by_reference.generate if is_long else self._generate_method
        response = method.remote(submit, route=route)
        try:
            completion = Completion.decode(await answer_of(response))
            self._table.peers.measured(completion, time.monotonic())
            attempt.put(completion)
        except asyncio.CancelledError:
            response.cancel()
            raise
        except RayActorError as error:
            attempt.put(Lost(attempt.replica, f"the replica died: {type(error).__name__}"))
        except Exception as error:
            logger.warning("generate call failed: %r", error)
            attempt.put(Lost(attempt.replica, f"the call failed: {type(error).__name__}"))
        if attempt.finished:
            self._forget(attempt)
        else:
            attempt.completed_s = time.monotonic()

    def _cancel(self, attempt: Attempt) -> None:
        """End an attempt whose events are no longer read; abort it on the replica if it still runs."""
        if attempt.drops_retained:
            attempt.drops_retained = False
            self._unretained[attempt.replica].append(attempt.stream_id)
        if attempt.needs_abort:
            attempt.needs_abort = False
            if attempt.call is not None:
                attempt.call.cancel()
            ids = [attempt.stream_id]
            self._spawn(self._call("abort", self._router_id, ids, route=[attempt.replica]))
        self._forget(attempt)

    def _forget(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.stream_id, None)
        if attempt.replica not in self._members:
            self._detach_if_unused(attempt.replica)

    # -- flow control ------------------------------------------------------------------------------------

    def _on_low_credit(self, attempt: Attempt) -> None:
        """Grant credit after `GRANT_DELAY_S`, in one call together with other attempts on the replica."""
        if not self._low_credit:
            self._loop.call_later(GRANT_DELAY_S, self._grant_due)
        self._low_credit.add(attempt)

    def _grant_due(self) -> None:
        due = [a for a in self._low_credit if not a.finished]
        self._low_credit.clear()
        if self._closed:
            return
        grants = [
            (a.replica, a.stream_id, a.credit.extend(a.num_read))
            for a in due
            if a.credit is not None
        ]
        for replica, credit in by_replica(grants).items():
            self._spawn(self._grant(replica, credit))

    async def _grant(self, replica: str, credit: dict[int, int]) -> None:
        """Send a grant until the replica confirms it: without the grant, the request would stay paused."""
        while any(stream in self._attempts for stream in credit):
            with contextlib.suppress(Unavailable):
                if await self._call("grant", self._router_id, credit, route=[replica]):
                    return
            await asyncio.sleep(GRANT_RETRY_S)

    def _end_slow(self, attempt: Attempt) -> None:
        attempt.fail(slow_client(attempt.num_read, self.slow_client_timeout_s))
        self._cancel(attempt)

    # -- replicas ----------------------------------------------------------------------------------------

    def _hear_members(self, members: frozenset[str]) -> None:
        """Pass a new membership to the event loop. Any thread may call this: Serve's router may have its own."""
        self._loop.call_soon_threadsafe(self._on_members, members)

    def _on_members(self, members: frozenset[str]) -> None:
        if self._closed:
            return
        new, gone = members - self._members, self._members - members
        self._members = members
        for replica in members:
            if replica not in self._links:
                self._links[replica] = self._spawn(self._link(replica))
            # It was draining and is listed again: attach again.
            elif replica in new:
                self._links[replica].cancel()
        for replica in gone:
            self._table.set_draining(replica)
            self._detach_if_unused(replica)
            if replica in self._links:
                self._spawn(self._drain(replica))

    async def _drain(self, replica: str) -> None:
        """Let the requests of a dropped replica run for `drain_timeout_s`, then migrate the rest.

        So the replica becomes idle and can end before Serve kills it.
        """
        await asyncio.sleep(self.drain_timeout_s)
        # Serve lists its replacement at the same moment. That one is often the best target, once it is attached.
        end_s = time.monotonic() + REPLACEMENT_S
        while self._table.num_ready() < len(self._members) and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        # Serve lists it again.
        if replica in self._members:
            return
        left = [a for a in self._attempts.values() if a.replica == replica]
        if left:
            logger.info("%s drains: its last %d streams migrate", replica, len(left))
        for attempt in left:
            self._spawn(attempt.move("the replica drains"))

    def _detach_if_unused(self, replica: str) -> None:
        if not any(attempt.replica == replica for attempt in self._attempts.values()):
            link = self._links.get(replica)
            if link is not None:
                link.cancel()

    async def _link(self, replica: str) -> None:
        """Stay attached to one replica while Serve lists it."""
        try:
            while replica in self._members:
                try:
                    await self._attach(replica)
                except (RayError, RpcError, CallEnded) as error:
                    logger.info("attach stream of %s ended: %r", replica, error)
                # For example a frame of another version, which cannot be decoded.
                except Exception:
                    logger.exception("attach stream of %s failed", replica)
                finally:
                    self._on_lost(replica)
                await asyncio.sleep(ATTACH_RETRY_S)
        finally:
            self._links.pop(replica, None)
            self._table.remove(replica)
            # Serve may have listed it again while this task was ending.
            if replica in self._members:
                self._on_members(self._members)

    async def _attach(self, replica: str) -> None:
        """Attach to a replica and process its frames until the stream ends."""
        stream = self._streaming.attach.remote(self._router_id, route=[replica])
        try:
            hello = Hello.decode(await next_message(stream))
            if hello.replica != replica:
                # Serve passes a replica over that does not answer at once, or its membership is newer than ours.
                logger.info("Serve gave the attach call for %s to %s", replica, hello.replica)
                return
            self._hellos[replica] = hello
            self._replica_deaths.remember(hello)
            self._table.add(replica, hello.epoch, hello.block_size, hello.weights, hello.has_states)
            self._table.peers.add(replica, hello)
            while True:
                frame = Frame.decode(await next_message(stream))
                if frame.snapshot is None:
                    self._on_frame(replica, frame)
                    continue
                async with self._page_turns.turn():
                    self._on_frame(replica, frame)
        except StopAsyncIteration:
            return
        finally:
            stream.cancel()

    async def _watch(self) -> None:
        """Check timeouts each second: silent replicas, missing last frames, and clients that do not read."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            now = time.monotonic()
            for replica in self._table.expire(now):
                logger.warning("no frame from %s: attaching again", replica)
                if replica in self._links:
                    # Cancel the task: a hanging replica would not end the stream. `_link` then starts a new task.
                    self._links[replica].cancel()
            for attempt in list(self._attempts.values()):
                done_s = attempt.completed_s
                if done_s is not None and now - done_s > LAST_FRAME_TIMEOUT_S:
                    attempt.put(Lost(attempt.replica, "the last tokens did not arrive"))
                taken_s = attempt.taken_s
                if taken_s is None or attempt.finished or not attempt.has_unread:
                    continue
                if now - taken_s > self.slow_client_timeout_s:
                    self._end_slow(attempt)

    async def _renew_leases(self) -> None:
        """Report to every replica that this router is alive, and which streams it still wants."""
        while True:
            await asyncio.sleep(LEASE_S / LEASE_RENEWALS)
            wanted: dict[str, list[int]] = {replica: [] for replica in self._hellos}
            # No frame has confirmed the replica of these streams yet, so list them at every replica.
            unplaced = [a.stream_id for a in self._attempts.values() if not a.placed]
            for attempt in self._attempts.values():
                if attempt.placed and attempt.replica in wanted:
                    wanted[attempt.replica].append(attempt.stream_id)
            share_s = self.queued_prefill_s() / max(1, len(wanted))
            unretained, self._unretained = self._unretained, defaultdict(list)
            for replica, ids in wanted.items():
                renewal = (ids + unplaced, share_s, unretained[replica])
                self._spawn(self._call("renew", self._router_id, *renewal, route=[replica]))

    def _on_frame(self, replica: str, frame: Frame) -> None:
        action = self._table.on_frame(replica, frame, time.monotonic())
        if not self._has_attached.is_set() and self._table.num_ready():
            self._has_attached.set()
        if action.became_ready:
            self._spawn(self._newcomers.greet(replica))
        if action.resync_from is not None:
            logger.info("resync of %s: %s", replica, action.reason)
            from_seq = action.resync_from
            self._spawn(self._call("resync", self._router_id, from_seq, route=[replica]))
        for delta in frame.token_deltas():
            attempt = self._attempts.get(delta.key)
            if attempt is not None:
                attempt.replica, attempt.placed = replica, True
                attempt.put(delta)
                if attempt.finished:
                    self._forget(attempt)

    def _on_lost(self, replica: str) -> None:
        self._hellos.pop(replica, None)
        self._table.set_lost(replica)
        for attempt in list(self._attempts.values()):
            if attempt.replica == replica:
                attempt.put(Lost(replica, "the attach stream ended"))

    # -- calls -------------------------------------------------------------------------------------------

    async def _first_call(self) -> None:
        """Make a first call, because only then does Serve create the handle's router, which reports the membership."""
        await self._call("ping", route=[])

    async def _call(self, method: str, *args: Any, route: list[str]) -> Any:
        handle = self._by_reference if method in _LONG else self._unary
        try:
            return await answer_of(getattr(handle, method).remote(*args, route=route))
        # Over gRPC, an exception of the method is raised here with its own type.
        except Exception as error:
            logger.info("%s call failed: %r", method, error)
            raise Unavailable(f"the replica did not answer: {type(error).__name__}") from error

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(coroutine, context=contextvars.Context())
        self._background.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.INFO if isinstance(error, QuireError) else logging.ERROR
            logger.log(level, "bus task failed: %r", error)

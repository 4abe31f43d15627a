"""The router's side of the bus: one attach stream to every replica, one unary call for every request.

Ray shell: everything that knows Serve handles is here, everything that decides is elsewhere. Traps of Serve that
this module is built around (reference: Ray 2.60):

* calls of one request context share an internal id, and a router that is not FIFO then hangs; and calls made inside a
  request die with it. So every call starts in a fresh `contextvars.Context`.
* cancellation of a call is best effort. So an abandoned request is also aborted explicitly.
* an open attach stream counts as an ongoing request and holds up the drain of its replica. So the bus detaches when
  Serve has dropped the replica and its last request has ended.
* a request takes 22 ms of processor time where its calls and frames go through Ray's object store, and 18 where they
  go over the gRPC that every replica of Serve listens for (`ray-routers --mix hot`, AMD Zen 3). So they do, but for
  what is longer than its messages. They stay in Serve's thread for handles: in ours
  (RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0) a request takes 1 ms less, but while replicas came and went a router
  answered `/ready` once in four seconds.
* over gRPC a stream may live as long as its replica: it leaves 0.7 MB at the router and 0.4 MB at the replica for
  300,000 frames. Through the object store Ray keeps the id of every item until the call ends: 12 and 8 MB for 100,000.
* over gRPC the `CancelledError` of a replica that ends is raised here. So every answer is awaited by `answer_of`.
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
from collections.abc import Callable, Coroutine
from typing import Any

from grpc import RpcError
from ray.exceptions import RayActorError, RayError
from ray.serve.handle import DeploymentHandle

from quire.protos.errors import QuireError, SlowClient, Unavailable
from quire.protos.metric_families import Page
from quire.protos.parts import MAX_MESSAGE_BYTES
from quire.protos.wire import LEASE_S, Completion, Frame, Hello, Submit
from quire.router.fleet import membership
from quire.router.fleet.replicas import ReplicaTable
from quire.router.transport.calls import CallEnded, answer_of, next_message
from quire.router.transport.flow import Credit, by_replica
from quire.router.transport.replica_deaths import ReplicaDeaths
from quire.router.transport.transport import Attempt, Lost

logger = logging.getLogger("ray.serve")
ATTACH_RETRY_S = 0.2
WATCH_PERIOD_S = 1.0
# Readers' progress is gathered for so long into one call per replica.
GRANT_DELAY_S = 0.02
GRANT_RETRY_S = 0.2
LEASE_RENEWALS = 4  # in the time of a lease
_LONG_ANSWERS = frozenset({"snapshot"})  # methods whose answer may be longer than a message
# Serve's name for "over gRPC": not as references to Ray's objects. Pickle, although all arguments and answers are plain
# data: Serve sends an exception as it sends an answer, and with msgpack it cannot. The port unpickles whatever a caller
# chooses, so it is closed by Ray's token and by where it listens (`cluster/proxies/ray_proxies.py`).
_OVER_GRPC = {
    "_by_reference": False,
    "request_serialization": "pickle",
    "response_serialization": "pickle",
}
# A completion and the last frame leave the replica together, by different ways.
LAST_FRAME_TIMEOUT_S = 10.0


class Bus:
    """Attach streams, frames and calls of one router.

    Parameters
    ----------
    handle
        The replicas' deployment.
    channel
        Name of the membership that the handle's `DecidedRouter` reports to.
    router_id
        Unique for this router process; streams and attachments carry it.
    table
        Told of every frame and of every replica that comes or goes.
    drain_timeout_s
        A replica that Serve has dropped may finish its requests for so long; then they move.
    credit_tokens
        So far ahead of its client a request may run (`flow`); None: without bound.
    slow_client_timeout_s
        A client may leave what came for it unread for so long; then its request ends.
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
        self._low_credit: set[Attempt] = set()  # to be granted with the next message
        self.drain_timeout_s = drain_timeout_s
        self._by_reference = handle  # for what is longer than a message
        self._unary = handle.options(**_OVER_GRPC)
        self._streaming = handle.options(stream=True, **_OVER_GRPC)
        # Once: Serve makes another handle for each look at a method.
        self._generate_method = self._unary.generate
        self._membership = membership.channel(channel)
        self._router_id = router_id
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._members: frozenset[str] = frozenset()
        self._links: dict[str, asyncio.Task[None]] = {}
        self._hellos: dict[str, Hello] = {}
        self._replica_deaths = ReplicaDeaths()
        self._attempts: dict[int, Attempt] = {}
        # Unlike those of any other router: a replica that dies leaves nothing but numbers (`protos.flight_recorder`).
        self._stream_ids = itertools.count((secrets.randbits(30) << 32) + 1)
        self._background: set[asyncio.Task[Any]] = set()  # the loop itself holds tasks weakly
        self._closed = False
        self._has_attached = asyncio.Event()  # once some replica has taken requests
        # What waits at the router, as the replicas report it to Serve's autoscaler.
        self.queued_prefill_s: Callable[[], float] = lambda: 0.0

    def start(self) -> None:
        """Follow the membership from now on."""
        self._spawn(self._first_call())
        self._spawn(self._watch())
        self._spawn(self._renew_leases())
        self._on_members(self._membership.listen(self._hear_members))

    async def first_attached(self, timeout_s: float) -> bool:
        """Wait until some replica takes requests, for the first time; False if none does within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._has_attached.wait()
        except TimeoutError:
            return False

    @property
    def hellos(self) -> dict[str, Hello]:
        """What the attached replicas said of themselves, by replica id."""
        return self._hellos

    def submit(self, submit: Submit, route: list[str]) -> Attempt:
        """Send a request to the first replica of `route` that takes it.

        `submit.stream_id` must come from `next_stream_id`.
        """
        # The first of the route is right unless Serve passes it over; then the first frame corrects it.
        credit = None
        if self.credit_tokens is not None:
            credit = Credit(self.credit_tokens, submit.num_emitted)
            submit = dataclasses.replace(submit, credit_tokens=self.credit_tokens)
        attempt = Attempt(
            submit.stream_id,
            route[0],
            on_cancel=self._cancel,
            credit=credit,
            on_low_credit=self._on_low_credit,
        )
        attempt.num_read = submit.num_emitted
        self._attempts[submit.stream_id] = attempt
        attempt.call = self._spawn(self._generate(attempt, submit.encode(), route))
        return attempt

    def next_stream_id(self) -> int:
        return next(self._stream_ids)

    async def crashed_with(self, replica: str, stream_id: int) -> bool:
        """Whether a lost replica crashed by itself in a step with this stream."""
        return await self._replica_deaths.crashed_with(replica, stream_id)

    async def snapshot(self, replica: str) -> dict[str, Any]:
        """The replica's own tables, after its integrity check; for debugging and tests."""
        return await self._in_fresh_context(self._call("snapshot", route=[replica]))

    async def metrics_pages(
        self, labels: dict[str, str], timeout_s: float
    ) -> tuple[dict[str, Page], int]:
        """The metrics by id of the replicas that answer within `timeout_s`, and how many did not.

        Parameters
        ----------
        labels
            For each sample, with the replica's id.
        """
        members = self._members
        calls = [self._spawn(self._metrics_page(replica, labels)) for replica in members]
        answers: list[tuple[str, Page] | None] = []
        if calls:
            done, silent = await asyncio.wait(calls, timeout=timeout_s)
            for call in silent:
                call.cancel()
            answers = [call.result() for call in done if not call.cancelled()]
        # By id: Serve may have brought a call to another replica than that of its route.
        pages = dict(answer for answer in answers if answer is not None)
        return pages, len(members - pages.keys())

    async def _metrics_page(self, replica: str, labels: dict[str, str]) -> tuple[str, Page] | None:
        call = self._unary.metrics_page.remote(labels, route=[replica])
        try:
            return await answer_of(call)
        except asyncio.CancelledError:
            call.cancel()
            raise
        except Exception as error:
            logger.info("metrics_page call failed: %r", error)
            return None

    async def close(self) -> None:
        """Detach from everybody and end all calls."""
        self._closed = True
        self._membership.unlisten(self._hear_members)
        tasks = [*self._links.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- requests ----------------------------------------------------------------------------------------

    async def _generate(self, attempt: Attempt, submit: bytes, route: list[str]) -> None:
        """Hold the unary call open until the request ends; tell the attempt how it went."""
        is_long = len(submit) > MAX_MESSAGE_BYTES
        method = self._by_reference.generate if is_long else self._generate_method
        response = method.remote(submit, route=route)
        try:
            attempt.put(Completion.decode(await answer_of(response)))
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
        """The consumer is done with the attempt; end it on the replica unless it ended by itself."""
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
        """A reader's progress is told together with that of others."""
        if not self._low_credit:
            self._loop.call_later(GRANT_DELAY_S, self._grant_due)
        self._low_credit.add(attempt)

    def _grant_due(self) -> None:
        due = [a for a in self._low_credit if not a.finished]
        self._low_credit.clear()
        if self._closed:
            return
        for attempt in due:
            # Serve brings no more calls to a replica that drains: it could not be granted any.
            if attempt.replica not in self._members:
                attempt.put(Lost(attempt.replica, "the replica drains", planned=True))
        grants = [
            (a.replica, a.stream_id, a.credit.extend(a.num_read))
            for a in due
            if a.replica in self._members and a.credit is not None
        ]
        for replica, credit in by_replica(grants).items():
            self._spawn(self._grant(replica, credit))

    async def _grant(self, replica: str, credit: dict[int, int]) -> None:
        """Until the replica has it: without its grant a request would wait for ever."""
        while replica in self._members and any(stream in self._attempts for stream in credit):
            with contextlib.suppress(Unavailable):
                if await self._call("grant", self._router_id, credit, route=[replica]):
                    return
            await asyncio.sleep(GRANT_RETRY_S)

    def _end_slow(self, attempt: Attempt) -> None:
        seconds = self.slow_client_timeout_s
        attempt.fail(
            SlowClient(
                f"the client has read nothing for {seconds:g} s (slow_client_timeout_s), with tokens waiting "
                f"after output index {attempt.num_read - 1}: the request has ended"
            )
        )
        self._cancel(attempt)

    # -- replicas ----------------------------------------------------------------------------------------

    def _hear_members(self, members: frozenset[str]) -> None:
        """Any thread: Serve's router may run in one of its own."""
        self._loop.call_soon_threadsafe(self._on_members, members)

    def _on_members(self, members: frozenset[str]) -> None:
        if self._closed:
            return
        new, gone = members - self._members, self._members - members
        self._members = members
        for replica in members:
            if replica not in self._links:
                self._links[replica] = self._spawn(self._link(replica))
            elif replica in new:  # it was draining: begin anew
                self._links[replica].cancel()
        for replica in gone:
            self._table.set_draining(replica)
            self._detach_if_unused(replica)
            if replica in self._links:
                self._spawn(self._drain(replica))

    async def _drain(self, replica: str) -> None:
        """Let the requests of a replica that goes away finish for a while, then move them. So it is idle, and gone,
        before Serve ends it by force."""
        await asyncio.sleep(self.drain_timeout_s)
        if replica in self._members:  # Serve lists it again
            return
        left = [a for a in self._attempts.values() if a.replica == replica]
        if left:
            logger.info("%s drains: its last %d streams move", replica, len(left))
        for attempt in left:
            attempt.put(Lost(replica, "the replica drains", planned=True))

    def _detach_if_unused(self, replica: str) -> None:
        if not any(attempt.replica == replica for attempt in self._attempts.values()):
            link = self._links.get(replica)
            if link is not None:
                link.cancel()

    async def _link(self, replica: str) -> None:
        """Stay attached to one replica for as long as Serve lists it."""
        try:
            while replica in self._members:
                try:
                    await self._attach(replica)
                except (RayError, RpcError, CallEnded) as error:
                    logger.info("attach stream of %s ended: %r", replica, error)
                except Exception:  # a frame that cannot be read, for instance of another version
                    logger.exception("attach stream of %s failed", replica)
                finally:
                    self._on_lost(replica)
                await asyncio.sleep(ATTACH_RETRY_S)
        finally:
            self._links.pop(replica, None)
            self._table.remove(replica)
            # Serve may have listed it again while this task was on its way out.
            if replica in self._members:
                self._on_members(self._members)

    async def _attach(self, replica: str) -> None:
        """Attach to it and take its frames in until the stream ends."""
        stream = self._streaming.attach.remote(self._router_id, route=[replica])
        try:
            hello = Hello.decode(await next_message(stream))
            if hello.replica != replica:
                return  # Serve's membership is ahead of ours; the next update or retry settles it
            self._hellos[replica] = hello
            self._replica_deaths.remember(hello)
            self._table.add(replica, hello.epoch, hello.block_size, hello.weights)
            while True:
                self._on_frame(replica, Frame.decode(await next_message(stream)))
        except StopAsyncIteration:
            return
        finally:
            stream.cancel()

    async def _watch(self) -> None:
        """Notice what says nothing: replicas that fell silent, and last frames that do not come."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            now = time.monotonic()
            for replica in self._table.expire(now):
                logger.warning("no frame from %s: attaching anew", replica)
                if replica in self._links:
                    # Not the stream: a replica that hangs would not end it. The link's task begins anew.
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
        """Tell every replica that we live and which of its streams we want."""
        while True:
            await asyncio.sleep(LEASE_S / LEASE_RENEWALS)
            wanted: dict[str, list[int]] = {replica: [] for replica in self._hellos}
            # Serve may have given these to any replica.
            unplaced = [a.stream_id for a in self._attempts.values() if not a.placed]
            for attempt in self._attempts.values():
                if attempt.placed and attempt.replica in wanted:
                    wanted[attempt.replica].append(attempt.stream_id)
            share_s = self.queued_prefill_s() / max(1, len(wanted))
            for replica, ids in wanted.items():
                self._spawn(
                    self._call("renew", self._router_id, ids + unplaced, share_s, route=[replica])
                )

    def _on_frame(self, replica: str, frame: Frame) -> None:
        action = self._table.on_frame(replica, frame, time.monotonic())
        if not self._has_attached.is_set() and self._table.num_ready():
            self._has_attached.set()
        if action.resync_from is not None:
            logger.info("resync of %s: %s", replica, action.reason)
            from_seq = action.resync_from
            self._spawn(self._call("resync", self._router_id, from_seq, route=[replica]))
        for delta in frame.token_deltas():
            attempt = self._attempts.get(delta.stream_id)
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
        """Serve creates a handle's router, and with it our membership, with the first call."""
        await self._call("ping", route=[])

    async def _call(self, method: str, *args: Any, route: list[str]) -> Any:
        handle = self._by_reference if method in _LONG_ANSWERS else self._unary
        try:
            return await answer_of(getattr(handle, method).remote(*args, route=route))
        except Exception as error:  # over gRPC what a method raised comes as it was raised
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

    async def _in_fresh_context(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await self._spawn(coroutine)

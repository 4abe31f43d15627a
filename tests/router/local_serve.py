"""Serve handles without Serve: real `Replica` actors in this process, called as `DeploymentHandle` calls them.

Everything but Ray is real: engines, `AttachedRouters`, the wire encoding, `Bus`, `ReplicaTable`, `RouterService`.
Faults are injected where the network would be: frames may be dropped, repeated or held; replicas die or hang.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Generator
from types import SimpleNamespace
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RequestCancelledError

from quire.protos.wire import Frame
from quire.replica.serving import actor as actor_module
from quire.replica.serving.actor import Replica
from quire.router.fleet import membership
from quire.router.fleet.replicas import ReplicaTable
from quire.router.transport.bus import Bus

Network = Callable[[Frame], Awaitable[list[Frame | bytes]]]  # from a frame sent to what arrives


async def perfect(frame: Frame) -> list[Frame | bytes]:
    return [frame]


class NoMetrics:
    """Ray's metrics need a running Ray."""

    def __init__(self, source: object) -> None: ...


class LocalReplica:
    """One actor with its engine, its name at Serve and its faults."""

    def __init__(self, actor: Replica, name: str):
        self.actor = actor
        self.name = name
        self.dead = False
        self.hanging = False
        self.network: Network = perfect
        self.calls: set[asyncio.Task[Any]] = set()

    @property
    def engine(self):
        return self.actor._engine

    async def die(self) -> None:
        """As a killed process: every open call and stream breaks."""
        self.dead = True
        for task in list(self.calls):
            task.cancel()
        await asyncio.sleep(0)

    async def cut_streams(self) -> None:
        """Every attach stream breaks; the replica itself lives on."""
        for task in list(self.calls):
            if task.get_name() == "attach":
                task.cancel()
        await asyncio.sleep(0)


async def start_replica(
    name: str, monkeypatch, actor_class: type[Replica] = Replica, **engine_args: Any
) -> LocalReplica:
    """Run the actor's `__init__` as Serve would."""
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), app_name="local")
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(actor_module, "RayMetrics", NoMetrics)
    actor = object.__new__(actor_class)
    await actor.__init__(engine_args, 20)
    return LocalReplica(actor, name)


class LocalHandle:
    """A `DeploymentHandle` to local replicas: the first of the call's `route` that lives and is a member gets it.

    As with `DecidedRouter`, only a call whose route names no other replica reaches one that drains.
    """

    def __init__(
        self, replicas: list[LocalReplica], members: membership.Membership, stream: bool = False
    ):
        self._replicas = replicas
        self._members = members
        self._stream = stream
        self.passes_over: set[str] = set()  # full, as Serve sees it

    def options(self, *, stream: bool = False, **transport: Any) -> LocalHandle:
        """Return the handle: every call stays in this process, for any `transport`."""
        handle = LocalHandle(self._replicas, self._members, stream)
        handle.passes_over = self.passes_over
        return handle

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *a, route: self._call(method, a, route))

    def _call(self, method: str, args: tuple[Any, ...], route: list[str]) -> Any:
        order = {name: i for i, name in enumerate(route)}
        ranked = sorted(self._replicas, key=lambda r: order.get(r.name, len(order)))
        named = frozenset(route if len(route) == 1 else [])
        listed = (self._members.members | named) - self.passes_over
        free = [r for r in ranked if not r.dead and r.name in listed]
        if self._stream:
            return LocalStream(free, method, args, route)
        return LocalResponse(free, method, args, route)


class LocalResponse:
    """A `DeploymentResponse`: the call runs even if it is not awaited."""

    def __init__(self, free: list[LocalReplica], method: str, args: tuple, route: list[str]):
        self._cancelled = False
        self._replica = free[0] if free else None
        self._task = asyncio.ensure_future(self._run(method, args, route))
        self._task.set_name(method)
        if self._replica is not None:
            self._replica.calls.add(self._task)
            self._task.add_done_callback(self._replica.calls.discard)

    async def _run(self, method: str, args: tuple, route: list[str]) -> Any:
        if self._replica is None:
            await asyncio.Event().wait()  # Serve waits for a replica
        await asyncio.sleep(0)
        return await getattr(self._replica.actor, method)(*args, route=route)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._cancelled:
                raise RequestCancelledError("local") from None
            if self._task.cancelled():
                raise RayActorError() from None
            raise

    def cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()


class LocalStream:
    """A `DeploymentResponseGenerator`: the producer runs ahead of its reader."""

    _END = object()

    def __init__(self, free: list[LocalReplica], method: str, args: tuple, route: list[str]):
        self._replica = free[0]
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._cancelled = False
        self._task = asyncio.ensure_future(self._run(method, args, route))
        self._task.set_name(method)
        self._replica.calls.add(self._task)
        self._task.add_done_callback(self._replica.calls.discard)

    async def _run(self, method: str, args: tuple, route: list[str]) -> None:
        items = getattr(self._replica.actor, method)(*args, route=route)
        try:
            hello = True
            async for data in items:
                while self._replica.hanging:
                    await asyncio.sleep(0.01)
                arrived = [data] if hello else await self._replica.network(Frame.decode(data))
                for item in arrived:
                    self._items.put_nowait(item if isinstance(item, bytes) else item.encode())
                hello = False
            self._items.put_nowait(StopAsyncIteration())
        except asyncio.CancelledError:
            error = RequestCancelledError("local") if self._cancelled else RayActorError()
            self._items.put_nowait(error)
            raise
        except Exception as error:
            self._items.put_nowait(error)
        finally:
            await items.aclose()

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> bytes:
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()


class LocalCluster:
    """A bus attached to local replicas, and the membership that Serve would report."""

    def __init__(self, replicas: list[LocalReplica], table: ReplicaTable):
        self.replicas = {replica.name: replica for replica in replicas}
        channel = uuid.uuid4().hex
        self.membership = membership.channel(channel)
        self.membership.update(frozenset(self.replicas))
        self.handle = LocalHandle(replicas, self.membership)
        self.table = table
        self.router_id = f"router-{channel[:8]}"
        self.bus = Bus(self.handle, channel, self.router_id, table)

    async def start(self) -> None:
        self.bus.start()
        await until(lambda: self.table.num_ready() == len(self.replicas))

    async def stop(self) -> None:
        """Detach; then nothing may be left at any replica or in the table."""
        await self.bus.close()
        for replica in self.replicas.values():
            if not replica.dead:
                await assert_idle(replica, self.router_id)
        assert self.bus._attempts == {}
        for entry in self.table._replicas.values():
            assert entry.bookings.num_in_flight == entry.bookings.num_unreported == 0
            assert entry.bookings.unreported_work == 0
        assert self.table.index._booked.masks == {}


async def assert_idle(replica: LocalReplica, router_id: str) -> None:
    """No request is alive, no block in use, no call of a request open, the router is not attached."""
    load = replica.engine.load
    await until(lambda: not load().num_running + load().num_waiting)
    await asyncio.wrap_future(replica.engine.call(lambda scheduler: scheduler.check()))
    assert load().blocks_in_use == 0
    await until(lambda: not replica.actor._finished)
    await until(lambda: router_id not in replica.actor._attachments)
    await until(lambda: all(task.get_name() == "attach" for task in replica.calls))


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(2e-3)

"""A request over HTTP ends when its client disconnects, and not because of anything else."""

from __future__ import annotations

import asyncio

import pytest

from quire.cluster.http.answer_response import until_disconnect


class Client:
    """The messages that the server receives from the client."""

    def __init__(self) -> None:
        self._left = asyncio.Event()
        self.error: Exception | None = None

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> dict[str, str]:
        await self._left.wait()
        if self.error is not None:
            raise self.error
        return {"type": "http.disconnect"}


class Work:
    """Work that runs until it is released, and records how it ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end = asyncio.Event()
        self.ended = ""
        self._error = error

    async def run(self) -> None:
        try:
            await self.may_end.wait()
            if self._error is not None:
                raise self._error
            self.ended = "done"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            await asyncio.sleep(0)  # its end takes some time
            raise


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def started(client: Client, work: Work) -> asyncio.Task[None]:
    """Start the work."""
    task = asyncio.create_task(until_disconnect(client.receive, work.run()))
    await settle()
    return task


def test_it_runs_to_its_end_and_the_watcher_with_it():
    async def run() -> None:
        client, work = Client(), Work()
        task = await started(client, work)
        work.may_end.set()
        await task
        await settle()
        assert work.ended == "done" and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_its_error_is_the_callers():
    async def run() -> None:
        work = Work(ValueError("no"))
        work.may_end.set()
        with pytest.raises(ValueError, match="no"):
            await until_disconnect(Client().receive, work.run())

    asyncio.run(run())


@pytest.mark.parametrize("error", [None, OSError("connection reset")], ids=["leaves", "breaks"])
def test_a_client_that_leaves_ends_it_and_nothing_else(error):
    async def run() -> None:
        client, work, after = Client(), Work(), []
        client.error = error

        async def handle() -> None:
            await until_disconnect(client.receive, work.run())
            await asyncio.sleep(0)  # not cancelled
            after.append(asyncio.current_task().cancelling())

        task = asyncio.create_task(handle())
        await settle()
        client.leave()
        await task
        assert work.ended == "cancelled" and after == [0]

    asyncio.run(run())


@pytest.mark.parametrize("leaves", [False, True])
def test_who_cancels_it_from_outside_sees_it_cancelled(leaves):
    async def run() -> None:
        client, work = Client(), Work()
        task = await started(client, work)
        if leaves:
            client.leave()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.ended == "cancelled"

    asyncio.run(run())


def test_a_client_that_leaves_with_the_last_byte_cancels_nobody():
    async def run() -> None:
        client, work = Client(), Work()
        task = await started(client, work)
        work.may_end.set()
        client.leave()
        await task
        assert work.ended == "done" and task.cancelling() == 0

    asyncio.run(run())

"""A fork's call waits for its parent's, for a bounded time."""

import asyncio
import time

from quire.replica.serving.arrivals import MAX_REMEMBERED, Arrivals


def test_a_fork_that_comes_first_waits_for_its_parent():
    async def main():
        arrivals, order = Arrivals(wait_s=5.0), []

        async def fork():
            assert await arrivals.wait("parent")
            order.append("fork")

        forks = [asyncio.create_task(fork()) for _ in range(3)]
        await asyncio.sleep(0.01)
        order.append("parent")
        arrivals.tell("parent")
        await asyncio.gather(*forks)
        assert order == ["parent", "fork", "fork", "fork"]
        assert await arrivals.wait("parent")

    asyncio.run(main())


def test_a_parent_that_does_not_come_is_not_waited_for_long():
    async def main():
        arrivals = Arrivals(wait_s=0.02)
        began = time.perf_counter()
        assert await asyncio.gather(*map(arrivals.wait, ["a", "a", "b"])) == [False] * 3
        assert 0.015 < time.perf_counter() - began < 5
        assert not arrivals._awaited

    asyncio.run(main())


def test_what_is_remembered_is_bounded():
    async def main():
        arrivals = Arrivals(wait_s=0.001)
        for key in range(MAX_REMEMBERED + 1):
            arrivals.tell(key)
        assert not await arrivals.wait(0)
        assert await arrivals.wait(30)

    asyncio.run(main())

"""Pages of snapshots leave room in the event loop for everything else."""

import asyncio
import itertools

from quire.router.transport.page_turns import PageTurns


def test_other_tasks_run_after_each_page():
    async def main():
        turns, done = PageTurns(), []

        async def attach_stream(name):
            for page in range(3):
                async with turns.turn():
                    done.append(f"{name}{page}")

        async def request():
            while len(done) - done.count("request") < 12:
                done.append("request")
                await asyncio.sleep(0)

        await asyncio.gather(*map(attach_stream, "abcd"), request())
        return done

    done = asyncio.run(main())
    pages = [i for i, what in enumerate(done) if what != "request"]
    assert len(pages) == 12
    assert all("request" in done[a:b] for a, b in itertools.pairwise(pages))


def test_a_page_that_fails_gives_its_turn_back():
    async def main():
        turns = PageTurns()
        try:
            async with turns.turn():
                raise ValueError("not a page")
        except ValueError:
            pass
        async with asyncio.timeout(10), turns.turn():
            return True

    assert asyncio.run(main())

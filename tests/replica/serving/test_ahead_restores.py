"""A prompt's KV is on the device before its request comes; a real engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from quire.protos.errors import Unavailable
from quire.protos.metric_families import join
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import Completion, Submit
from quire.replica.core.request import Request
from quire.replica.engine import Engine
from quire.replica.loop import LoopOutput
from quire.replica.serving import ahead_restores
from quire.replica.serving.ahead_restores import AheadRestores
from quire.replica.serving.replica_metrics import ReplicaMetrics

PROMPT = np.arange(5, 205, dtype=np.int32)
OPTIONS = dict(model="embedded", num_threads=1, num_blocks=64, max_model_len=512)


async def nothing_to_pull() -> Completion:
    return Completion("abort", 0, 0, 0)


class Replica:
    """An engine whose outputs reach the restores in their event loop, as in the actor."""

    def __init__(self, **options: object):
        self.engine = Engine(**OPTIONS | options, on_output=self._on_output)
        self.metrics = ReplicaMetrics(self.engine)
        self.restores: AheadRestores | None = None
        self.num_cached: dict[object, int] = {}
        self.reasons: list[str] = []  # of all ends

    def _on_output(self, output: LoopOutput) -> None:
        self._event_loop.call_soon_threadsafe(self._publish, output)

    def _publish(self, output: LoopOutput) -> None:
        self.metrics.on_output(output)
        for delta in output.deltas.whole:
            if delta.finish_reason is not None:
                self.restores.on_end(delta.key)
                self.num_cached[delta.key] = delta.facts.num_cached_tokens
                self.reasons.append(delta.finish_reason)

    async def restore(
        self,
        prompt_ids: np.ndarray = PROMPT,
        retain_s: float = 60.0,
        request_id: str = "test",
        pull: Callable[[], Awaitable[Completion]] = nothing_to_pull,
        num_emitted: int = 0,
    ) -> Completion:
        if self.restores is None:
            self._event_loop = asyncio.get_running_loop()
            self.restores = AheadRestores(self.engine)
        submit = Submit(
            "r",
            1,
            request_id,
            prompt_ids=prompt_ids,
            params=SamplingParams(),
            num_emitted=num_emitted,
            retain_s=retain_s,
        )
        return await self.restores.run(submit, None, pull)

    def num_live(self) -> int:
        load = self.engine.load()
        return load.num_running + load.num_waiting


@pytest.fixture
def replica():
    replica = Replica()
    with replica.engine:
        yield replica


def test_the_request_that_comes_finds_the_blocks_and_the_metrics_tell_of_it_alone(replica):
    async def run() -> None:
        await replica.restore()
        key = ("router", 7)
        params = SamplingParams(max_tokens=3, temperature=0.0)
        replica.engine.submit(Request(key, PROMPT, params))
        async with asyncio.timeout(60):
            while key not in replica.num_cached:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    size = replica.engine.config.block_size
    assert replica.num_cached["router", 7] == (len(PROMPT) - 1) // size * size
    assert replica.num_live() == 0
    page = join([replica.metrics.page({"replica": "r"})]).decode()
    assert f'quire_prompt_tokens_total{{replica="r"}} {len(PROMPT):.1f}\n' in page
    assert 'quire_output_tokens_total{replica="r"} 3.0\n' in page


def test_blocks_are_retained_for_as_long_as_asked(replica):
    asyncio.run(replica.restore(retain_s=0.5))
    assert replica.engine.load().blocks_retained > 0

    async def wait() -> None:
        async with asyncio.timeout(60):
            while replica.engine.load().blocks_retained:
                await asyncio.sleep(0.02)

    asyncio.run(wait())
    assert replica.engine.load().blocks_cached > 0


def hold(engine: Engine) -> None:
    """Let the engine begin nothing for a while."""
    engine.call(lambda scheduler: time.sleep(0.5))


async def aborted(replica: Replica) -> None:
    async with asyncio.timeout(60):
        while not replica.reasons:
            await asyncio.sleep(0.01)
    assert replica.reasons == ["abort"] and not replica.restores._ended


def test_one_that_does_not_end_is_given_up(replica, monkeypatch):
    monkeypatch.setattr(ahead_restores, "_MAX_S", 0.05)

    async def run() -> None:
        hold(replica.engine)
        await replica.restore()
        await aborted(replica)

    asyncio.run(run())


def test_one_that_is_cancelled_ends(replica):
    async def run() -> None:
        hold(replica.engine)
        task = asyncio.create_task(replica.restore())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await aborted(replica)

    asyncio.run(run())


def test_a_prompt_that_the_engine_refuses_raises_nothing(replica):
    asyncio.run(replica.restore(np.ones(10_000, np.int32)))
    assert not replica.restores._ended


def test_an_engine_that_is_closed_takes_none(replica):
    replica.engine.close()
    asyncio.run(replica.restore())
    assert not replica.restores._ended


def test_the_restore_of_a_stream_needs_no_safety_margin(monkeypatch):
    """Its stream needs none either, and would wait behind it."""
    monkeypatch.setattr(ahead_restores, "_MAX_S", 60.0)
    monkeypatch.setattr(ahead_restores, "_MAX_HOLD_S", 0.0)

    async def run() -> None:
        await replica.restore()  # nothing else runs yet
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        replica.engine.submit(Request("beside it", PROMPT[:9], params))
        async with asyncio.timeout(60):
            while not replica.engine.load().num_running:
                await asyncio.sleep(0.01)
        waits = asyncio.create_task(replica.restore(PROMPT[::-1].copy()))
        await asyncio.sleep(0.3)
        assert not waits.done()
        waits.cancel()
        await asyncio.wait([waits])
        await replica.restore(PROMPT[::-1].copy(), num_emitted=4)
        assert replica.reasons[1] == "abort" and len(replica.reasons) == 3
        replica.reasons.clear()
        replica.engine.abort("beside it")
        await aborted(replica)

    options = dict(safety_margin=0.99, num_blocks=300, max_model_len=4096)
    with (replica := Replica(**options)).engine:
        asyncio.run(run())


# -- turns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes", [True, False], ids=["its stream comes", "its stream is late"])
def test_the_next_one_waits_for_the_stream_of_the_one_before(replica, monkeypatch, comes):
    monkeypatch.setattr(ahead_restores, "_MAX_HOLD_S", 60.0 if comes else 0.3)
    monkeypatch.setattr(ahead_restores, "_MAX_WAIT_S", 60.0)

    async def run() -> None:
        await replica.restore(request_id="first")
        second = asyncio.create_task(replica.restore(PROMPT[::-1].copy(), request_id="second"))
        await asyncio.sleep(0.1)
        replica.restores.on_submitted("another")
        await asyncio.sleep(0.1)
        assert not second.done() and len(replica.reasons) == 1
        if comes:
            replica.restores.on_submitted("first")
        await second
        assert len(replica.reasons) == 2

    asyncio.run(run())


def test_one_that_waits_too_long_pulls_and_restores_nothing(replica, monkeypatch):
    monkeypatch.setattr(ahead_restores, "_MAX_HOLD_S", 60.0)
    monkeypatch.setattr(ahead_restores, "_MAX_WAIT_S", 0.05)
    pulls = []

    async def pull() -> Completion:
        pulls.append(1)
        return await nothing_to_pull()

    async def run() -> None:
        await replica.restore(request_id="first", pull=pull)
        await replica.restore(request_id="second", pull=pull)
        assert len(pulls) == 2 and len(replica.reasons) == 1

    asyncio.run(run())


def test_a_pull_that_brings_too_little_restores_nothing_and_ends_its_turn(replica, monkeypatch):
    monkeypatch.setattr(ahead_restores, "_MAX_WAIT_S", 60.0)
    late = Completion("error", 0, 0, 0, error=Unavailable("it is late").to_wire())

    async def pull() -> Completion:
        return late

    async def run() -> None:
        assert await replica.restore(pull=pull) == late
        assert not replica.reasons
        await replica.restore()
        assert replica.reasons == ["length"]

    asyncio.run(run())

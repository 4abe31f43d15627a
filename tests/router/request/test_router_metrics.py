"""The router's metrics of real requests on real engines, read from the text for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from engine_transport import EngineTransport, make_service
from prometheus_client.parser import text_string_to_metric_families

from quire.protos.errors import ERROR_CODES, InvalidRequest, ModelNotFound, Overloaded, SlowClient
from quire.protos.metric_families import join
from quire.router.admission.gate import AdmissionGate
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.request.router_metrics import FINISH_REASONS, RouterMetrics
from quire.router.request.service import RouterService
from quire.router.types import GenerationRequest

PROMPT = "A quire is a gathering of pages"


@pytest.fixture(scope="module")
def transport() -> Iterator[EngineTransport]:
    transport = EngineTransport()
    yield transport
    transport.engine.close()


class Router:
    """A service, and access to its metrics."""

    def __init__(self, transport: EngineTransport):
        self.metrics = RouterMetrics()
        self.service: RouterService = make_service(transport)
        self.service.observer = self.metrics
        self.metrics.follow(self.service.gate, transport)

    async def open(self, prompt: str = PROMPT, **fields: Any):
        fields = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0, **fields}
        return await self.service.generate(
            GenerationRequest(request_id="test", prompt=prompt, **fields)
        )

    async def answer(self, **fields: Any) -> list:
        return [delta async for delta in await self.open(**fields)]

    def read(self, name: str, **labels: str) -> float:
        text = join([self.metrics.page({})]).decode()
        (found,) = (
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        )
        return found

    def ends(self) -> dict[str, float]:
        """Answers by finish reason, without those that did not happen."""
        name = "quire_requests_finished_total"
        counts = {reason: self.read(name, finish_reason=reason) for reason in FINISH_REASONS}
        return {reason: count for reason, count in counts.items() if count}

    def refusals(self) -> dict[str, float]:
        name = "quire_requests_refused_total"
        counts = {code: self.read(name, code=code) for code in ERROR_CODES}
        return {code: count for code, count in counts.items() if count}


def run(transport: EngineTransport, scenario: Any) -> None:
    async def with_router() -> None:
        await scenario(Router(transport))

    work: Coroutine[Any, Any, None] = with_router()
    asyncio.run(work)


def test_answers_are_counted_by_finish_reason(transport):
    async def scenario(router: Router) -> None:
        assert router.ends() == {} and router.read("quire_requests_received_total") == 0
        lengths = [await router.answer(), await router.answer(n=2)]
        text = "".join(delta.text for delta in lengths[0])
        await router.answer(stop=(text[3:6],))
        assert router.ends() == {"length": 3, "stop": 1}
        assert router.read("quire_requests_received_total") == 3
        assert router.read("quire_request_seconds_count") == 4
        assert router.refusals() == {}

    run(transport, scenario)


def test_the_parts_of_a_request_are_its_whole_time(transport):
    async def scenario(router: Router) -> None:
        for _ in range(3):
            await router.answer(max_tokens=20)
        parts = [
            router.read(f"quire_request_{part}_seconds_sum")
            for part in ("queue", "prefill", "decode")
        ]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(router.read("quire_request_seconds_sum"), rel=1e-9)
        ttft_s = router.read("quire_time_to_first_token_seconds_sum")
        assert parts[0] + parts[1] == pytest.approx(ttft_s, rel=1e-3)
        for part in ("queue", "prefill", "decode"):
            assert router.read(f"quire_request_{part}_seconds_count") == 3
        assert router.read("quire_time_to_first_token_seconds_count") == 3
        assert 0 < router.read("quire_inter_token_seconds_count") <= 3 * 19

    run(transport, scenario)


def test_lengths_are_those_of_prompt_and_answer(transport):
    async def scenario(router: Router) -> None:
        stream = await router.open(max_tokens=5)
        async for _ in stream:
            pass
        assert router.read("quire_request_prompt_tokens_sum") == stream.usage.prompt_tokens > 1
        assert router.read("quire_request_output_tokens_sum") == 5
        assert router.read("quire_request_output_tokens_bucket", le="4") == 0
        assert router.read("quire_request_output_tokens_bucket", le="16") == 1

    run(transport, scenario)


def test_a_client_that_leaves_is_an_abort(transport):
    async def scenario(router: Router) -> None:
        stream = await router.open(max_tokens=300)
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        assert router.ends() == {"abort": 1} and router.refusals() == {}
        leaving = asyncio.create_task(router.open(max_tokens=300))
        while not router.service.ring.last(10) or len(router.service.ring.last(10)) < 2:
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait((leaving,))
        assert router.ends() == {"abort": 2} and router.refusals() == {}
        assert router.read("quire_request_queue_seconds_count") == 1

    run(transport, scenario)


def test_refusals_are_counted_by_error_code_and_are_no_answers(transport):
    async def scenario(router: Router) -> None:
        with pytest.raises(ModelNotFound):
            await router.open(model="another")
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                await router.open(max_tokens=-1)
        # A front end refuses an invalid request.
        router.service.refused(InvalidRequest("not JSON"))
        # As a request too many is refused: the queue holds none.
        router.service.gate = AdmissionGate(
            AdmissionLimits(max_queued_requests=0), router.service.clock
        )
        router.service.gate.check = _overloaded
        with pytest.raises(Overloaded):
            await router.open()
        assert router.refusals() == {"model_not_found": 1, "invalid_request": 3, "overloaded": 1}
        assert router.read("quire_requests_received_total") == 5
        assert router.read("quire_refusal_seconds_count") == 1
        assert router.ends() == {}

    run(transport, scenario)


def _overloaded(tenant: str, priority: int) -> None:
    raise Overloaded("the queue is full", retry_after_s=1.0)


def test_an_error_after_the_first_token_is_an_answer_that_failed(transport):
    async def scenario(router: Router) -> None:
        stream = await router.open(max_tokens=300)
        await anext(stream)
        stream.attempts.current.fail(
            SlowClient("the client has read nothing")
        )  # as the bus does it
        with pytest.raises(SlowClient):
            async for _ in stream:
                pass
        assert router.ends() == {"error": 1} and router.refusals() == {}

    run(transport, scenario)


def test_a_stream_that_migrates_is_one_answer(transport):
    async def scenario(router: Router) -> None:
        transport.lose_after = [3]
        await router.answer(max_tokens=20)
        assert router.ends() == {"length": 1}
        assert router.read("quire_migrations_total") == 1
        assert router.read("quire_migration_seconds_count") == 1
        assert router.read("quire_requests_received_total") == 1

    run(transport, scenario)


def test_gauges_are_those_of_the_gate_and_the_replicas(transport):
    async def scenario(router: Router) -> None:
        assert router.read("quire_router_attached_replicas") == 3
        assert router.read("quire_router_queued_requests") == 0

    run(transport, scenario)

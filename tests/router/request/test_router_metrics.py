"""The router's metrics of real requests on real engines, read from the text for Prometheus."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from engine_transport import EngineTransport, make_service
from prometheus_client.parser import text_string_to_metric_families

from quire.protos.errors import (
    ERROR_CODES,
    OVERLOAD_REASONS,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    SlowClient,
)
from quire.protos.metric_families import join
from quire.router.admission.gate import AdmissionGate
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.observer import SESSION_OUTCOMES
from quire.router.policy.by_name import make_policy
from quire.router.request.router_metrics import FINISH_REASONS, RouterMetrics
from quire.router.request.service import RouterService
from quire.router.types import GenerationRequest

PARTS = ("router", "queue", "prefill", "decode", "delivery")
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
        self.metrics.follow(self.service)

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
        parts = [router.read(f"quire_request_{part}_seconds_sum") for part in PARTS]
        assert min(parts[:4]) > 0 and parts[4] >= 0
        assert sum(parts) == pytest.approx(router.read("quire_request_seconds_sum"), rel=1e-9)
        ttft_s = router.read("quire_time_to_first_token_seconds_sum")
        assert sum(parts[:3]) == pytest.approx(ttft_s, rel=1e-3)
        for part in PARTS:
            assert router.read(f"quire_request_{part}_seconds_count") == 3
        assert router.read("quire_time_to_first_token_seconds_count") == 3
        assert 0 < router.read("quire_inter_token_seconds_count") <= 3 * 19
        per_token_s = router.read("quire_request_time_per_output_token_seconds_sum")
        assert per_token_s == pytest.approx(parts[3] / 19, rel=1e-9)

    run(transport, scenario)


def test_time_for_which_a_client_does_not_read_is_delivery(transport):
    async def scenario(router: Router) -> None:
        stream = await router.open(max_tokens=40)
        await anext(stream)
        # The engine generates the other tokens meanwhile.
        await asyncio.sleep(0.5)
        async for _ in stream:
            pass
        delivery_s = router.read("quire_request_delivery_seconds_sum")
        first_s = router.read("quire_time_to_first_token_seconds_sum")
        after_first_s = router.read("quire_request_seconds_sum") - first_s
        assert 0.25 < delivery_s < after_first_s
        decode_s = router.read("quire_request_decode_seconds_sum")
        assert decode_s + delivery_s == pytest.approx(after_first_s, rel=1e-3)
        # A client that reads at once leaves nothing unread for long.
        await router.answer(max_tokens=40)
        assert router.read("quire_request_delivery_seconds_sum") - delivery_s < delivery_s / 2

    run(transport, scenario)


def test_prefix_tokens_that_were_available_captured_and_delivered(transport):
    """A policy that looks for prefixes captures what one replica holds; one that does not captures a third of it."""

    def tokens(router: Router) -> list[float]:
        names = ("routed_prompt", "prefix_available", "prefix_captured", "prefix_delivered")
        return [router.read(f"quire_{name}_tokens_total") for name in names]

    async def scenario(router: Router) -> None:
        router.service.policy = make_policy("prefix_affinity")
        prompt = tuple(range(7, 307))
        await router.answer(prompt=prompt, n=2)
        # The engine is one under three names, so it delivers what no table knew of.
        routed, available, captured, delivered = tokens(router)
        assert (routed, available, captured) == (300, 0, 0) and delivered <= 300
        held = 300 // 64 * 64
        hashes = await router.service._prompt_encoder.hashes(
            np.array(prompt), next(iter(transport.hellos.values())), ""
        )
        router.service.table.index.book("r2", hashes)
        await router.answer(prompt=prompt)
        assert tokens(router)[:3] == [600, held, held]
        assert tokens(router)[3] > delivered
        router.service.policy = make_policy("round_robin")
        for _ in range(3):
            await router.answer(prompt=prompt)
        assert tokens(router)[:3] == [1500, 4 * held, 2 * held]

    run(transport, scenario)


def test_requests_of_a_session_are_counted_by_where_they_went(transport):
    async def scenario(router: Router) -> None:
        replicas = []
        for _ in range(6):
            stream = await router.open(session="talk")
            replicas.append(stream.explain.replica)
            async for _ in stream:
                pass
        await router.answer()
        name = "quire_session_requests_total"
        found = {outcome: router.read(name, outcome=outcome) for outcome in SESSION_OUTCOMES}
        num_same = sum(one == other for one, other in itertools.pairwise(replicas))
        assert found == {"same": num_same, "other": 5 - num_same, "unknown": 1}
        assert router.read("quire_router_sessions") == 1

    run(transport, scenario)


def test_processor_time_grows_with_the_work(transport):
    async def scenario(router: Router) -> None:
        before_s = router.read("quire_process_cpu_seconds_total")
        began_s = time.process_time()
        while time.process_time() - began_s < 0.05:
            pass
        assert router.read("quire_process_cpu_seconds_total") - before_s >= 0.05

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
        name = "quire_requests_overloaded_total"
        reasons = {reason: router.read(name, reason=reason) for reason in OVERLOAD_REASONS}
        assert {k: v for k, v in reasons.items() if v} == {"max_queued_requests": 1}
        assert router.ends() == {}

    run(transport, scenario)


def _overloaded(tenant: str, priority: int) -> None:
    raise Overloaded("the queue is full", retry_after_s=1.0, reason="max_queued_requests")


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
        name = "quire_answers_failed_total"
        failed = {code: router.read(name, code=code) for code in ERROR_CODES}
        assert {code: count for code, count in failed.items() if count} == {"slow_client": 1}

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


def test_the_regret_has_a_series_for_each_policy_of_the_last_minutes(transport):
    family = "quire_routing_regret"

    async def scenario(router: Router) -> None:
        for number in range(2):
            await router.answer(prompt=f"{number} {PROMPT}")
            router.service.regret.step()
            assert router.read(f"{family}_requests", policy="slo") == number + 1
        (regret,) = router.service.regret.regrets
        assert router.read(f"{family}_seconds", policy="slo") == regret.mean_s
        assert router.read(f"{family}_low_seconds", policy="slo") == regret.low_s
        assert router.read(f"{family}_high_seconds", policy="slo") == regret.high_s
        modelled_s = router.read(f"{family}_modelled_delay_seconds", policy="slo")
        assert 0 <= regret.mean_s <= modelled_s
        assert router.read(f"{family}_cpu_seconds_total") > 0
        router.service.policy = make_policy("round_robin")
        await router.answer(prompt=f"3 {PROMPT}")
        router.service.regret.step()
        router.service.regret.regrets = router.service.regret.regrets[1:]  # as time passes
        assert router.read(f"{family}_requests", policy="round_robin") == 1
        text = join([router.metrics.page({})]).decode()
        assert 'policy="slo"' not in text
        assert f"{family}_high_seconds{{" not in text  # one sample has no interval

    run(transport, scenario)

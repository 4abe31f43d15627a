"""Tenants and their bills, over a real engine: what is charged, and what tenants cannot share."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from engine_transport import EngineTransport, make_service

from quire.cluster.auth.access_control import AccessControl
from quire.cluster.auth.access_rules import Right
from quire.cluster.auth.key_file import new_key
from quire.cluster.auth.key_ring import KeyRing
from quire.cluster.auth.keyed_service import KeyedService
from quire.cluster.auth.request_bill import Ledger
from quire.cluster.auth.tenant_counters import TenantCounters
from quire.protos.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    RateLimited,
)
from quire.router.question_types import Question
from quire.router.request import resume
from quire.router.request.resume import EventIds
from quire.router.types import GenerationRequest, Mark, Usage

QUOTA = 10_000
PROMPT = "The harbour at night, and the lighthouse above it. " * 6
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


class Lines(list):
    """Stands in for `UsageLog`."""

    def put(self, make_line: Callable[[], dict]) -> None:
        self.append(make_line())


class Door:
    """Two tenants of one router."""

    def __init__(self, transport: EngineTransport, folder: Any):
        self.router = make_service(transport)
        self.lines = Lines()
        entries, secrets = [], {}
        for name, tenant in (("a", "team-a"), ("a2", "team-a"), ("b", "team-b")):
            secrets[name], digest = new_key()
            quotas = {"tokens_per_minute": QUOTA, "concurrent_requests": 2}
            entry = {"sha256": digest, "name": name, "tenant": tenant, "rights": ["generate"]}
            entries.append(entry | {"quotas": quotas})
        path = folder / "keys.json"
        path.write_text(json.dumps({"keys": entries}))
        ledger = Ledger(
            counters=TenantCounters(), log=self.lines, num_routers=lambda: 1, clock=lambda: 0.0
        )
        self.access = AccessControl(KeyRing(path, max_labels=9), ledger)
        self.secrets = secrets

    def service(self, name: str) -> KeyedService:
        key = self.access.caller(self.secrets[name].encode(), Right.GENERATE)
        return self.access.service(self.router, key)

    def used(self, name: str) -> tuple[int, int]:
        """Tokens taken from a key's bucket, and its running requests."""
        meter = self.access.caller(self.secrets[name].encode(), Right.GENERATE).meter
        return QUOTA - meter.tokens(0.0, 1).remaining, meter.num_running

    async def ask(self, name: str, **fields: Any) -> Usage:
        stream = await self.service(name).generate(request(**fields))
        async for _ in stream:
            pass
        await stream.aclose()
        return stream.usage


def request(**fields: Any) -> GenerationRequest:
    if not {"prompts", "prompt"} & fields.keys():
        fields["prompt"] = PROMPT
    return GenerationRequest(**({"request_id": "r"} | GREEDY | fields))


@pytest.fixture(scope="module")
def transport() -> Iterator[EngineTransport]:
    transport = EngineTransport()
    yield transport
    transport.engine.check()
    transport.engine.close()


@pytest.fixture
def run(transport, tmp_path) -> Callable[[Callable[[Door], Coroutine]], None]:
    def go(test: Callable[[Door], Coroutine]) -> None:
        async def main() -> None:
            await test(Door(transport, tmp_path))

        asyncio.run(asyncio.wait_for(main(), 120))

    return go


def test_tenants_share_no_cache_and_keys_of_one_tenant_do(run):
    async def test(door: Door) -> None:
        first = await door.ask("a")
        assert first.cached_tokens == 0
        assert (await door.ask("a")).cached_tokens > 0
        assert (await door.ask("a2")).cached_tokens > 0
        for salt in ("", "team-a", "a"):
            assert (await door.ask("b", tenant=salt)).cached_tokens == 0
        # The own salt divides a tenant's cache further.
        assert (await door.ask("a", tenant="salt")).cached_tokens == 0
        assert (await door.ask("a2", tenant="salt")).cached_tokens > 0

    run(test)


def test_an_event_id_is_of_no_use_to_another_tenant(run, transport):
    """Not even with the same prompt, because its fingerprint covers the tenant. It names nothing to cancel."""

    async def test(door: Door) -> None:
        fields = {"prompt": PROMPT + "A secret."}
        stream = await door.service("a").generate(request(**fields))
        ids = EventIds(stream.origin, [Mark()])
        events = [ids.after(delta) async for delta in stream]
        await stream.aclose()
        fields["resume_from"] = resume.parse(events[0], "resume_from")
        num_submits = len(transport.submits)
        with pytest.raises(InvalidRequest, match="this id belongs to another request"):
            await door.ask("b", **fields)
        assert len(transport.submits) == num_submits and door.used("b")[0] == 0
        usage = await door.ask("a2", **fields)
        assert usage.completion_tokens == stream.usage.completion_tokens

    run(test)


def test_a_decision_is_one_request_of_its_key(run):
    """Tokens that its prompts share are charged once, it has one line, and no other tenant hits its cache."""
    questions = [Question(f"Is it {hour} o'clock?", ("yes", "no", "perhaps")) for hour in range(9)]
    asked = GenerationRequest(request_id="d", messages=({"role": "user", "content": PROMPT},))

    async def test(door: Door) -> None:
        first = (await door.service("a").score(asked, questions)).usage
        assert first.cached_tokens == 0
        assert door.used("a") == (first.prompt_tokens, 0)
        assert (await door.service("b").score(asked, questions)).usage == first
        again = (await door.service("a").score(asked, questions)).usage
        assert first.prompt_tokens > again.cached_tokens > 64
        assert door.used("a") == (2 * first.prompt_tokens, 0)
        line = door.lines[-1]
        assert (line["request_id"], line["finish_reasons"]) == ("d", ["stop"])
        assert (line["prompt_tokens"], line["completion_tokens"]) == (first.prompt_tokens, 0)
        assert line["cached_tokens"] == {"device": again.cached_tokens, "host": 0, "peer": 0}
        assert len(door.lines) == 3
        # What is refused costs nothing, and a running request counts until it has ended.
        late = dataclasses.replace(asked, deadline_s=1e-9)
        with pytest.raises(DeadlineExceeded):
            await door.service("a").score(late, questions)
        assert door.used("a") == (2 * first.prompt_tokens, 0)
        task = asyncio.ensure_future(door.service("b").score(asked, questions))
        while door.used("b")[1] != 1:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert door.used("b")[1] == 0

    run(test)


def test_embeddings_are_one_request_of_their_key(run):
    # No other test has sent this beginning.
    inputs = ("To embed. " + PROMPT, "Another")
    asked = GenerationRequest(request_id="e", prompts=inputs, max_tokens=1)

    async def test(door: Door) -> None:
        first = (await door.service("a").embed(asked, None)).usage
        assert door.used("a") == (first.prompt_tokens, 0)
        assert (await door.service("b").embed(asked, None)).usage.cached_tokens == 0
        again = (await door.service("a2").embed(asked, None)).usage
        assert again.cached_tokens > 64, "keys of one tenant share the cache"
        line = door.lines[-1]
        assert (line["request_id"], line["finish_reasons"]) == ("e", ["stop"])
        assert (line["prompt_tokens"], line["completion_tokens"]) == (first.prompt_tokens, 0)
        assert len(door.lines) == 3
        with pytest.raises(ContextLengthExceeded):
            await door.service("a").embed(dataclasses.replace(asked, prompts=(PROMPT * 20,)), None)
        assert door.used("a") == (first.prompt_tokens, 0)
        while True:
            try:
                await door.service("b").embed(
                    dataclasses.replace(asked, prompts=(PROMPT,) * 9), None
                )
            except RateLimited:
                break

    run(test)


def test_the_queue_is_fair_to_the_key_s_tenant(run):
    """Not to a salt, with which one tenant would be many."""

    async def test(door: Door) -> None:
        seen, charged = [], []
        enter, charge = door.router.gate.enter, door.router.gate.charge
        door.router.gate.enter = lambda arrival: seen.append(arrival.tenant) or enter(arrival)
        door.router.gate.charge = lambda tenant, n: charged.append(tenant) or charge(tenant, n)
        for salt in ("", "x", "y"):
            await door.ask("a", tenant=salt)
        assert seen == ["team-a"] * 3 and set(charged) == {"team-a"}

    run(test)


def test_the_cache_is_fair_to_the_key_s_tenant(run, transport):
    """Not to a salt; and without keys one pays for all."""

    async def test(door: Door) -> None:
        for salt in ("", "x"):
            await door.ask("a2", tenant=salt)
        stream = await door.router.generate(request(tenant="salt"))
        async for _ in stream:
            pass
        assert [submit.payer for submit in transport.submits] == ["team-a", "team-a", ""]
        assert len({submit.tenant for submit in transport.submits}) == 3

    run(test)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 0.9, "seed": 1},
        {"prompts": ("Once", "Once upon", PROMPT), "n": 2, "temperature": 0.9},
        {"max_tokens": 0, "echo": True},
        {"max_tokens": 1},
    ],
    ids=["one", "three choices", "list", "prompt only", "one token"],
)
def test_the_bill_is_the_usage_that_the_client_sees(run, fields: dict):
    async def test(door: Door) -> None:
        usage = await door.ask("a", **fields)
        (line,) = door.lines
        assert line["prompt_tokens"] == usage.prompt_tokens
        assert line["completion_tokens"] == usage.completion_tokens
        assert sum(line["cached_tokens"].values()) == usage.cached_tokens
        assert set(line["finish_reasons"]) == {"length"} and line["tenant"] == "team-a"
        assert line["ms"]["prefill"] > 0
        assert door.used("a") == (usage.prompt_tokens + usage.completion_tokens, 0)
        assert door.used("b") == (0, 0)

    run(test)


def test_a_client_that_leaves_pays_for_what_was_generated(run):
    async def test(door: Door) -> None:
        stream = await door.service("a").generate(request(max_tokens=100))
        assert door.used("a")[1] == 1
        async for _ in stream:
            break
        await stream.aclose()
        (line,) = door.lines
        assert line["finish_reasons"] == ["abort"] and 1 <= line["completion_tokens"] < 100
        used, running = door.used("a")
        assert used == line["prompt_tokens"] + line["completion_tokens"] and running == 0

    run(test)


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"deadline_s": 1e-9}, DeadlineExceeded), ({"max_tokens": 100_000}, ContextLengthExceeded)],
    ids=["after the charge", "before it"],
)
def test_a_refused_request_costs_nothing(run, fields: dict, error: type[Exception]):
    async def test(door: Door) -> None:
        with pytest.raises(error):
            await door.ask("a", **fields)
        assert door.used("a") == (0, 0) and not door.lines

    run(test)


def test_quotas_refuse_before_a_replica_is_asked(run, transport):
    async def test(door: Door) -> None:
        streams = [await door.service("a").generate(request(max_tokens=50)) for _ in range(2)]
        num_submits = len(transport.submits)
        with pytest.raises(RateLimited, match="concurrent_requests 2"):
            await door.ask("a")
        assert (await door.ask("a2")).completion_tokens == 6  # each key has its own
        for stream in streams:
            await stream.aclose()
        door.access.caller(door.secrets["b"].encode(), Right.GENERATE).meter.charge(QUOTA)
        with pytest.raises(RateLimited, match="tokens_per_minute"):
            await door.ask("b")
        assert len(transport.submits) == num_submits + 1 and door.used("b")[1] == 0

    run(test)

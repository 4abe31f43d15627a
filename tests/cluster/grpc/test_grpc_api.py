"""The gRPC front end, through a real channel, called as Ray Serve calls it (`live_grpc.py`)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from live_grpc import MODES, STREAMING, UNARY, Clients, failure, request, run, serving, until

from quire.cluster.api_common.watchers import Watchers, client_of
from quire.cluster.auth.access_rules import GRPC_RULES, Right
from quire.cluster.grpc import grpc_api, grpc_servicers
from quire.cluster.grpc.grpc_api import GrpcApi
from quire.protos import control_pb2, generation_pb2
from quire.protos.errors import EngineError, Overloaded, Unavailable

# --------------------------------------------------------------------------------------------------
# Generation
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_stream_says_the_same_as_the_whole_answer(service, mode: str) -> None:
    asked = request(prompt="once upon", sampling={"max_tokens": 30, "seed": 5})

    async def body(clients: Clients) -> None:
        once = clients.generation.GenerateOnce(asked)
        whole = await once
        stream = clients.generation.Generate(asked)
        responses = [response async for response in stream]
        assert "".join(r.text for r in responses) == whole.text != ""
        ids = [i for r in responses for i in r.token_ids]
        assert ids == list(whole.token_ids) and len(ids) == 30
        assert [r.index for r in responses] == list(range(30))
        first, *rest = responses
        assert (first.seed, first.model) == (whole.seed, whole.model) == (5, "acme/tiny")
        assert len(first.request_id) == 32
        assert not any(r.HasField("seed") or r.model for r in rest)
        *before, last = responses
        assert not any(r.finish_reason or r.HasField("usage") for r in before)
        assert last.finish_reason == whole.finish_reason == generation_pb2.FINISH_REASON_LENGTH
        assert last.usage == whole.usage
        assert whole.usage.completion_tokens == 30 and whole.usage.cached_tokens == 9
        assert (whole.usage.host_cached_tokens, whole.usage.peer_cached_tokens) == (3, 2)
        for call in (once, stream):
            metadata = dict(await call.trailing_metadata())
            assert metadata["x-quire-replica"] == "replica-a"
            assert metadata["x-quire-cached-tokens"] == "9"
        assert all(s.closed.is_set() for s in service.streams)

    run(service, mode, body)


def test_every_field_reaches_the_router(service) -> None:
    turns = [
        generation_pb2.ChatMessage(role="developer", content="be brief"),
        generation_pb2.ChatMessage(role="user", content="hi", name="ann"),
    ]
    asked = request(
        model="acme/tiny",
        messages=generation_pb2.ChatMessages(
            messages=turns,
            chat_template_kwargs='{"enable_thinking": false, "date": "1 May"}',
            add_generation_prompt=False,
            continue_final_message=True,
        ),
        add_special_tokens=False,
        request_id="label",
        sampling={
            "max_tokens": 7,
            "min_tokens": 2,
            "temperature": 0.0,
            "top_p": 0.5,
            "top_k": 3,
            "seed": 2**64 - 1,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "presence_penalty": -1.0,
            "frequency_penalty": 0.5,
            "logit_bias": {12: 1.5, 7: -100.0},
            "allowed_token_ids": [5, 7, 12],
            "bad_words": ["x", "y"],
        },
        n=2,
        logprobs=4,
        prompt_logprobs=5,
        stop=["a", "b"],
        stop_token_ids=[1],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        cache_salt="tenant",
        session="session",
        priority=-2,
        prediction="guess",
    )

    async def body(clients: Clients) -> None:
        response = await clients.generation.GenerateOnce(asked)
        assert response.seed == 2**64 - 1 and response.request_id == "label"
        usage = response.usage
        assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (5, 2)
        await clients.generation.GenerateOnce(request(prompt="x", sampling={"max_tokens": 1}))
        metadata = [("x-session-id", "of metadata")]
        for named in (asked, request(prompt="x")):
            await clients.generation.GenerateOnce(named, metadata=metadata)

    run(service, "direct", body)
    full, bare, *named = service.requests
    assert [r.session for r in (full, bare, *named)] == ["session", "", "session", "of metadata"]
    assert full.messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ann"},
    )
    sampling = (full.max_tokens, full.min_tokens, full.temperature, full.top_p, full.top_k)
    assert sampling == (7, 2, 0.0, 0.5, 3) and full.seed == 2**64 - 1
    assert full.chat_template_kwargs == {"enable_thinking": False, "date": "1 May"}
    assert (full.add_generation_prompt, full.continue_final_message) == (False, True)
    assert (full.add_special_tokens, bare.add_special_tokens) == (False, None)
    assert (bare.chat_template_kwargs, bare.continue_final_message) == (None, False)
    assert (full.n, full.logprobs, bare.n, bare.logprobs) == (2, 4, 1, None)
    assert (full.prompt_logprobs, bare.prompt_logprobs) == (5, None)
    assert (full.prediction, bare.prediction) == ("guess", "")
    assert (full.min_p, full.repetition_penalty) == (0.25, 1.5)
    assert (full.presence_penalty, full.frequency_penalty) == (-1.0, 0.5)
    assert full.logit_bias == ((7, -100.0), (12, 1.5))
    assert (full.allowed_token_ids, full.bad_words) == ((5, 7, 12), ("x", "y"))
    assert (bare.min_p, bare.logit_bias, bare.allowed_token_ids) == (None, (), ())
    assert (full.stop, full.stop_token_ids) == (("a", "b"), (1,))
    assert full.ignore_eos and full.include_stop_str_in_output and not full.skip_special_tokens
    assert (full.tenant, full.session, full.priority) == ("tenant", "session", -2)
    unset = (bare.model, bare.min_tokens, bare.temperature, bare.top_p, bare.top_k, bare.seed)
    assert unset == (None,) * 6 and bare.skip_special_tokens and bare.stop == ()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs must be the text of a JSON object"),
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs must be the text of a JSON object"),
        ({"chat_template_kwargs": '{"tools": 1}'}, "chat_template_kwargs.tools must not be given"),
        ({"chat_template_kwargs": " " * 65537}, "at most 65536 characters of JSON, got 65537"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message must not be true together with add_generation_prompt",
        ),
    ],
)
def test_wrong_options_of_the_template_are_invalid_arguments(service, options, field) -> None:
    turn = generation_pb2.ChatMessage(role="user", content="hi")
    asked = request(messages=generation_pb2.ChatMessages(messages=[turn], **options))

    async def body(clients: Clients) -> None:
        error = await failure(clients.generation.GenerateOnce(asked))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and field in error.details()

    run(service, "direct", body)


def test_prompt_logprobs_come_with_the_first_message(service) -> None:
    asked = request(prompt="once", sampling={"max_tokens": 3}, n=2, prompt_logprobs=2)

    async def body(clients: Clients) -> None:
        whole = await clients.generation.GenerateOnce(asked)
        assert [s.token.token_id for s in whole.prompt_logprobs] == [1, 2, 3]
        assert [s.token.logprob for s in whole.prompt_logprobs] == [-2.5, -3.5, -4.5]
        assert [s.rank for s in whole.prompt_logprobs] == [3, 4, 5]
        assert all(len(s.top) == 2 for s in whole.prompt_logprobs)
        first, *others = [response async for response in clients.generation.Generate(asked)]
        assert first.prompt_logprobs == whole.prompt_logprobs
        assert not any(response.prompt_logprobs for response in others)

    run(service, "direct", body)


def test_choices_and_logprobs_are_the_same_streamed_and_whole(service) -> None:
    asked = request(prompt="once upon", sampling={"max_tokens": 5, "seed": 5}, n=3, logprobs=2)

    async def body(clients: Clients) -> None:
        whole = await clients.generation.GenerateOnce(asked)
        choices = [whole, *whole.more_choices]
        assert len({choice.text for choice in choices}) == 3
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (9, 15)
        responses = [response async for response in clients.generation.Generate(asked)]
        for i, choice in enumerate(choices):
            mine = [response for response in responses if response.choice == i]
            assert "".join(r.text for r in mine) == choice.text
            assert [t for r in mine for t in r.token_ids] == list(choice.token_ids)
            assert [r.index for r in mine] == list(range(5))
            assert [s for r in mine for s in r.logprobs] == list(choice.logprobs)
            assert [bool(r.finish_reason) for r in mine] == [False] * 4 + [True]
            assert len(choice.logprobs) == 5
            for scores, token_id in zip(choice.logprobs, choice.token_ids, strict=True):
                assert scores.token.token_id == token_id and scores.token.logprob == -1.5 - token_id
                assert [top.utf8 for top in scores.top] == [b"\xe6", b"word0 "]
        assert [r.HasField("usage") for r in responses] == [False] * 14 + [True]
        assert responses[-1].usage == whole.usage
        plain = await clients.generation.GenerateOnce(request(prompt="x"))
        assert not plain.logprobs and not plain.more_choices

    run(service, "direct", body)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"json_schema": '{ "type": "array"}'}, ("json_schema", '{"type":"array"}')),
        ({"json_object": True}, ("json_schema", '{"type":"object"}')),
        ({"regex": "a+"}, ("regex", "a+")),
        ({"choice": generation_pb2.Texts(texts=["a", "b"])}, ("choice", '["a", "b"]')),
        ({"grammar": "start: A"}, ("lark", "start: A")),
    ],
)
def test_structured_output_reaches_the_router(service, asked, expected) -> None:
    structured = generation_pb2.StructuredOutput(**asked)

    async def body(clients: Clients) -> None:
        await clients.generation.GenerateOnce(request(prompt="x", structured_output=structured))

    run(service, "direct", body)
    (name,) = asked
    assert service.requests[0].grammar == (*expected, f"structured_output.{name}")


@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
def test_stop_reason_is_the_string_or_the_token(service, method: str) -> None:
    async def body(clients: Clients) -> None:
        async def last(**fields: Any) -> Any:
            asked = request(prompt="x", sampling={"max_tokens": 9, "seed": 2}, **fields)
            if method == "GenerateOnce":
                return await clients.generation.GenerateOnce(asked)
            return [response async for response in clients.generation.Generate(asked)][-1]

        plain = await clients.generation.GenerateOnce(
            request(prompt="x", sampling={"max_tokens": 9, "seed": 2})
        )
        words, ids = plain.text.split(), list(plain.token_ids)
        by_string = await last(stop=[words[4]])
        assert by_string.WhichOneof("stop_reason") == "stop_string"
        assert by_string.stop_string == words[4]
        first = next(i for i, word in enumerate(words) if words[4] in word)
        assert by_string.usage.completion_tokens == first + 1
        by_token = await last(stop_token_ids=[ids[3]])
        assert by_token.finish_reason == generation_pb2.FINISH_REASON_STOP
        assert by_token.stop_token_id == ids[3]
        assert by_token.usage.completion_tokens == ids.index(ids[3]) + 1

    run(service, "direct", body)


# --------------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------------

INVALID = [
    (generation_pb2.GenerateRequest(), "input", "invalid_request"),
    (request(prompt="", add_special_tokens=False), "prompt", "invalid_request"),
    (request(token_ids=generation_pb2.TokenIds()), "prompt", "invalid_request"),
    (request(token_ids=generation_pb2.TokenIds(ids=[100])), "prompt[0]", "invalid_request"),
    (request(token_ids=generation_pb2.TokenIds(ids=[2**32 - 1])), "prompt[0]", "invalid_request"),
    (request(messages=generation_pb2.ChatMessages()), "messages", "invalid_request"),
    (
        request(
            messages=generation_pb2.ChatMessages(messages=[generation_pb2.ChatMessage(role="elf")])
        ),
        "messages[0].role",
        "invalid_request",
    ),
    (request(prompt="x" * 600), "prompt", "context_length_exceeded"),
    (request(prompt="x", sampling={"max_tokens": 0}), "max_tokens", "invalid_request"),
    (request(prompt="x", sampling={"max_tokens": 600}), "max_tokens", "context_length_exceeded"),
    (request(prompt="x", sampling={"temperature": float("nan")}), "temperature", "invalid_request"),
    (request(prompt="x", sampling={"top_p": float("inf")}), "top_p", "invalid_request"),
    (request(prompt="x", sampling={"top_k": -2}), "top_k", "invalid_request"),
    (request(prompt="x", sampling={"min_p": 2.0}), "min_p", "invalid_request"),
    (request(prompt="x", sampling={"logit_bias": {100: 1.0}}), "logit_bias[0]", "invalid_request"),
    (
        request(prompt="x", structured_output=generation_pb2.StructuredOutput()),
        "structured_output",
        "invalid_request",
    ),
    (
        request(prompt="x", structured_output=generation_pb2.StructuredOutput(json_schema="[")),
        "structured_output.json_schema",
        "invalid_request",
    ),
    (request(prompt="x", n=0), "n", "invalid_request"),
    (request(prompt="x", n=33), "n", "invalid_request"),
    (request(prompt="x", logprobs=21), "logprobs", "invalid_request"),
    (request(prompt="x", prompt_logprobs=21), "prompt_logprobs", "invalid_request"),
    (request(prompt="x", stop=[""]), "stop[0]", "invalid_request"),
    (request(prompt="x", stop_token_ids=[100]), "stop_token_ids[0]", "invalid_request"),
    (request(prompt="x", request_id="a\nb"), "request_id", "invalid_request"),
]


@pytest.mark.parametrize(("asked", "field", "code"), INVALID)
def test_bad_field_is_named(service, asked, field: str, code: str) -> None:
    async def body(clients: Clients) -> None:
        unary = await failure(clients.generation.GenerateOnce(asked))
        stream = await failure(clients.generation.Generate(asked))
        assert unary.code() == stream.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert unary.details() == stream.details() and field.split("[")[0] in unary.details()
        metadata = dict(unary.trailing_metadata())
        assert metadata["x-quire-error-field"] == field
        assert metadata["x-quire-error-code"] == code

    run(service, "direct", body)


@pytest.mark.parametrize("mode", MODES)
def test_errors_have_their_status(service, mode: str) -> None:
    unknown = request(model="other", prompt="x")

    async def body(clients: Clients) -> None:
        async def both(asked: Any) -> list[grpc.aio.AioRpcError]:
            return [
                await failure(clients.generation.GenerateOnce(asked)),
                await failure(clients.generation.Generate(asked)),
            ]

        assert {e.code() for e in await both(unknown)} == {grpc.StatusCode.NOT_FOUND}

        service.refusal = Overloaded("the queue is full", retry_after_s=0.25)
        errors = await both(request())
        assert {e.code() for e in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert {e.details() for e in errors} == {"the queue is full"}
        # If a stream fails with its first message, Serve's proxy loses the metadata.
        for error in errors if mode == "direct" else errors[:1]:
            assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "250"

        service.refusal = Unavailable("no replica is ready", retry_after_s=1)
        errors = await both(request())
        errors.append(
            await failure(clients.control.GetModelInfo(control_pb2.GetModelInfoRequest()))
        )
        errors.append(await failure(clients.control.WatchCache(control_pb2.WatchCacheRequest())))
        assert {e.code() for e in errors} == {grpc.StatusCode.UNAVAILABLE}

        service.refusal = RuntimeError("secret detail")
        errors = await both(request())
        assert {e.code() for e in errors} == {grpc.StatusCode.INTERNAL}
        assert all(e.details().startswith("internal error, id=") for e in errors)

    run(service, mode, body)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cause", ["engine", "abort", "no reason"])
def test_an_answer_that_was_cut_off_does_not_look_complete(service, mode, cause) -> None:
    if cause == "engine":
        service.fail_at, service.failure = 3, EngineError("step failed")
    else:
        service.last_reason = {"abort": "abort", "no reason": None}[cause]
    status = grpc.StatusCode.CANCELLED if cause == "abort" else grpc.StatusCode.INTERNAL

    async def body(clients: Clients) -> None:
        for call in (clients.generation.GenerateOnce, clients.generation.Generate):
            assert (await failure(call(request()))).code() == status
        await until(lambda: all(s.closed.is_set() for s in service.streams))

    run(service, mode, body)


# --------------------------------------------------------------------------------------------------
# Clients that disconnect
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_cancel_closes_the_stream(service, mode: str) -> None:
    service.token_s = 0.02
    asked = request(prompt="x", sampling={"max_tokens": 500})

    async def body(clients: Clients) -> None:
        stream = clients.generation.Generate(asked)
        await anext(aiter(stream))
        stream.cancel()
        await until(lambda: service.streams[0].closed.is_set())
        once = asyncio.ensure_future(clients.generation.GenerateOnce(asked))
        await until(lambda: len(service.streams) == 2)
        once.cancel()
        await until(lambda: service.streams[1].closed.is_set())
        assert all(s.usage.completion_tokens < 100 for s in service.streams)

    run(service, mode, body)


@pytest.mark.parametrize("mode", MODES)
def test_cancel_before_the_first_token_cancels_the_request(service, mode: str) -> None:
    service.generate_s = 30

    async def body(clients: Clients) -> None:
        stream = clients.generation.Generate(request())
        reader = asyncio.ensure_future(anext(aiter(stream)))
        await until(lambda: service.requests)
        stream.cancel()
        await until(service.cancelled_in_generate.is_set)
        await asyncio.gather(reader, return_exceptions=True)

    run(service, mode, body)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["Generate", "GenerateOnce"])
def test_deadline_ends_the_request(service, mode: str, method: str) -> None:
    service.token_s = 0.02
    asked = request(prompt="x", sampling={"max_tokens": 500})

    async def body(clients: Clients) -> None:
        for timeout_s in (0.3, 3.0, 8.0):  # the service may get the first one too late
            error = await failure(getattr(clients.generation, method)(asked, timeout=timeout_s))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if service.streams:
                break
        await until(lambda: service.streams[0].closed.is_set())

    run(service, mode, body)


def test_a_slow_reader_does_not_end_its_stream(service) -> None:
    async def body(clients: Clients) -> None:
        stream = clients.generation.Generate(request(prompt="x", sampling={"max_tokens": 400}))
        count = 0
        async for _ in stream:
            count += 1
            if count % 100 == 0:
                await asyncio.sleep(0.05)
        assert count == 400

    run(service, "direct", body)


# --------------------------------------------------------------------------------------------------
# Control and health
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_control_reports_model_and_load(service, mode: str) -> None:
    async def body(clients: Clients) -> None:
        info = await clients.control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert (info.name, info.revision, info.dtype) == ("acme/tiny", "main", "float32")
        assert (info.max_model_len, info.vocab_size, info.block_size) == (512, 100, 16)
        assert list(info.eos_token_ids) == [2, 3]
        (load,) = (await clients.control.GetLoads(control_pb2.GetLoadsRequest())).replicas
        assert (load.replica, load.num_running, load.attached) == ("replica-a", 2, True)
        assert load.report_age_ms == pytest.approx(50)

    run(service, mode, body)


@pytest.mark.parametrize("mode", MODES)
def test_watch_cache_sends_the_state_then_its_changes(service, mode: str) -> None:
    async def body(clients: Clients) -> None:
        stream = clients.control.WatchCache(control_pb2.WatchCacheRequest(period_ms=100))
        updates = aiter(stream)
        (cache,) = (await anext(updates)).replicas
        (tier,) = cache.cache.tiers
        assert tier.tier == control_pb2.TIER_DEVICE and cache.indexed_blocks == 7
        assert (tier.blocks_free, tier.blocks_cached, tier.blocks_in_use) == (5, 3, 2)
        service.load = service.load._replace(blocks_free=4, blocks_cached=4)
        (cache,) = (await anext(updates)).replicas
        assert cache.cache.tiers[0].blocks_cached == 4
        stream.cancel()
        await until(service.watch_closed.is_set)

    run(service, mode, body)


def test_watch_router_sends_the_state_again_and_again(service) -> None:
    async def body(clients: Clients) -> None:
        states = aiter(clients.control.WatchRouter(control_pb2.WatchRouterRequest(period_ms=100)))
        state = await anext(states)
        (replica,) = state.replicas
        assert (replica.load.replica, replica.state, state.model) == (
            "replica-a",
            "attached",
            "acme/tiny",
        )
        assert not state.requests and not state.HasField("ttft_median_ms")
        await clients.generation.GenerateOnce(request())
        while not state.requests:
            state = await anext(states)
        (decision,) = state.requests
        assert (decision.best.replica, decision.runner_up.replica) == ("replica-a", "replica-b")
        assert dict(decision.best.terms_ms) == {"wait_s": 250.0, "prefill_s": 500.0}
        assert decision.HasField("ttft_ms") and state.HasField("ttft_median_ms")

    run(service, "direct", body)


@pytest.mark.parametrize("period_ms", [0, 99, 60_001])
def test_a_watch_bounds_its_period(service, period_ms: int) -> None:
    async def body(clients: Clients) -> None:
        for watch, asked in (
            (clients.control.WatchCache, control_pb2.WatchCacheRequest(period_ms=period_ms)),
            (clients.control.WatchRouter, control_pb2.WatchRouterRequest(period_ms=period_ms)),
        ):
            error = await failure(watch(asked))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert f"[100, 60000], got {period_ms}" in error.details()

    run(service, "direct", body)


@pytest.mark.parametrize("method", ["WatchCache", "Watch"])
def test_watchers_are_bounded_for_a_client_and_for_all(service, method: str) -> None:
    watchers = Watchers(most=5, most_of_client=2)

    async def body() -> None:
        async with serving(service, "direct", watchers=watchers) as clients:

            def watch(client: str) -> Any:
                # The first address comes from the client; the proxy appends the last one.
                metadata = [("x-forwarded-for", "1.2.3.4"), ("x-forwarded-for", client)]
                if method == "WatchCache":
                    return clients.control.WatchCache(
                        control_pb2.WatchCacheRequest(period_ms=100), metadata=metadata
                    )
                return clients.health.Watch(health_pb2.HealthCheckRequest(), metadata=metadata)

            async def refused(client: str) -> str:
                error = await failure(watch(client))
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                return error.details()

            opened = [watch(client) for client in ("a", "a", "b", "b", "c")]
            for stream in opened:
                await stream.read()
            assert "2 streams" in (text := await refused("a"))
            assert "router.max_watchers_per_client is 2" in text
            assert "router.max_watchers is 5" in await refused("d")
            # Other calls are served, and the end of a stream makes room for another.
            await clients.generation.GenerateOnce(request())
            opened[0].cancel()
            await until(lambda: watchers.num_open == 4)
            again = watch("a")
            await again.read()
            for stream in (*opened, again):
                stream.cancel()
            await until(lambda: watchers.num_open == 0)
            assert not watchers._open, "clients that have left are not remembered"

    async def main() -> None:
        await asyncio.wait_for(body(), 20)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "client"),
    [
        ("ipv4:10.0.0.7:4242", [], "ipv4:10.0.0.7"),
        ("ipv6:%5B::1%5D:4242", [], "ipv6:%5B::1%5D"),
        ("unix:", [], "unix"),
        ("ipv4:127.0.0.1:1", ["10.0.0.7"], "10.0.0.7"),
        ("ipv4:127.0.0.1:1", ["9.9.9.9", "8.8.8.8, 10.0.0.7"], "10.0.0.7"),
    ],
)
def test_a_client_is_who_the_proxy_has_seen(peer: str, forwarded_for: list[str], client: str):
    assert client_of(peer, forwarded_for) == client


@pytest.mark.parametrize("mode", MODES)
def test_health_follows_readiness(service, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_api, "HEALTH_POLL_S", 0.02)
    Response = health_pb2.HealthCheckResponse

    async def body(clients: Clients) -> None:
        async def check(name: str) -> int:
            asked = health_pb2.HealthCheckRequest(service=name)
            return (await clients.health.Check(asked)).status

        names = ("", "quire.v1.Generation", "quire.v1.Control")
        assert [await check(name) for name in names] == [Response.SERVING] * 3
        watch = clients.health.Watch(health_pb2.HealthCheckRequest())
        updates = aiter(watch)
        assert (await anext(updates)).status == Response.SERVING
        service.ready = False
        assert (await anext(updates)).status == Response.NOT_SERVING
        assert [await check(name) for name in names] == [
            Response.NOT_SERVING,
            Response.NOT_SERVING,
            Response.SERVING,
        ]
        service.ready = True
        assert (await anext(updates)).status == Response.SERVING
        watch.cancel()

        unknown = health_pb2.HealthCheckRequest(service="quire.v1.Nothing")
        error = await failure(clients.health.Check(unknown))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        watch = clients.health.Watch(unknown)
        assert (await anext(aiter(watch))).status == Response.SERVICE_UNKNOWN
        watch.cancel()

    run(service, mode, body)


def test_every_rpc_of_the_protos_has_its_method() -> None:
    descriptors = [
        generation_pb2.DESCRIPTOR.services_by_name["Generation"],
        control_pb2.DESCRIPTOR.services_by_name["Control"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
    ]
    methods = {method.name for service in descriptors for method in service.methods}
    # List is newer than the oldest supported grpcio
    assert methods - {"List"} == {
        *UNARY,
        *STREAMING,
    }
    assert all(callable(getattr(GrpcApi, name, None)) for name in methods - {"List"})


# --------------------------------------------------------------------------------------------------
# Bounds
# --------------------------------------------------------------------------------------------------

TURN = generation_pb2.ChatMessage(role="user", content="a")
LARGE = {
    "turns": request(messages=generation_pb2.ChatMessages(messages=[TURN] * 20_000)),
    "stop strings": request(prompt="x", stop=["a"] * 20_000),
    "bytes": request(prompt="x", session="x" * grpc_servicers.MAX_MESSAGE_BYTES),
    "bias": request(prompt="x", sampling={"logit_bias": {i: 1.0 for i in range(10_000)}}),
    "bad words": request(prompt="x", sampling={"bad_words": ["a"] * 20_000}),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LARGE)
def test_large_requests_are_refused_before_they_are_parsed(service, mode: str, name: str) -> None:
    async def body(clients: Clients) -> None:
        for method in (clients.generation.Generate, clients.generation.GenerateOnce):
            error = await failure(method(LARGE[name], compression=grpc.Compression.Gzip))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            assert "the request must have at most" in error.details()

    # gRPC's default limit is 4 MiB; Serve may set another.
    options = [("grpc.max_receive_message_length", 32 << 20)]
    run(service, mode, body, options)
    assert service.requests == []
    assert service.refused_by_front_end == ["body_too_large"] * 2


@pytest.mark.parametrize("mode", MODES)
def test_refusals_are_counted_once_whoever_refuses(service, mode: str) -> None:
    async def body(clients: Clients) -> None:
        for method in (clients.generation.Generate, clients.generation.GenerateOnce):
            await failure(method(request(prompt="x", cache_salt="x" * 300)))  # the service does
            await failure(method(request(prompt="x", request_id="x" * 200)))
            await failure(method(generation_pb2.GenerateRequest()))
        await clients.generation.GenerateOnce(request(prompt="x"))
        await failure(clients.control.WatchCache(control_pb2.WatchCacheRequest(period_ms=1)))

    run(service, mode, body)
    assert service.refused_by_front_end == ["invalid_request"] * 4


@pytest.mark.parametrize("mode", MODES)
def test_other_services_refuse_large_requests_too(service, mode: str) -> None:
    async def body(clients: Clients) -> None:
        long = health_pb2.HealthCheckRequest(service="x" * grpc_servicers.MAX_MESSAGE_BYTES)
        for call in (clients.health.Check(long), clients.health.Watch(long)):
            assert (await failure(call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(service, mode, body, [("grpc.max_receive_message_length", 32 << 20)])


@pytest.mark.parametrize("mode", MODES)
def test_bytes_that_are_no_message_are_refused(service, mode: str) -> None:
    async def main() -> None:
        async with serving(service, mode) as clients:
            for method, kind in (
                ("quire.v1.Generation/Generate", "quire.v1.GenerateRequest"),
                ("quire.v1.Generation/GenerateOnce", "quire.v1.GenerateRequest"),
                ("quire.v1.Control/GetLoads", "quire.v1.GetLoadsRequest"),
                ("grpc.health.v1.Health/Check", "grpc.health.v1.HealthCheckRequest"),
            ):
                error = await failure(clients.channel.unary_unary(f"/{method}")(b"\xff" * 9))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
                assert error.details() == f"the request must be a {kind}"

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("mode", MODES)
def test_many_turns_are_refused_by_name(service, mode: str) -> None:
    async def body(clients: Clients) -> None:
        many = generation_pb2.ChatMessages(messages=[TURN] * 4097)
        error = await failure(clients.generation.GenerateOnce(request(messages=many)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "messages must have at most 4096 messages, got 4097"
        long = generation_pb2.TokenIds(ids=[1] * (512 * 1024 + 1))
        error = await failure(clients.generation.GenerateOnce(request(token_ids=long)))
        assert error.details() == "token_ids must have at most 524288 token ids, got 524289"

    run(service, mode, body)


@pytest.mark.parametrize("mode", MODES)
def test_an_unknown_method_is_answered_with_those_that_there_are(service, mode: str) -> None:
    async def main() -> None:
        async with serving(service, mode) as clients:
            channel = clients.channel
            for kind in (channel.unary_unary, channel.unary_stream):
                error = await failure(kind("/quire.v1.Generation/Translate")(b"x"))
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED
                assert error.details() == (
                    "this method is not served; quire.v1.Generation has Detokenize, Embed, Generate, "
                    "GenerateOnce, Render, Tokenize"
                )
            error = await failure(channel.unary_unary("/quire.v1.Control/Stop")(b""))
            assert error.details().endswith(
                "has GetLoads, GetModelInfo, ListAdapters, LoadAdapter, UnloadAdapter, WatchCache, WatchRouter"
            )
            error = await failure(channel.unary_unary("/quire.v2.Generation/Generate")(b""))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("mode", MODES)
def test_errors_name_the_fields_of_this_api(service, mode: str) -> None:
    async def body(clients: Clients) -> None:
        asked = request(prompt="x", cache_salt="x" * 300)
        error = await failure(clients.generation.GenerateOnce(asked))
        assert error.details().startswith("cache_salt must have at most 256 bytes")
        # A label that cannot be logged is replaced.
        metadata = (("x-request-id", "x" * 200),)
        answer = await clients.generation.GenerateOnce(request(prompt="x"), metadata=metadata)
        assert len(answer.request_id) == 32

    run(service, mode, body)


# --------------------------------------------------------------------------------------------------
# Keys
# --------------------------------------------------------------------------------------------------

SERVICES = [
    service
    for module in (generation_pb2, control_pb2, health_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
METHODS = [
    method
    for service in SERVICES
    for method in service.methods
    if method.name not in ("List",)  # in newer health protos; not served
]
GRANTED = {
    "generate": {Right.ANY_KEY, Right.GENERATE},
    "observe": {Right.ANY_KEY, Right.OBSERVE},
    "admin": {Right.ANY_KEY, Right.GENERATE, Right.OBSERVE, Right.ADMIN},
}


def test_every_method_has_a_rule() -> None:
    """A new method is denied until `access_rules` has its right."""
    assert not {method.name for method in METHODS} - GRPC_RULES.keys()
    is_open = {method.full_name for method in METHODS if GRPC_RULES[method.name] is Right.OPEN}
    assert is_open == {"grpc.health.v1.Health.Check", "grpc.health.v1.Health.Watch"}


async def outcome(channel: grpc.aio.Channel, method: Any, *metadata: tuple[str, str]) -> Any:
    """The status of one call of a method: OK if it gets an answer."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    text = generation_pb2.TokenizeRequest(prompt="once upon")
    inputs = generation_pb2.EmbedRequest(inputs=[{"text": "once upon"}])
    asked = {
        "GenerateRequest": request(),
        "TokenizeRequest": text,
        "EmbedRequest": inputs,
    }.get(method.input_type.name)
    kind = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = kind(path, request_serializer=lambda _: asked.SerializeToString() if asked else b"")(
        b"", metadata=metadata, timeout=10
    )
    try:
        await (call.read() if method.server_streaming else call)
    except grpc.aio.AioRpcError as error:
        assert "sk-" not in error.details()
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_is_served_to_keys_with_its_right_only(service, keys, method, mode: str) -> None:
    needed = GRPC_RULES[method.name]

    async def main() -> None:
        async with serving(service, mode, access=keys.access()) as clients:
            for metadata in ((), (("authorization", "Bearer sk-x"),), (("x-api-key", "sk-x"),)):
                status = await outcome(clients.channel, method, *metadata)
                if needed is Right.OPEN:
                    assert status is grpc.StatusCode.OK
                else:
                    assert status is grpc.StatusCode.UNAUTHENTICATED
            for name, granted in GRANTED.items():
                is_served = needed is Right.OPEN or needed in granted
                for metadata in (
                    ("authorization", f"Bearer {keys.secrets[name]}"),
                    ("x-api-key", keys.secrets[name]),
                ):
                    status = await outcome(clients.channel, method, metadata)
                    right = grpc.StatusCode.OK if is_served else grpc.StatusCode.PERMISSION_DENIED
                    assert status is right, name

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_method_without_a_rule_is_denied_to_every_key(service, keys, monkeypatch) -> None:
    monkeypatch.delitem(GRPC_RULES, "GetLoads")
    method = control_pb2.DESCRIPTOR.services_by_name["Control"].methods_by_name["GetLoads"]

    async def main() -> None:
        async with serving(service, "direct", access=keys.access()) as clients:
            metadata = ("x-api-key", keys.secrets["admin"])
            status = await outcome(clients.channel, method, metadata)
            assert status is grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_key_of_a_call_pays_and_decides_the_tenant(service, keys) -> None:
    keys.add("small", "generate", tenant="team-s", quotas={"tokens_per_minute": 18})

    async def main() -> None:
        async with serving(service, "direct", access=keys.access()) as clients:
            metadata = [("x-api-key", keys.secrets["small"])]
            asked = request(prompt="once upon", cache_salt="team-a")  # 9 tokens and 8
            await clients.generation.GenerateOnce(asked, metadata=metadata)
            stream = clients.generation.Generate(asked, metadata=metadata)
            error = await failure(stream)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "tokens_per_minute 18" in error.details()
            pushback = dict(error.trailing_metadata())["grpc-retry-pushback-ms"]
            assert int(pushback) == pytest.approx(8 / 18 * 60_000, rel=0.01)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert {asked.payer for asked in service.requests} == {"team-s"}
    assert all(asked.tenant.startswith("team-s/") for asked in service.requests)
    assert [(line["key"], line["completion_tokens"]) for line in keys.usage.lines] == [("small", 8)]

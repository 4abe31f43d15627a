"""Real clients against the real cluster: the same answers on every path, whatever else is running."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import numpy as np
import openai
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from live import Cluster, wait_until

from quire.cluster.config.app_config import AppConfig
from quire.cluster.scrape import MAX_AGE_S
from quire.protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc
from quire.protos.metric_families import BUILD_INFO, CPU_SECONDS
from quire.replica.serving.replica_metrics import REPLICA_FAMILIES
from quire.router.request.router_metrics import ROUTER_FAMILIES

pytestmark = pytest.mark.system
MESSAGES = [{"role": "user", "content": "Tell me a story about a lighthouse."}]


def chat_request(seed: int, **sampling) -> generation_pb2.GenerateRequest:
    turns = [generation_pb2.ChatMessage(**message) for message in MESSAGES]
    return generation_pb2.GenerateRequest(
        messages=generation_pb2.ChatMessages(messages=turns),
        sampling=generation_pb2.SamplingOptions(seed=seed, **sampling),
    )


def joined(responses: Iterator[Message]) -> tuple[str, list[int], Message]:
    text, token_ids = "", []
    for response in responses:
        assert response.index == len(token_ids)
        text += response.text
        token_ids += response.token_ids
    return text, token_ids, response


def test_serve_prints_where_the_time_went_and_a_curl_that_streams(cluster):
    lines = cluster.output.read_text().splitlines()
    startup = next(line for line in lines if line.startswith("start-up"))
    for phase in ("Ray", "imports", "load", "warm"):
        assert phase in startup
    curl = next(line for line in lines if line.startswith("ready: ")).removeprefix("ready: ")
    output = subprocess.run(shlex.split(curl), capture_output=True, text=True, timeout=60).stdout
    assert output.count("data: {") > 20
    assert output.rstrip().endswith("data: [DONE]")


def test_openai_and_grpc_stream_the_same_tokens_for_a_seed(cluster, generation):
    for seed in (1, 2, 3):
        ids, text, finish = [], "", None
        for chunk in cluster.openai().chat.completions.create(
            model="embedded",
            messages=MESSAGES,
            seed=seed,
            stream=True,
            extra_body={"return_token_ids": True},
        ):
            choice = chunk.choices[0]
            text += choice.delta.content or ""
            ids += getattr(choice, "token_ids", None) or []
            finish = choice.finish_reason or finish
        grpc_text, grpc_ids, last = joined(generation.Generate(chat_request(seed)))
        once = generation.GenerateOnce(chat_request(seed))
        assert text == grpc_text == once.text
        assert ids == grpc_ids == list(once.token_ids)
        assert finish == "stop"
        assert last.finish_reason == once.finish_reason == generation_pb2.FINISH_REASON_STOP
        assert last.usage.completion_tokens == len(ids)


def test_usage_counts_cached_tokens_and_the_answer_says_where_it_came_from(cluster):
    prompt = "Once there was a bookbinder who counted every page. " * 20
    client = cluster.openai()
    answers = []
    for _ in range(2):
        answers.append(
            client.completions.with_raw_response.create(
                model="embedded", prompt=prompt, max_tokens=4, temperature=0
            )
        )
        # The second may go to the other router, which knows the blocks once the replica's frame is there: on a busy
        # machine that was after the answer had reached this client.
        time.sleep(1.0)
    first, second = (answer.parse() for answer in answers)
    assert first.choices[0].text == second.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens >= 64
    assert answers[0].headers["x-quire-replica"] == answers[1].headers["x-quire-replica"]
    assert int(answers[1].headers["x-quire-cached-tokens"]) >= 64


def test_decisions_have_the_same_bits_on_any_replica_and_in_company(cluster):
    levels = [{"label": label} for label in ("never", "now", "now and then")]
    asked = {
        "model": "embedded",
        "input": "A keeper of a lighthouse writes down the weather. " * 12,
        "questions": [
            {"type": "predicate", "instructions": f"It is about {thing}."}
            for thing in ("rain", "a town")
        ]
        + [{"type": "score", "instructions": "How often?", "levels": levels, "name": "often"}],
    }
    client = cluster.openai()
    first = client.decisions.with_raw_response.create(**asked)
    expected = first.parse()
    assert [answer.name for answer in expected.answers] == [None, None, "often"]
    assert abs(sum(level.probability for level in expected.answers[2].probabilities) - 1) < 1e-9
    again = client.decisions.with_raw_response.create(**asked)
    assert again.parse().answers == expected.answers
    assert again.headers["x-quire-replica"] == first.headers["x-quire-replica"]
    assert again.parse().usage.input_tokens_details.cached_tokens >= 100

    def decide(i: int) -> list:
        # A salt of its own: nothing is cached, and any replica may compute it.
        salt = {"extra_body": {"cache_salt": f"salt {i}"}} if i % 2 else {}
        client.completions.create(model="embedded", prompt=f"{i}", max_tokens=20, seed=i)
        return client.decisions.create(**asked, **salt).answers

    with ThreadPoolExecutor(12) as pool:
        assert all(answers == expected.answers for answers in pool.map(decide, range(24)))


def test_embeddings_have_the_same_bits_on_any_replica_and_in_company(cluster, generation):
    """By both encodings of HTTP, and by gRPC."""
    inputs = ["The keeper of a lighthouse. " * (1 + 3 * i) for i in range(6)]
    create = cluster.openai().embeddings.create

    def bits(numbers: Iterable[float]) -> bytes:
        return np.asarray(numbers, np.float32).tobytes()

    raw = cluster.openai().embeddings.with_raw_response.create(
        model="embedded", input=inputs, encoding_format="float"
    )
    answer = raw.parse()
    expected = [bits(item.embedding) for item in answer.data]
    assert len(set(expected)) == len(inputs) and raw.headers["x-quire-replica"]
    assert all(abs(np.square(item.embedding).sum() - 1) < 1e-6 for item in answer.data)
    again = create(model="embedded", input=inputs)  # base64, decoded by the client
    assert [bits(item.embedding) for item in again.data] == expected
    assert answer.usage.prompt_tokens == again.usage.prompt_tokens == again.usage.total_tokens
    given = generation_pb2.EmbedRequest(inputs=[{"text": text} for text in inputs], dimensions=16)
    cut = [list(item.values) for item in generation.Embed(given).embeddings]
    short = create(model="embedded", input=inputs, dimensions=16)
    assert [bits(item.embedding) for item in short.data] == list(map(bits, cut))

    def embed(i: int) -> bytes:
        # A salt of its own: nothing is cached, and any replica may compute it.
        salt = {"extra_body": {"cache_salt": f"salt {i}"}} if i % 2 else {}
        cluster.openai().completions.create(model="embedded", prompt=f"{i}", max_tokens=9, seed=i)
        (item,) = create(model="embedded", input=inputs[i % len(inputs)], **salt).data
        return bits(item.embedding)

    with ThreadPoolExecutor(12) as pool:
        for i, found in enumerate(pool.map(embed, range(24))):
            assert found == expected[i % len(inputs)]


def test_64_concurrent_streams_each_equal_their_own_single_run(cluster):
    """HTTP and gRPC, greedy and sampled, prompts of 3 to 900 tokens, outputs of 5 to 132."""

    def request(i: int) -> dict:
        words = " ".join(f"page {n * i % 97}" for n in range(i * i % 190))
        return {
            "prompt": f"Story {i}. {words} There was a harbour",
            "max_tokens": 5 + 2 * i % 128,
            "temperature": 0.0 if i % 3 else 0.9,
            "seed": i,
        }

    async def over_http(client: openai.AsyncOpenAI, i: int) -> list[int]:
        ids: list[int] = []
        extra = {"return_token_ids": True, "ignore_eos": True}
        async for chunk in await client.completions.create(
            model="embedded", stream=True, extra_body=extra, **request(i)
        ):
            ids += getattr(chunk.choices[0], "token_ids", None) or []
        return ids

    async def over_grpc(stub: generation_pb2_grpc.GenerationStub, i: int) -> list[int]:
        fields = request(i)
        message = generation_pb2.GenerateRequest(
            prompt=fields.pop("prompt"),
            ignore_eos=True,
            sampling=generation_pb2.SamplingOptions(**fields),
        )
        return [t async for response in stub.Generate(message) for t in response.token_ids]

    async def run() -> None:
        async with (
            openai.AsyncOpenAI(
                base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
            ) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel,
        ):
            stub = generation_pb2_grpc.GenerationStub(channel)

            async def one(i: int) -> list[int]:
                return await (over_http(client, i) if i % 2 else over_grpc(stub, i))

            together = await asyncio.gather(*map(one, range(64)))
            for i in range(64):
                assert len(together[i]) == request(i)["max_tokens"]
                assert together[i] == await one(i), f"request {i}"

    asyncio.run(run())


def test_unrelated_requests_spread_and_a_shared_prefix_attracts(cluster):
    client = cluster.openai()

    def replica_of(prompt: list[int], max_tokens: int = 1) -> str:
        answer = client.completions.with_raw_response.create(
            model="embedded", prompt=prompt, max_tokens=max_tokens
        )
        return answer.headers["x-quire-replica"]

    def unrelated(i: int) -> str:
        return replica_of([100 + i, *range(200, 330)], max_tokens=16)

    # At once: of idle replicas the one that was measured to be the faster, by however little, gets all.
    with ThreadPoolExecutor(20) as pool:
        assert len(set(pool.map(unrelated, range(20)))) == 2
    for i in range(10):
        prefix = [300 + i] * 64  # two blocks
        first = replica_of([*prefix, 7])
        answer = client.completions.with_raw_response.create(
            model="embedded", prompt=[*prefix, 8, 9], max_tokens=1
        )
        assert answer.headers["x-quire-replica"] == first
        assert answer.parse().usage.prompt_tokens_details.cached_tokens == 64


def test_stop_strings_and_limits_end_the_answer(cluster):
    client = cluster.openai()
    whole = client.chat.completions.create(
        model="embedded", messages=MESSAGES, temperature=0
    ).choices[0]
    assert whole.finish_reason == "stop" and len(whole.message.content) > 60
    stop = whole.message.content[30:36]
    cut = client.chat.completions.create(
        model="embedded", messages=MESSAGES, temperature=0, stop=[stop]
    ).choices[0]
    assert cut.message.content == whole.message.content[: whole.message.content.find(stop)]
    assert cut.finish_reason == "stop"
    short = client.chat.completions.create(
        model="embedded", messages=MESSAGES, temperature=0, max_tokens=7
    )
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 7


def test_health_reflection_and_control(cluster):
    with cluster.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "quire.v1.Generation", "quire.v1.Control"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"quire.v1.Generation", "quire.v1.Control"} <= set(services)
        control = control_pb2_grpc.ControlStub(channel)
        info = control.GetModelInfo(control_pb2.GetModelInfoRequest())
        assert (info.name, info.dtype) == ("embedded", "float32")
        watch = control.WatchCache(control_pb2.WatchCacheRequest(period_ms=100), timeout=60)
        assert len(next(watch).replicas) == 2
        call = generation_pb2_grpc.GenerationStub(channel).Generate(
            generation_pb2.GenerateRequest(
                token_ids=generation_pb2.TokenIds(ids=range(500, 700)),
                ignore_eos=True,
                sampling=generation_pb2.SamplingOptions(max_tokens=3000),
            )
        )
        # Only blocks in use tell a request from the others: a full cache holds as many blocks after it as before.
        assert any(blocks_in_use(caches) >= 200 // info.block_size for caches in watch)
        call.cancel()
        assert any(blocks_in_use(caches) == 0 for caches in watch)
        watch.cancel()


def blocks_in_use(caches: control_pb2.WatchCacheResponse) -> int:
    return sum(tier.blocks_in_use for replica in caches.replicas for tier in replica.cache.tiers)


def test_nothing_was_compiled_after_ready(cluster):
    loads = cluster.loads()
    assert sum(load.num_steps for load in loads) > 0
    assert [load.num_compiles for load in loads] == [0, 0]


def fresh_metrics(cluster: Cluster) -> None:
    """Whatever was answered before this call is in the metrics after it."""
    time.sleep(MAX_AGE_S)


def test_metrics_count_what_was_sent_to_any_router(cluster):
    """Requests over HTTP and gRPC, answered and refused, summed over the routers and the replicas."""
    names = {
        "length": ("quire_requests_finished_total", {"finish_reason": "length"}),
        "received": ("quire_requests_received_total", {}),
        "unsupported": ("quire_requests_refused_total", {"code": "unsupported_field"}),
        "unknown": ("quire_requests_refused_total", {"code": "model_not_found"}),
        "first": ("quire_time_to_first_token_seconds_count", {}),
        "whole": ("quire_request_seconds_bucket", {"le": "+Inf"}),
        "output": ("quire_output_tokens_total", {}),
        "lengths": ("quire_request_output_tokens_sum", {}),
        "prompt": ("quire_prompt_tokens_total", {}),
        "hits": ("quire_prefix_hit_tokens_total", {}),
        "steps": ("quire_engine_step_seconds_count", {}),
    }

    def counts() -> dict[str, float]:
        fresh_metrics(cluster)
        return {key: cluster.metric(name, **labels) for key, (name, labels) in names.items()}

    before = counts()
    num_sent = 12
    prompt = [9] * 200
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        for _ in range(num_sent):
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
            # A connection of its own: the proxy gives the next one to another router.
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200
        bad = client.post("/v1/completions", json={"prompt": "a", "no_such_field": 1})
        unknown = client.post("/v1/completions", json={"prompt": "a", "model": "another"})
        assert (bad.status_code, unknown.status_code) == (400, 404)
    with cluster.channel() as channel:
        sampling = generation_pb2.SamplingOptions(max_tokens=4)
        request = generation_pb2.GenerateRequest(
            prompt="A quire is", sampling=sampling, ignore_eos=True
        )
        stub = generation_pb2_grpc.GenerationStub(channel)
        num_prompt = stub.GenerateOnce(request).usage.prompt_tokens
    after = counts()
    added = {key: after[key] - before[key] for key in before}
    hits, steps = added.pop("hits"), added.pop("steps")
    tokens = num_sent * 8 + 4
    assert added == {
        "length": num_sent + 1,
        "received": num_sent + 3,
        "unsupported": 1,
        "unknown": 1,
        "first": num_sent + 1,
        "whole": num_sent + 1,
        "output": tokens,
        "lengths": tokens,
        "prompt": num_sent * 200 + num_prompt,
    }
    assert hits >= (num_sent - 2) * 128 and steps >= 8


def test_metrics_are_those_of_every_router_and_replica(cluster):
    samples = cluster.metrics()
    for deployment, label in (("Router", "router"), ("Replica", "replica")):
        replicas = cluster.serve_status()["applications"]["quire"]["deployments"][deployment][
            "replicas"
        ]
        ids = {replica["replica_id"].rpartition("#")[2] for replica in replicas}
        told = [
            s for s in samples if s.labels.get("deployment") == deployment and label in s.labels
        ]
        assert {s.labels[label].removeprefix("router-") for s in told} == ids and len(ids) == 2
        for sample in told:
            assert sample.labels["model_name"] == "embedded"
            assert sample.labels["application"] == "quire"
        assert cluster.metric("quire_scrape_silent_processes", deployment=deployment) == 0
    for family in (*ROUTER_FAMILIES, *REPLICA_FAMILIES):
        names = {family.name, f"{family.name}_count"}
        of_family = [s for s in samples if s.name in names]
        processes = {s.labels.get("router", s.labels.get("replica")) for s in of_family}
        assert len(processes) == (4 if family in (BUILD_INFO, CPU_SECONDS) else 2), family.name


def test_ray_metrics_and_names(cluster):
    """Gauges and counters of both replicas and both routers are in Ray's own metrics and names."""
    for _ in range(2):  # twice: the second finds its prefix
        cluster.openai().completions.create(model="embedded", prompt=[9] * 200, max_tokens=8)
    gauges = ["quire_kv_blocks_free", "quire_kv_blocks_cached", "quire_kv_blocks_in_use"]
    gauges += ["quire_requests_running", "quire_requests_waiting"]
    gauges += ["quire_router_queued_requests", "quire_router_queued_prompt_tokens"]
    gauges += ["quire_router_expected_wait_seconds"]
    counters = ["quire_output_tokens_total", "quire_prompt_tokens_total"]
    counters += ["quire_prefix_hit_tokens_total", "quire_prefix_queried_tokens_total"]
    counters += ["quire_requests_received_total", "quire_requests_finished_total"]

    def are_there() -> bool:
        """In one scrape: a process that is new has not reported its gauges yet."""
        lines = cluster.ray_metrics().splitlines()

        def processes(name: str) -> set[str]:
            own = [line for line in lines if line.startswith(f"ray_{name}{{")]
            return {re.search(r'replica="([^"]+)"', line)[1] for line in own}

        return all(map(processes, counters)) and all(len(processes(name)) == 2 for name in gauges)

    wait_until(are_there, 60, "all counters, and the gauges of both processes, are there")
    details = cluster.serve_status()["applications"]["quire"]["deployments"]
    assert {name: len(d["replicas"]) for name, d in details.items()} == {"Replica": 2, "Router": 2}


def test_a_stream_of_the_drain_window_has_the_whole_drain_time(cluster):
    """Serve counts its window of 30 s, in which a router that goes away still gets requests, against the timeout."""
    details = cluster.serve_status()["applications"]["quire"]["deployments"]
    drain_s = AppConfig.from_args(cluster.config["applications"][0]["args"]).router.drain_timeout_s
    timeouts = {
        n: d["deployment_config"]["graceful_shutdown_timeout_s"] for n, d in details.items()
    }
    assert timeouts == {"Replica": drain_s + 40, "Router": 30 + drain_s + 5}

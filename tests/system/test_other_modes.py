"""Ray's own proxy instead of HAProxy, and what a router does with its streams when it has to go."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections.abc import Iterator

import grpc
import httpx
import openai
import pytest
from live import (
    CHANGE_TIMEOUT_S,
    Cluster,
    assert_serve_ends,
    processes,
    start_cluster,
    wait_until,
)

from quire.protos import generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def plain_cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Ray's own proxies, two routers, one replica."""

    def change(config: dict) -> None:
        del config["controller_options"]["runtime_env"]
        (application,) = config["applications"]
        application["args"]["replicas"] = 1
        # However slow the machine is: the streams below must end before the drain does.
        application["args"]["router"] = {"drain_timeout_s": 240.0}
        # 256 blocks of 32 tokens on the device, and 131 in the host tier.
        application["args"]["engine"] = {
            "num_blocks": 256,
            "node_pool_gib": 0.008,
            "restore": "always",
        }

    yield from start_cluster(tmp_path_factory.mktemp("plain"), change)


def test_default_proxy_streams_http_and_grpc(plain_cluster):
    text = ""
    for chunk in plain_cluster.openai().completions.create(
        model="embedded", prompt="A quire is", temperature=0, max_tokens=20, stream=True
    ):
        text += chunk.choices[0].text
    with plain_cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        sampling = generation_pb2.SamplingOptions(temperature=0, max_tokens=20)
        request = generation_pb2.GenerateRequest(prompt="A quire is", sampling=sampling)
        responses = list(stub.Generate(request))
        assert "".join(response.text for response in responses) == text != ""
        assert len(responses) > 5
        with pytest.raises(grpc.RpcError) as error:
            stub.GenerateOnce(generation_pb2.GenerateRequest())
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as error:
            list(stub.Generate(generation_pb2.GenerateRequest()))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_metrics_of_all_processes_come_through_the_default_proxy(plain_cluster):
    """Here Serve's handles run in a thread of their own."""
    samples = [s for s in plain_cluster.metrics() if s.name == "quire_build_info"]
    assert sorted(s.labels["deployment"] for s in samples) == ["Replica", "Router", "Router"]
    for deployment in ("Router", "Replica"):
        assert plain_cluster.metric("quire_scrape_silent_processes", deployment=deployment) == 0


def test_a_turn_that_ended_with_a_call_outlives_the_pressure_of_other_conversations(plain_cluster):
    """Two conversations pause while others fill both tiers: one waits for a tool, the other has its answer."""
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    client = plain_cluster.openai()

    def turn(name: str, choice: str, *messages: dict) -> openai.types.chat.ChatCompletion:
        system = {"role": "system", "content": f"{name} " * 150}
        user = {"role": "user", "content": "How is the weather?"}
        return client.chat.completions.create(
            model="embedded",
            messages=[system, user, *messages],
            tools=[tool],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=60,
            extra_headers={"x-session-id": name},
        )

    waits, answered = turn("Agent", "required"), turn("Reader", "none")
    (call,) = waits.choices[0].message.tool_calls
    assert waits.choices[0].finish_reason == "tool_calls" != answered.choices[0].finish_reason

    def is_retained() -> bool:
        """Metrics and loads are up to a second old."""
        (load,) = plain_cluster.loads()
        on_device, on_host = (tier.blocks_retained for tier in load.cache.tiers)
        reported = plain_cluster.metric("quire_kv_blocks_retained")
        return on_host == 0 and on_device == reported >= waits.usage.prompt_tokens // 32

    wait_until(is_retained, 10, "the blocks of the turn are retained")
    for i in range(5):
        client.completions.create(model="embedded", prompt=[900 - i] * 3000, max_tokens=1)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    followed = turn("Agent", "none", waits.choices[0].message.model_dump(), result)
    again = turn("Reader", "none", {"role": "user", "content": "And now?"})
    cached = [a.usage.prompt_tokens_details.cached_tokens for a in (followed, again)]
    assert cached[0] >= waits.usage.prompt_tokens // 32 * 32
    assert cached[1] == 0


def with_routers(cluster: Cluster, num: int) -> dict:
    config = copy.deepcopy(cluster.config)
    config["applications"][0]["args"]["routers"] = num
    return config


def with_routers_only(cluster: Cluster, num: int) -> dict:
    """Other `args` are another version of everything; this is the same one, with fewer or more of its routers."""
    config = copy.deepcopy(cluster.config)
    config["applications"][0]["deployments"] = [{"name": "Router", "num_replicas": num}]
    return config


def num_routers(cluster: Cluster) -> int:
    deployments = cluster.serve_status()["applications"]["quire"]["deployments"]
    return len(deployments["Router"]["replicas"]) if "Router" in deployments else 0


def test_a_router_that_is_scaled_away_finishes_its_streams(plain_cluster):
    """Streams of some ten seconds are open on both routers when one of them has to go."""

    async def stream(client: openai.AsyncOpenAI, i: int) -> tuple[int, str | None]:
        count, finish = 0, None
        async for chunk in await client.completions.create(
            model="embedded",
            prompt=f"Story {i}",
            max_tokens=800,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        ):
            choice = chunk.choices[0]
            count += len(getattr(choice, "token_ids", None) or [])
            finish = choice.finish_reason or finish
        return count, finish

    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{plain_cluster.url}/v1", api_key="none", max_retries=0
        ) as client:
            streams = [asyncio.create_task(stream(client, i)) for i in range(8)]
            await asyncio.sleep(1)
            await asyncio.to_thread(plain_cluster.deploy, with_routers(plain_cluster, 1))
            assert not any(task.done() for task in streams), "the streams must outlive the change"
            assert await asyncio.gather(*streams) == [(800, "length")] * 8

    asyncio.run(run())

    # A router that is still starting counts as well: Ray's proxy would keep a request until it is there.
    def is_changed() -> bool:
        return plain_cluster.is_running() and num_routers(plain_cluster) == 1

    wait_until(is_changed, CHANGE_TIMEOUT_S, "one router is left and runs")
    ready = httpx.get(f"{plain_cluster.url}/ready", timeout=60)
    assert ready.status_code == 200, ready.text


def test_a_router_that_is_added_serves_from_its_first_request_on(plain_cluster):
    """It knows the replicas before it takes requests."""
    plain_cluster.deploy(with_routers_only(plain_cluster, 1))

    def is_changed() -> bool:  # the test before has left another version
        return plain_cluster.is_running() and num_routers(plain_cluster) == 1

    wait_until(is_changed, CHANGE_TIMEOUT_S, "there is one router")
    body = {"prompt": "The harbour", "max_tokens": 1}
    seen: dict[str, int] = {}

    async def run() -> None:
        async with httpx.AsyncClient(base_url=plain_cluster.url, timeout=60) as client:
            larger = with_routers_only(plain_cluster, 2)
            change = asyncio.create_task(asyncio.to_thread(plain_cluster.deploy, larger))
            async with asyncio.timeout(CHANGE_TIMEOUT_S):
                while not change.done() or len(seen) < 2:
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    router = answer.headers["x-quire-router"]
                    seen[router] = seen.get(router, 0) + 1
            await change

    asyncio.run(run())


def test_quire_serve_ends_when_rays_node_ends(plain_cluster):
    """The last test of this file, because it ends the cluster."""
    commands = processes(plain_cluster).items()
    (pid,) = (pid for pid, command in commands if command.split(" ")[0].endswith("/raylet"))
    os.kill(pid, signal.SIGKILL)
    assert_serve_ends(plain_cluster, "Ray's node has ended: its process raylet is gone")

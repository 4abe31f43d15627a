"""The router comparison is fair: the same prompts, equal answers, and the attributes that Ray's routers look for."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter

import pytest
from ray.serve._private.request_router.common import PendingRequest
from ray.serve.config import RequestRouterConfig

from quire.cluster.bench.load.clients import Answer, OpenAIClient
from quire.cluster.config.serve_config import load
from quire.protos.sampling_params import SamplingParams
from quire.replica import Engine
from tests.perf.agents import agents
from tests.perf.cluster import data_plane, ray_routers, truth
from tests.perf.cluster.ray_router_app import ROUTERS, EngineServer, PromptRequest, build, events
from tests.perf.cluster.ray_routers import MIXES, PROMPT_CHARS, SYSTEMS, ArrivalLog, LogClient, Turn


def test_prompts_share_prefixes_and_nothing_else():
    log = ArrivalLog(MIXES["spread"], seed=3)
    requests = log.part("a", 400, 20.0)
    assert [r.at_s for r in requests] == sorted(r.at_s for r in requests)
    assert requests[-1].at_s == pytest.approx(20, rel=0.3)
    texts = [log.texts[number] for (number,) in (r.prompt_ids for r in requests)]
    assert {len(text) for text in texts} == {PROMPT_CHARS}
    prefixes = Counter(text[:7500] for text in texts)
    assert 25 < len(prefixes) <= 48
    (_, most), *_ = prefixes.most_common(1)
    assert most / 400 == pytest.approx(1 / sum(1 / (i + 1) for i in range(48)), abs=0.06)
    assert len({text[7500:] for text in texts}) == 400


def test_the_same_part_is_the_same_for_everybody_and_another_is_new():
    logs = [ArrivalLog(MIXES["hot"], seed=1) for _ in range(2)]
    first, second = (log.part("a", 20, 5.0) for log in logs)
    assert first == second and logs[0].texts == logs[1].texts
    logs[0].part("b", 20, 5.0)
    assert not {t[7900:] for t in logs[0].texts[20:]} & {t[7900:] for t in logs[1].texts}


def test_the_client_sends_the_text_of_the_log():
    log = ArrivalLog(MIXES["hot"])
    _, request = log.part("a", 2, 5.0)
    body = LogClient("http://127.0.0.1:1/quire", log).body(request.prompt_ids, 1, "")
    assert body["prompt"] == log.texts[1] and body["max_tokens"] == 1


def test_rays_routers_are_there_and_find_the_prompt():
    for options in ROUTERS.values():
        config = RequestRouterConfig(**options)
        assert config.is_default_request_router() == (not options)
    router_class = RequestRouterConfig(**ROUTERS["ray_prefix"]).get_request_router_class()
    assert router_class.__name__ == "PrefixCacheAffinityRouter"

    async def pending() -> PendingRequest:  # it makes a future
        return PendingRequest(args=[PromptRequest("a text", 1)], kwargs={}, metadata=None)

    router = object.__new__(router_class)
    assert router._extract_text_from_request(asyncio.run(pending())) == "a text"


def test_the_server_behind_rays_routers_answers_as_the_engine_does():
    args = {"num_blocks": 64, "num_threads": 1, "device": "cpu"}
    text = "The harbour at night, and every boat in it. " * 4

    async def ask() -> tuple[list[dict], list[dict]]:
        server = object.__new__(EngineServer)
        await server.__init__(args)
        request = PromptRequest(text, 6)
        answers = [await server.complete(request)]
        answers += await asyncio.gather(*(server.complete(request) for _ in range(3)))
        ids = server._tokenizer.tokenizer.encode(text).tolist()
        asked = PromptRequest.of_ids(ids, 6)
        assert asked.token_ids.tolist() == ids
        streamed = [chunk async for chunk in server.stream(asked)]
        assert server._open == {}
        server._engine.close()
        return answers, streamed

    (first, *others), (name, *chunks, last) = asyncio.run(ask())
    with Engine(**args) as engine:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        (expected,) = engine.generate([text], params, progress=False)
    num_tokens = len(expected.prompt_token_ids)
    assert first == {
        "text": expected.text,
        "prompt_tokens": num_tokens,
        "cached_tokens": 0,
        "completion_tokens": 6,
    }
    num_cached = (num_tokens - 1) // 32 * 32
    assert others == [first | {"cached_tokens": num_cached}] * 3
    # Token ids get the same answer as a stream.
    assert set(name) == {"replica"}
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [
        [token] for token in expected.token_ids
    ]
    usage = last["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_tokens, 6)
    assert usage["prompt_tokens_details"] == {"cached_tokens": num_cached, "host_cached_tokens": 0}


def test_the_bare_answer_reads_like_quires():
    told = {"text": "ab", "prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": 1}
    answer = Answer()
    *chunks, done = events(told).split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    for chunk in chunks:
        OpenAIClient._add(answer, json.loads(chunk.removeprefix(b"data: ")))
    assert (answer.num_tokens, answer.prompt_tokens, answer.cached_tokens) == (1, 9, 4)


def summary(rate: float, hit: float) -> dict:
    return {
        "requests_per_s": rate,
        "hit_percent": hit,
        "ttft_ms": {"p50": 10.0, "p99": 1000 / rate},
    }


def turns(*rates: float) -> list[Turn]:
    return [
        Turn(summary(r, 50.0), summary(r / 2, 60.0), {"ingress": 1.0, "engines": r}) for r in rates
    ]


def test_the_table_has_medians_and_the_bar_is_of_ratios_within_rounds(capsys):
    found = dict(
        zip(SYSTEMS, (turns(90, 100, 50), turns(100, 100, 40), turns(10, 10, 10)), strict=True)
    )
    rows = {row["system"]: row for row in ray_routers.rows_of(found)}
    assert rows["quire"]["requests_per_s"] == 90 and rows["ray_prefix"]["requests_per_s"] == 10
    assert rows["quire"]["open_ttft_p99_ms"] == pytest.approx(22.22, abs=0.01)
    assert (
        rows["quire"]["open_hit_percent"] == 60 and rows["quire"]["ingress_cpu_ms_per_request"] == 1
    )
    ray_routers.print_table(list(rows.values()))
    assert len(capsys.readouterr().out.splitlines()) == 4
    bar = ray_routers.bar_of("hot", found)
    assert (bar.name, bar.value, bar.holds) == ("router/hot_requests_over_power_of_two", 1.0, True)
    assert bar.details["min"] == 0.9


def test_everybody_takes_each_turn_with_the_same_requests():
    """The order reverses in every round; the open loop's rate is a part of the baseline's speed."""
    asked: list[tuple[str, int]] = []

    class Fake:
        def __init__(self, name, cluster, log):
            self.name = name

        async def closed(self, requests, users):
            asked.append((self.name, len(requests)))
            return summary({"power_of_two": 50.0}.get(self.name, 200.0), 0.0)

        async def turn(self, closed, users, open_):
            asked.append((self.name, id(closed)))
            assert len(open_) == 60 and open_[-1].at_s == pytest.approx(2.0, rel=0.5)
            return turns(50.0)[0]

    options = argparse.Namespace(warm_up=5, concurrency=3, rounds=2, requests=4, open_s=2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_routers, "System", Fake)
        found, rate = asyncio.run(ray_routers.measure(None, ArrivalLog(MIXES["hot"]), options))
    assert rate == pytest.approx(30.0)
    names = [name for name, _ in asked]
    assert names == [*SYSTEMS, *SYSTEMS, *SYSTEMS[::-1]]
    assert len({part for _, part in asked[3:6]}) == len({part for _, part in asked[6:]}) == 1
    assert {name: len(of_system) for name, of_system in found.items()} == dict.fromkeys(SYSTEMS, 2)


@pytest.mark.parametrize(
    "config",
    [
        ray_routers.serve_config(),
        data_plane.serve_config(512),
        truth.serve_config("decisions"),
        agents.serve_config(agents.SYSTEMS),
    ],
    ids=["ray_routers", "data_plane", "truth", "agents"],
)
def test_the_clusters_of_the_benchmarks_pass_every_check(tmp_path, config):
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(config))
    loaded = load(path)
    assert len(loaded.applications) == len(config["applications"])


def test_the_bare_application_has_the_same_numbers_of_processes():
    *_, application = ray_routers.serve_config()["applications"]
    deployment = build(application["args"])._bound_deployment
    assert (deployment.name, deployment.num_replicas) == ("Router", 2)
    (engines,) = deployment.init_args
    assert (engines._bound_deployment.name, engines._bound_deployment.num_replicas) == (
        "Replica",
        4,
    )

"""Replicas that hang or crash are replaced, and only the request that makes them crash fails. Real Ray.

The faults are those of `quire.replica.serving.faults.faults`. What streams should be is what an engine alone answers.
One round of each in `make chaos`, fifty with `CHAOS_SIZE=long`; one of each is part of the suite, on a smaller cluster:
`test_faults.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence

import httpx
import openai
import pytest
from live import SIZE, Cluster, start_cluster, wait_until, write_bars

from quire.cluster.bench.results.report import Bar
from quire.protos.sampling_params import SamplingParams
from quire.replica import Engine
from quire.replica.builtin_model import CHECKPOINT
from quire.router.scoring.embedding_format import EmbeddingFormat
from quire.router.text.tokenizer import TextTokenizer

pytestmark = [
    pytest.mark.system,
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.timeout(600 if SIZE == "ci" else 7200),
]
NUM_ROUNDS = {"ci": 1, "long": 50}[SIZE]
NUM_REPLICAS = 3
NUM_OTHERS = 12
NUM_TOKENS = 400
ALONE = -1  # number of the request that has a fault
FAULT_AT = 60  # output token
INPUTS = [f"A lighthouse, {i} " * (1 + 12 * i) for i in range(6)]


@pytest.fixture(scope="module")
def faulty_cluster(tmp_path_factory) -> Iterator[Cluster]:
    def change(config: dict) -> None:
        args = config["applications"][0]["args"]
        args |= {"replicas": NUM_REPLICAS, "routers": 2}
        args["engine"] = {"deterministic": True, "fault_injection": True, "step_timeout_s": 3.0}
        # However slow the machine is: the last of the replicas may be dead until the first is back.
        args["router"] = {"max_move_s": 240.0}

    yield from start_cluster(tmp_path_factory.mktemp("crashes"), change)


def fields(i: int) -> dict[str, object]:
    return {"temperature": 0.9, "top_p": 1.0, "seed": 100 + i, "max_tokens": NUM_TOKENS}


# Long enough not to have ended before it is found and its replica is killed.
LONG = fields(0) | {"max_tokens": 3000}


@pytest.fixture(scope="module")
def expected() -> dict[int | str, list]:
    """Token ids by stream number, of the request that has a fault, and of a long one; after the streams, embeddings."""
    tokenizer = TextTokenizer.load(CHECKPOINT)
    wanted = {i: (f"Story {i}", fields(i)) for i in range(NUM_OTHERS)}
    wanted["alone"] = ("Story", fields(ALONE))
    wanted["long"] = ("Story", LONG)
    prompts = [tokenizer.encode(prompt).tolist() for prompt, _ in wanted.values()]
    params = [SamplingParams(**given, ignore_eos=True) for _, given in wanted.values()]
    with Engine(model="embedded", deterministic=True) as engine:
        outputs = engine.generate(prompts, params)
        inputs = [tokenizer.encode(text).tolist() for text in INPUTS]
        embedded = engine.generate(inputs, SamplingParams(pooling="last"))
    answers: dict[int | str, list] = {
        name: out.token_ids for name, out in zip(wanted, outputs, strict=True)
    }
    finish = EmbeddingFormat().finish
    answers[NUM_OTHERS] = [[finish(out.embedding, None).tolist() for out in embedded]]
    return answers


def replicas(cluster: Cluster) -> dict[str, int]:
    """Serve's id of every running replica, and its process."""
    details = cluster.serve_status()["applications"]["quire"]["deployments"]["Replica"]
    return {r["replica_id"]: r["pid"] for r in details["replicas"] if r["state"] == "RUNNING"}


def wait_until_replaced(cluster: Cluster, before: dict[str, int], num_gone: int) -> None:
    def is_whole() -> bool:
        now = set(replicas(cluster).values())
        gone = set(before.values()) - now
        return len(now) == NUM_REPLICAS and len(gone) >= num_gone and len(cluster.loads()) == 3

    wait_until(is_whole, 120, f"{num_gone} replicas were replaced")
    assert len(set(before.values()) & set(replicas(cluster).values())) == NUM_REPLICAS - num_gone


async def ask(
    client: openai.AsyncOpenAI, prompt: str, label: str = "", **given: object
) -> list[int]:
    token_ids: list[int] = []
    stream = await client.completions.create(
        model="embedded",
        prompt=prompt,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        extra_headers={"x-request-id": label} if label else None,
        **given,
    )
    async for chunk in stream:
        token_ids += chunk.choices[0].token_ids or []
    return token_ids


async def embeddings(client: openai.AsyncOpenAI, streams: Sequence[asyncio.Task]) -> list:
    """The different answers to one request that is sent again and again while some stream runs."""
    found: list[list[list[float]]] = []
    while not all(stream.done() for stream in streams):
        answer = await client.embeddings.create(model="embedded", input=INPUTS)
        vectors = [item.embedding for item in answer.data]
        if vectors not in found:
            found.append(vectors)
    return found


def run_beside_others(cluster: Cluster, prompt: str, label: str) -> tuple[object, list]:
    """The answer to a request with a fault, or its error, and those of the others that run meanwhile.

    The last of these are embeddings.
    """

    async def run() -> tuple[object, list]:
        async with openai.AsyncOpenAI(
            base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:
            others: list[asyncio.Task] = [
                asyncio.create_task(ask(client, f"Story {i}", **fields(i)))
                for i in range(NUM_OTHERS)
            ]
            others.append(asyncio.create_task(embeddings(client, tuple(others))))
            await asyncio.sleep(0.3)
            faulty = ask(client, prompt, label, **fields(ALONE))
            (outcome,) = await asyncio.gather(faulty, return_exceptions=True)
            return outcome, await asyncio.gather(*others, return_exceptions=True)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def bars() -> Iterator[list[Bar]]:
    """What the tests of this file have found; written where `CHAOS_OUT` says."""
    found: list[Bar] = []
    yield found
    write_bars("chaos_crashes.json", found)


@contextlib.contextmanager
def judged(bars: list[Bar], name: str, unit: str) -> Iterator[list[list[str]]]:
    """Takes what was not as it should be in each round, at its end; there is a bar whatever ends the rounds."""
    wrong: list[list[str]] = []
    began_s = time.monotonic()
    try:
        yield wrong
    finally:
        num_good = sum(not of_round for of_round in wrong)
        details = {"rounds": len(wrong), "seconds": round(time.monotonic() - began_s)}
        bars.append(
            Bar(f"chaos/{name}", num_good, unit, NUM_ROUNDS, at_most=False, details=details)
        )
    everything = [f"round {n}: {line}" for n, of_round in enumerate(wrong) for line in of_round]
    assert not everything, "\n".join(everything)


def wrong_others(others: list, expected: dict[int | str, list[int]]) -> list[str]:
    return [f"stream {i}: {other!r}" for i, other in enumerate(others) if other != expected[i]]


def test_a_hung_step_ends_its_process_and_every_stream_goes_on(faulty_cluster, expected, bars):
    with judged(bars, "hung_steps", "hangs") as rounds:
        for _ in range(NUM_ROUNDS):
            before = replicas(faulty_cluster)
            label = f"fault:hang:3600@{FAULT_AT}"
            answer, others = run_beside_others(faulty_cluster, "Story", label)
            wrong = wrong_others(others, expected)
            if answer != expected["alone"]:
                wrong.append(f"the request whose step hung: {answer!r}")
            ready = httpx.get(f"{faulty_cluster.url}/ready", timeout=60)
            if ready.status_code != 200:
                wrong.append(f"/ready: {ready.text}")
            wait_until_replaced(faulty_cluster, before, 1)
            rounds.append(wrong)


def test_a_poison_request_fails_and_everybody_else_is_untouched(faulty_cluster, expected, bars):
    with judged(bars, "poison_requests", "requests") as rounds:
        for _ in range(NUM_ROUNDS):
            before = replicas(faulty_cluster)
            error, others = run_beside_others(faulty_cluster, "Story", f"fault:crash!@{FAULT_AT}")
            wrong = wrong_others(others, expected)
            code = getattr(error, "code", None)
            if code != "engine_crash" or "with nothing else in its step" not in error.message:
                wrong.append(f"the poison request: {error!r}")
            wait_until_replaced(faulty_cluster, before, 3)
            rounds.append(wrong)


def test_frames_that_are_repeated_late_or_broken_change_no_answer(faulty_cluster, expected, bars):
    """Of the fault's own request, whose frames they are."""

    async def run(labels: list[str]) -> list[object]:
        async with openai.AsyncOpenAI(
            base_url=f"{faulty_cluster.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:
            return await asyncio.gather(
                *(ask(client, "Story", label, **fields(ALONE)) for label in labels),
                return_exceptions=True,
            )

    with judged(bars, "frame_faults", "rounds") as rounds:
        for number in range(NUM_ROUNDS):
            at = 1 + number * 7 % (NUM_TOKENS - 1)  # early and late in the answer
            labels = [f"fault:{kind}@{at}" for kind in ("duplicate", "delay:1", "drop", "corrupt")]
            answers = asyncio.run(run(labels))
            rounds.append(
                [
                    f"{label}: {answer!r}"
                    for label, answer in zip(labels, answers, strict=True)
                    if answer != expected["alone"]
                ]
            )


def test_kills_from_outside_convict_nobody(faulty_cluster, expected):
    """A stream outlives three kills of the very replica that computes it."""

    async def run() -> list[int]:
        token_ids: list[int] = []
        num_kills = 0
        async with openai.AsyncOpenAI(
            base_url=f"{faulty_cluster.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:
            stream = await client.completions.create(
                model="embedded",
                prompt="Story",
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
                **LONG,
            )
            async for chunk in stream:
                token_ids += chunk.choices[0].token_ids or []
                if num_kills < 3 and len(token_ids) >= 100 * (num_kills + 1):
                    num_kills += 1
                    await asyncio.to_thread(kill_the_busy_one)
        assert num_kills == 3
        return token_ids

    wait_until(
        lambda: len(replicas(faulty_cluster)) == len(faulty_cluster.loads()) == NUM_REPLICAS,
        120,
        "three replicas",
    )
    killed: set[int] = set()

    def kill_the_busy_one() -> None:
        """Routers and Serve may still know one that is dead."""

        def has_killed() -> bool:
            processes = replicas(faulty_cluster)
            busy = {load.replica for load in faulty_cluster.loads() if load.num_running}
            pids = {processes[name] for name in busy & processes.keys()} - killed
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            killed.update(pids)
            return bool(pids)

        wait_until(has_killed, 120, "a replica computes the stream")

    assert asyncio.run(run()) == expected["long"]

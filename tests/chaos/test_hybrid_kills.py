"""Streams of a hybrid model survive the death of their replica: both kinds of layers continue exactly.

Real Ray, real SIGKILLs, as `test_rank_kills.py`; a tiny Qwen3-Next with random weights.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_clients import Clients
from live import CHANGE_TIMEOUT_S, Cluster, start_cluster, wait_until
from test_replica_kills import kill

from quire.replica.checkpoint.checkpoint import resolve_checkpoint

NUM_STREAMS, NUM_KILLS, NUM_REPLICAS, NUM_POSITIONS = 60, 4, 2, 4096

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]


def save_hybrid(folder: Path) -> None:
    """Save the tiny model of a proof, with the built-in model's tokenizer and chat template."""
    from transformers import CONFIG_MAPPING

    from quire.replica.proof.model_proof import save_random_model
    from quire.replica.proof.tiny_config import tiny_config

    own = resolve_checkpoint("embedded")
    config = CONFIG_MAPPING["qwen3_next"]()
    entries = tiny_config(config.to_dict(), NUM_POSITIONS, config.attribute_map)
    read = json.loads((own / "config.json").read_text())
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    entries |= {name: read[name] for name in names if name in read}
    save_random_model({**entries, "architectures": ["Qwen3NextForCausalLM"]}, folder)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(own / name, folder / name)


@pytest.fixture(scope="module")
def hybrid_cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Two replicas and a router."""
    folder = tmp_path_factory.mktemp("model")
    save_hybrid(folder)

    def change(config: dict) -> None:
        application = config["applications"][0]
        args = application["args"]
        args |= {"model": str(folder), "dtype": "float32", "replicas": NUM_REPLICAS, "routers": 1}
        args["engine"] = {"deterministic": True, "num_threads": 1}
        # All replicas may be dead until the first is back.
        args["router"] = {"max_move_s": 300.0, "drain_timeout_s": 0.0}
        application["deployments"] = [{"name": "Router", "graceful_shutdown_timeout_s": 300.0}]

    yield from start_cluster(tmp_path_factory.mktemp("hybrid"), change)


def test_streams_of_a_hybrid_model_equal_their_uninterrupted_selves(hybrid_cluster):
    calm = Clients(hybrid_cluster, NUM_STREAMS)
    asyncio.run(calm.run(iter(range(NUM_STREAMS))))
    assert [n for n, outcome in calm.outcomes.items() if isinstance(outcome, str)] == []
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    rng, killed = random.Random(seed), []
    storm = Clients(hybrid_cluster, NUM_STREAMS)

    async def kill_again_and_again() -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            pids = await asyncio.to_thread(hybrid_cluster.pids, "Replica")
            if len(pids) == NUM_REPLICAS and kill([rng.choice(pids)]):
                killed.append(len(storm.outcomes))
                print(f"kill {len(killed)}", flush=True)
                # Serve's news are a second old.
                await asyncio.sleep(2.0)

    def until_enough() -> Iterator[int]:
        number = 0
        while number < NUM_STREAMS or len(killed) < NUM_KILLS:
            yield number
            number += 1

    async def run() -> None:
        killing = asyncio.create_task(kill_again_and_again())
        await storm.run(until_enough())
        killing.cancel()

    asyncio.run(run())
    wrong = storm.wrong(calm)
    moved = sum(watch.attempts > 1 for watch in storm.watches.values())
    print(f"{len(storm.outcomes)} streams, {len(killed)} kills, {moved} moved", flush=True)
    wait_until(
        lambda: len(hybrid_cluster.loads()) == NUM_REPLICAS, CHANGE_TIMEOUT_S, "all are back"
    )
    assert not wrong, "\n".join(wrong)
    assert moved, "kills hit running streams"

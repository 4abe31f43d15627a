"""Streams of other kinds of models survive the death of their replica: a hybrid, and one with a draft model.

Real Ray, real SIGKILLs, as `test_rank_kills.py`. The hybrid is a tiny Qwen3-Next with random weights: both kinds of
layers continue exactly. The built-in model, with layers that change nothing and so take longer, has a spoiled copy of
itself as draft model: some drafts are wrong, and a survivor drafts on from what another replica has generated.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos_clients import Clients
from live import CHANGE_TIMEOUT_S, Cluster, start_cluster, wait_until
from safetensors.torch import load_file, save_file
from test_replica_kills import kill

from quire.replica.checkpoint.checkpoint import resolve_checkpoint

NUM_STREAMS, NUM_KILLS, NUM_REPLICAS, NUM_POSITIONS = 60, 4, 2, 4096
NUM_LAYERS, NUM_ADDED_LAYERS = 4, 20  # of the built-in model, and of its slow copy

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


def save_slow(folder: Path) -> None:
    """Save the built-in model with further layers, which add nothing to the hidden states."""
    own = resolve_checkpoint("embedded")
    shutil.copytree(own, folder, dirs_exist_ok=True)
    config = json.loads((own / "config.json").read_text())
    assert config["num_hidden_layers"] == NUM_LAYERS
    config["num_hidden_layers"] += NUM_ADDED_LAYERS
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(own / "model.safetensors")
    first = {n: t for n, t in tensors.items() if n.startswith("model.layers.0.")}
    for layer in range(NUM_LAYERS, NUM_LAYERS + NUM_ADDED_LAYERS):
        for name, tensor in first.items():
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            copy = torch.zeros_like(tensor) if adds else tensor.clone()
            tensors[name.replace("layers.0.", f"layers.{layer}.")] = copy
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_spoiled(folder: Path) -> None:
    """Save the built-in model with noise on its weights."""
    shutil.copytree(resolve_checkpoint("embedded"), folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for tensor in tensors.values():
        tensor += 0.05 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=["hybrid", "draft model"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def cluster(kind, tmp_path_factory) -> Iterator[Cluster]:
    """Two replicas and a router."""
    folder = tmp_path_factory.mktemp("model")
    engine: dict[str, Any] = {"deterministic": True, "num_threads": 1}
    if kind == "hybrid":
        save_hybrid(folder)
        own = {"model": str(folder), "dtype": "float32"}
    else:
        save_slow(folder)
        own = {"model": str(folder)}
        draft = tmp_path_factory.mktemp("draft")
        save_spoiled(draft)
        engine["speculation"] = {"method": "draft_model", "draft_model": str(draft)}

    def change(config: dict) -> None:
        application = config["applications"][0]
        args = application["args"]
        args |= {**own, "replicas": NUM_REPLICAS, "routers": 1, "engine": engine}
        # All replicas may be dead until the first is back.
        args["router"] = {"max_move_s": 300.0, "drain_timeout_s": 0.0}
        application["deployments"] = [{"name": "Router", "graceful_shutdown_timeout_s": 300.0}]

    yield from start_cluster(tmp_path_factory.mktemp("kills"), change)


def test_streams_equal_their_uninterrupted_selves(cluster, kind):
    calm = Clients(cluster, NUM_STREAMS)
    asyncio.run(calm.run(iter(range(NUM_STREAMS))))
    assert [n for n, outcome in calm.outcomes.items() if isinstance(outcome, str)] == []
    if kind == "draft model":
        drafted = cluster.metric("quire_drafted_tokens_total")
        accepted = cluster.metric("quire_accepted_draft_tokens_total")
        print(f"{drafted:.0f} tokens drafted, {accepted:.0f} accepted", flush=True)
        assert 0 < accepted < drafted
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}", flush=True)
    rng, killed = random.Random(seed), []
    storm = Clients(cluster, NUM_STREAMS)

    async def kill_again_and_again() -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            pids = await asyncio.to_thread(cluster.pids, "Replica")
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
    wait_until(lambda: len(cluster.loads()) == NUM_REPLICAS, CHANGE_TIMEOUT_S, "all are back")
    assert not wrong, "\n".join(wrong)
    assert moved, "kills hit running streams"

"""Requests of an engine with their adapters: no cross-talk, no shared cache, failure and preemption, many swaps."""

from __future__ import annotations

import gc
import os
import random
from concurrent.futures import ThreadPoolExecutor

import model_zoo
import pytest
from adapter_folders import save_adapter, save_merged

from quire.protos.adapter_ref import AdapterRef
from quire.protos.errors import InvalidRequest
from quire.protos.sampling_params import SamplingParams
from quire.replica.config import SizingError, SpeculationOptions
from quire.replica.core.adapter import AdapterSlots
from quire.replica.engine import Engine

NUM_ADAPTERS = 5
OPTIONS = dict(
    device="cpu",
    dtype="float32",
    num_threads=1,
    num_blocks=64,
    block_size=16,
    max_model_len=128,
    max_batch_tokens=64,
    max_running_requests=8,
)
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[3 + (7 * i * j) % 160 for j in range(20 + 9 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def folders(zoo, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [
        save_adapter(root / str(i), zoo("llama"), rank=1 + 3 * i, seed=i, size=0.7)
        for i in range(NUM_ADAPTERS)
    ]


@pytest.fixture(scope="module")
def engine(zoo):
    with Engine(model=str(zoo("llama")), max_loaded_adapters=2, **OPTIONS) as engine:
        yield engine
        engine.check()


def refs_of(folders) -> list[AdapterRef]:
    return [AdapterRef.of_folder(folder.name, str(folder)) for folder in folders]


def tokens(engine, prompts, adapter=None, params=PARAMS):
    outputs = engine.generate(prompts, params, adapter=adapter, progress=False)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(engine, folders):
    """Tokens by adapter, each computed alone; None: the model alone."""
    found = {None: [tokens(engine, [p])[0] for p in PROMPTS]}
    for i, ref in enumerate(refs_of(folders)):
        found[i] = [tokens(engine, [p], engine.adapter(ref))[0] for p in PROMPTS]
    return found


def test_tokens_equal_those_of_the_merged_checkpoint(zoo, folders, expected, tmp_path):
    merged = save_merged(tmp_path / "merged", zoo("llama"), folders[3])
    with Engine(model=str(merged), **OPTIONS) as engine:
        assert tokens(engine, PROMPTS) == expected[3]
    assert expected[3] != expected[None]


def test_no_request_sees_the_adapter_or_the_cache_of_another(engine, folders, expected):
    """More adapters than slots, prompts that several requests share, in random batches."""
    adapters = {None: None} | {i: engine.adapter(ref) for i, ref in enumerate(refs_of(folders))}
    chance = random.Random(4)
    work = [(chance.choice(list(adapters)), chance.randrange(len(PROMPTS))) for _ in range(40)]
    by_adapter = {key: [n for own, n in work if own == key] for key in adapters}
    # The calls of several threads share the batch.
    with ThreadPoolExecutor(len(adapters)) as pool:
        calls = {
            key: pool.submit(tokens, engine, [PROMPTS[n] for n in own], adapters[key])
            for key, own in by_adapter.items()
        }
        for key, own in by_adapter.items():
            assert calls[key].result() == [expected[key][n] for n in own]
    engine.check()


def test_drafts_are_verified_with_the_adapter_of_their_request(zoo, folders):
    prompt = PROMPTS[0] * 2
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    found = {}
    for method in ("off", "ngram"):
        options = dict(OPTIONS, speculation=SpeculationOptions(method=method))
        with Engine(model=str(zoo("llama")), max_loaded_adapters=2, **options) as engine:
            adapters = [None, *map(engine.adapter, refs_of(folders)[2:4])]
            with ThreadPoolExecutor(3) as pool:
                calls = [pool.submit(tokens, engine, [prompt], a, params) for a in adapters]
                found[method] = [call.result() for call in calls]
    assert found["ngram"] == found["off"]


def test_choices_and_hits_within_an_adapter(engine, folders, expected):
    ref = refs_of(folders)[1]
    adapter = engine.adapter(ref)
    outputs = engine.generate([PROMPTS[3]], PARAMS, n=3, adapter=adapter, progress=False)
    assert [o.token_ids for o in outputs] == [expected[1][3]] * 3
    assert outputs[0].num_cached_tokens > 0, "an earlier request with this adapter left its blocks"


# `make adapters` makes it 1,000.
NUM_SWAPS = int(os.environ.get("QUIRE_ADAPTER_SWAPS", "60"))


def test_changing_adapters_many_times_leaks_nothing(engine, folders):
    refs = refs_of(folders)
    one = SamplingParams(max_tokens=1, temperature=0.0)

    def swap(count: int) -> None:
        for i in range(count):
            tokens(engine, [[5, 6, 7]], engine.adapter(refs[i % NUM_ADAPTERS]), one)
            engine.forget_adapter(refs[i % NUM_ADAPTERS].digest)

    def alive() -> int:
        gc.collect()
        return len(gc.get_objects())

    swap(20)
    before = alive()
    swap(NUM_SWAPS)
    assert alive() < before + 500, "an object for each swap"
    slots: AdapterSlots = engine.call(lambda scheduler: scheduler.rows.adapters).result()
    engine.call(lambda scheduler: scheduler.rows.adapters.check()).result()
    assert slots.num_used == 0
    assert len(slots) == 0, "forgotten adapters free their slots"


def test_an_engine_without_slots_refuses_adapters(zoo, folders):
    with Engine(model=str(zoo("llama")), **OPTIONS) as engine:
        with pytest.raises(InvalidRequest, match="max_loaded_adapters is 0"):
            engine.adapter(refs_of(folders)[0])


def test_models_without_plain_products_are_refused_by_name(tmp_path):
    model_zoo.build_unlike("deepseek_v3", tmp_path)
    with pytest.raises(SizingError, match=r"deepseek.*latent attention|Deepseek.*latent attention"):
        Engine(model=str(tmp_path), max_loaded_adapters=1, **OPTIONS)

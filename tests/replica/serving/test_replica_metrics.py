"""A replica's metrics are those of its engine: real requests, read back from the text for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from quire.protos.metric_families import join
from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.engine import Engine
from quire.replica.loop import LoopOutput
from quire.replica.serving.replica_metrics import ReplicaMetrics

# A machine for GPU measurements has no such library.
parser = pytest.importorskip("prometheus_client.parser")


class Replica:
    """An engine whose outputs are counted, as the actor does it."""

    def __init__(self, **args: object):
        self.metrics: ReplicaMetrics | None = None
        self._ended = threading.Semaphore(0)
        self.engine = Engine(model="embedded", num_threads=1, on_output=self._on_output, **args)
        self.metrics = ReplicaMetrics(self.engine)

    def _on_output(self, output: LoopOutput) -> None:
        self.metrics.on_output(output)
        for delta in output.deltas.whole:
            if delta.finish_reason is not None:
                self._ended.release()

    def answer(self, key: str, prompt_ids: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        self.engine.submit(Request(key, prompt_ids, params))
        assert self._ended.acquire(timeout=60)

    def read(self) -> dict[str, float]:
        """Values of series by name; of a family with labels the sum. Facts and buckets are left out."""
        text = join([self.metrics.page({"replica": "r1"})]).decode()
        families = parser.text_string_to_metric_families(text)
        samples = [sample for family in families for sample in family.samples]
        assert all(sample.labels["replica"] == "r1" for sample in samples)
        found: Counter[str] = Counter()
        for sample in samples:
            if sample.labels.keys() <= {"replica", "tier"}:
                found[sample.name] += sample.value
        return found


def test_tokens_hits_steps_and_blocks():
    replica = Replica(num_blocks=64, max_model_len=512)
    with replica.engine:
        before = replica.read()
        assert before["quire_prefix_hit_tokens_total"] == before["quire_output_tokens_total"] == 0
        assert before["quire_kv_blocks_free"] == 64 and before["quire_kv_usage_ratio"] == 0
        prompt = list(range(5, 205))
        for key in "ab":
            replica.answer(key, prompt, 10)
        after = replica.read()
        assert after["quire_output_tokens_total"] == 20
        assert (
            after["quire_prompt_tokens_total"] == after["quire_prefix_queried_tokens_total"] == 400
        )
        block = after["quire_kv_block_tokens"]
        assert after["quire_prefix_hit_tokens_total"] == 199 // block * block
        assert after["quire_engine_step_seconds_count"] == replica.engine.load().num_steps >= 11
        assert after["quire_engine_step_seconds_sum"] > 0
        assert after["quire_kv_blocks_cached"] > 0
        assert after["quire_kv_evictions_total"] == 0
        parts = ("free", "cached", "in_use")
        assert sum(after[f"quire_kv_blocks_{part}"] for part in parts) == 64


def test_evictions_and_usage():
    replica = Replica(num_blocks=16, max_model_len=512)
    with replica.engine:
        block = replica.engine.config.block_size
        for i in range(4):
            replica.answer(f"r{i}", [7 + i] * (6 * block), 1)
        after = replica.read()
        # 24 full blocks have been computed where 16 have room.
        assert after["quire_kv_evictions_total"] >= 8
        running = Request(
            "long", [3] * (4 * block), SamplingParams(max_tokens=200, ignore_eos=True)
        )
        running.credit_end = 1  # it pauses with its blocks
        replica.engine.submit(running)
        while not replica.engine.load().blocks_in_use:
            pass
        now = replica.read()
        assert now["quire_kv_usage_ratio"] == now["quire_kv_blocks_in_use"] / 16 > 0
        replica.engine.abort("long")


def test_facts_of_the_cache():
    replica = Replica(num_blocks=64, max_model_len=512)
    with replica.engine:
        text = join([replica.metrics.page({})]).decode()
        info = next(line for line in text.splitlines() if line.startswith("quire_cache_info{"))
        config = replica.engine.config
        assert f'block_size="{config.block_size}"' in info and 'num_blocks="64"' in info
        assert f'max_tokens="{config.max_cache_tokens}"' in info and info.endswith(" 1.0")

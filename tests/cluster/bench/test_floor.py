"""The floor counts what a step must read and compute."""

from __future__ import annotations

import json

import pytest

from quire.cluster.bench.engines.checkpoints import SHAPES, VOCAB_SIZE
from quire.cluster.bench.engines.floor import ModelShape, Rates, best_of, floor_of, measure_rates
from quire.cluster.bench.load.workloads import WORKLOADS, Workload

# Qwen3-0.6B's shape with a vocabulary of 32,000.
HALFB = ModelShape(28, 16, 8, 128, 440_401_920, 32_000 * 1024, 2)


def test_the_shape_comes_from_the_configuration(tmp_path):
    config = SHAPES["halfb"] | {"vocab_size": VOCAB_SIZE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelShape.of_checkpoint(tmp_path) == HALFB
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts": 8}))
    with pytest.raises(ValueError, match=r"num_experts is 8: models with experts have no floor"):
        ModelShape.of_checkpoint(tmp_path)


def test_a_decode_step_of_one_request_reads_all_weights_once():
    rates = Rates(memory_gb_per_s=33.0, gflop_per_s=1e9)  # only memory counts
    floor = floor_of(WORKLOADS["W5"], HALFB, rates)
    weights_s = HALFB.weight_bytes / 33e9
    assert floor.prefill_s == pytest.approx(weights_s)
    # On top of the weights the keys and values of 129 to 255 tokens.
    assert floor.decode_s / 127 == pytest.approx(weights_s, rel=0.03)
    assert floor.decode_s / 127 > weights_s
    assert floor.total_s == floor.prefill_s + floor.decode_s


def test_a_prompt_computes_every_layer_for_every_token_and_the_head_once():
    rates = Rates(memory_gb_per_s=1e9, gflop_per_s=400.0)
    floor = floor_of(Workload("p", 2, 0, 100, 1), HALFB, rates)
    products = 2 * HALFB.layer_parameters * 200 + 2 * HALFB.head_parameters * 2
    pairs = 2 * 100 * 100 / 2
    assert floor.prefill_s == pytest.approx(
        (products + HALFB.attention_flops(pairs)) / 400e9, rel=1e-9
    )
    assert floor.decode_s == 0


def test_what_is_shared_is_computed_once():
    rates = Rates(33.0, 410.0)
    shared = floor_of(Workload("s", 32, 768, 32, 1), HALFB, rates).total_s
    alone = floor_of(Workload("a", 32, 0, 800, 1), HALFB, rates).total_s
    assert shared < alone / 10


def test_the_machine_is_measured_and_the_fastest_counts():
    rates = measure_rates("float32", budget_s=0.05)
    assert rates.memory_gb_per_s > 0.1 and rates.gflop_per_s > 0.1
    assert best_of([Rates(1, 4), Rates(3, 2)]) == Rates(3, 4)

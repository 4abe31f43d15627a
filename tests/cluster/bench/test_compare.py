"""Engines in their own processes: answers, stopping, failures by name, and kept turns."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from pathlib import Path

import pytest

from quire.cluster.bench.engines import compare
from quire.cluster.bench.engines.compare import Comparison, Turn
from quire.cluster.bench.engines.engine_process import EngineFailed, EngineProcess, EngineSpec
from quire.cluster.bench.engines.floor import ModelShape, Rates, floor_of
from quire.cluster.bench.load.workloads import Workload
from quire.replica.builtin_model import CHECKPOINT

OPTIONS = {"max_model_len": 256, "num_blocks": 64}
WORKLOADS = [Workload.parse("2x4->3"), Workload.parse("1x4->40")]
SPEC = EngineSpec("quire", "quire", str(CHECKPOINT), "float32", 1, OPTIONS)


@dataclasses.dataclass(frozen=True)
class Run:
    """A comparison, and the file in which it was kept."""

    found: Comparison
    kept: Path


def test_an_engine_answers_and_stands_still_in_between(tmp_path):
    prompts = [[400 + i, 401, 402] for i in range(3)]
    with (tmp_path / "log").open("w") as log:
        process = EngineProcess(SPEC, log)
        try:
            assert process.startup["load_s"] > 0
            first = process.generate(prompts, 5)
            assert [len(output) for output in first["outputs"]] == [5, 5, 5]
            process.settle(20.0)
            assert process.startup["settled_s"] < 20
            process.stop()
            used_s = process.usage().cpu_s
            time.sleep(0.3)
            assert process.usage().cpu_s == used_s > 0
            with process.awake():
                assert process.generate(prompts, 5)["outputs"] == first["outputs"]
            with process.awake(), pytest.raises(EngineFailed, match=r"quire: .*max_model_len"):
                process.generate([[1] * 500], 5)
        finally:
            process.close()


def test_an_engine_that_cannot_be_loaded_says_why(tmp_path):
    spec = EngineSpec("quire", "quire", str(tmp_path / "nothing"), "float32", 1)
    with (tmp_path / "log").open("w") as log, pytest.raises(EngineFailed, match="nothing"):
        EngineProcess(spec, log)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """Two repetitions of two workloads; one of the two engines cannot be loaded.

    The n-th measurement of the machine's rates gives n GB/s. `test_floor.py` measures a machine.
    """
    folder = tmp_path_factory.mktemp("compare")
    broken = EngineSpec("broken", "quire", str(folder / "nothing"), "float32", 1)
    measurements = itertools.count(1)

    def measure_rates(dtype: str, budget_s: float) -> Rates:
        assert (dtype, budget_s) in (("float32", 0.01), ("float32", 0.01 / 4))
        return Rates(float(next(measurements)), 1.0)

    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("w") as log:
        patch.setattr(compare, "measure_rates", measure_rates)
        found = compare.compare(
            [SPEC, broken], WORKLOADS, 2, 512, log, keep=folder / "kept", rates_budget_s=0.01
        )
    return Run(found, folder / "kept")


def test_one_engine_that_fails_does_not_end_the_others(run):
    assert list(run.found.failures) == ["broken"]
    assert [(t.engine, t.workload, t.repetition) for t in run.found.turns] == [
        ("quire", "2x4->3", 0),
        ("quire", "1x4->40", 0),
        ("quire", "2x4->3", 1),
        ("quire", "1x4->40", 1),
    ]
    assert compare.read([run.kept]) == run.found


def test_the_rates_of_a_turn_are_the_faster_of_those_before_and_after_it(run):
    assert [turn.rates.memory_gb_per_s for turn in run.found.turns] == [3, 4, 6, 7]
    # At the start and after each repetition.
    assert [rates.memory_gb_per_s for rates in run.found.rates] == [1, 5, 8]


def test_one_stream_has_a_time_for_its_first_token_and_for_each_after_it(run):
    several, single = WORKLOADS
    of = {w.name: [t for t in run.found.turns if t.workload == w.name] for w in WORKLOADS}
    assert [turn.first_token_s for turn in of[several.name]] == [None, None]
    assert all(0 < turn.first_token_s < turn.seconds for turn in of[single.name])
    (row,) = compare.summarise(run.found, [single], None, "quire")["rows"]
    each_ms = [1e3 * (turn.seconds - turn.first_token_s) / 39 for turn in of[single.name]]
    assert row["ms_per_token"]["median"] == pytest.approx(statistics.median(each_ms), rel=1e-3)


def turns(*rows) -> Comparison:
    found = Comparison({"quire": {}, "peer": {}}, rates=[Rates(10.0, 100.0)])
    found.turns = [Turn(*row, 2 * row[3], 0.1, 100.0) for row in rows]
    return found


def test_the_table_has_ratios_their_spread_and_the_floor():
    workload = Workload.parse("2x4->3")
    shape = ModelShape(2, 4, 2, 16, 1_000_000, 500_000, 4)
    found = turns(
        ("quire", "2x4->3", 0, 1.0),
        ("peer", "2x4->3", 0, 3.0),
        ("quire", "2x4->3", 1, 2.0),
        ("peer", "2x4->3", 1, 4.0),
    )
    summary = compare.summarise(found, [workload], shape, "quire")
    own, peer = summary["rows"]
    assert own["seconds"] == {"median": 1.5, "min": 1.0, "max": 2.0, "turns": 2}
    assert own["output_tokens_per_s"] == 4.0 and "ratio" not in own
    assert peer["cpu_ratio"]["median"] == 2.5 and own["cpu_s"]["median"] == 3.0
    assert peer["ratio"] == {"median": 2.5, "min": 2.0, "max": 3.0, "turns": 2}
    assert own["percent_of_floor"] == pytest.approx(100 * own["floor_s"] / 1.5, abs=0.1)
    assert "percent_of_floor_beside" not in own  # turns of a run without that measurement
    text = compare.table(summary, "quire")
    assert "2.50x (2.00 to 3.00)" in text and "10 GB/s, 100 GFLOP/s" in text


def test_the_floor_beside_a_turn_is_that_of_its_minute():
    workload = Workload.parse("2x4->3")
    shape = ModelShape(2, 4, 2, 16, 1_000_000, 500_000, 4)
    found = turns(("quire", "2x4->3", 0, 1.0), ("quire", "2x4->3", 1, 2.0))
    # The second turn took twice as long at half the machine's speed, which is the same percentage.
    found.turns = [
        dataclasses.replace(turn, rates=Rates(8.0 / turn.seconds, 80.0 / turn.seconds))
        for turn in found.turns
    ]
    (row,) = compare.summarise(found, [workload], shape, "quire")["rows"]
    beside = row["percent_of_floor_beside"]
    share = 100 * floor_of(workload, shape, Rates(8.0, 80.0)).total_s
    assert beside["min"] == beside["max"] == pytest.approx(share, rel=1e-3)
    assert f"{beside['median']:.0f}%" in compare.table(
        compare.summarise(found, [workload], shape, "quire"), "quire"
    )


def test_a_turn_is_read_once(tmp_path):
    path = tmp_path / "kept"
    turns(("quire", "w", 0, 1.0)).write(path)
    assert len(compare.read([path]).turns) == 1
    with pytest.raises(ValueError, match="occurs twice"):
        compare.read([path, path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama", "engine: must be one of quire, transformers"),
        ("quire={", "engine quire: not JSON"),
        ('quire={"modle": "x"}', "engine quire: unknown modle"),
        ('quire={"threads": 0}', "threads: must be >= 1, got 0"),
    ],
)
def test_a_wrong_engine_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        EngineSpec.parse(text, model="m", dtype="float32", threads=1)


def test_an_engine_of_its_own_environment():
    text = 'ov={"engine": "openvino", "python": "/opt/ov/bin/python", "env": {"A": "1", "B": "/x"}}'
    spec = EngineSpec.parse(text, model="/some/folder/m", dtype="bfloat16", threads=2)
    assert (spec.name, spec.engine, spec.python) == ("ov", "openvino", "/opt/ov/bin/python")
    # The file has no paths of this machine.
    assert spec.to_json()["model"] == "m" and spec.to_json()["env"] == {"A": "1"}
    assert not any("/" in str(value) for value in spec.to_json().values())
    assert Path(spec.model).name == "m"

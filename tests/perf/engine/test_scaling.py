"""The scaling benchmark fills the cache with real blocks and detects growth."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quire.cluster.bench.engines.checkpoints import SHAPES, VOCAB_SIZE
from quire.cluster.bench.engines.compare import Comparison, Turn
from quire.cluster.bench.engines.floor import Rates
from quire.replica.core.step_plan import StepResult
from tests.perf.cpu import cpu_workloads
from tests.perf.engine import scaling


def test_a_cache_is_filled_and_a_known_prompt_is_found_in_it():
    host = scaling.CacheHost(300)
    host.fill(300)
    load = host.scheduler.load()
    assert load.blocks_cached >= 300 and load.num_running == scaling.ROWS
    before = load.queued_prefill_tokens
    host._add_known()
    plan = host.scheduler.plan(0.0)
    # All but the last block: the last token must be computed.
    assert before == 0 and plan.num_tokens == scaling.ROWS + scaling.BLOCK_SIZE
    host.scheduler.commit(plan, StepResult(np.full(scaling.ROWS + 1, 5), 0.01), 0.0)
    assert len(host.decode_ms(3)) == len(host.admit_ms(3)) == 3
    host.scheduler.check()


def test_growth_and_residuals():
    line = [{"x": x, "median": 5.0 + 2.0 * x} for x in (8, 64, 128, 256)]
    assert scaling.growth(line) == pytest.approx(517 / 21)
    assert scaling.residual(line) == pytest.approx(0, abs=1e-9)
    line[2]["median"] *= 1.5
    assert scaling.residual(line) > 0.15


def keep_turns(folder, w1_seconds: dict[str, float]) -> Comparison:
    """Files for `cpu_workloads`: a turn of W1 for each engine, and the model's configuration."""
    found = Comparison({name: {"engine": "x", "model": "m"} for name in w1_seconds})
    found.rates = [Rates(33.0, 410.0)]
    for engine, seconds in w1_seconds.items():
        found.turns.append(Turn(engine, "W1", 0, seconds, seconds, 0.0, 100.0))
    (folder / "config.json").write_text(json.dumps(SHAPES["halfb"] | {"vocab_size": VOCAB_SIZE}))
    found.write(folder / "turns")
    return found


def test_bars_are_of_what_was_run(tmp_path):
    found = keep_turns(tmp_path, {"quire": 20.0, "transformers": 70.0, "openvino": 18.0})
    found.turns.append(Turn("quire", "W5", 0, 8.0, 8.0, 0.0, 100.0))
    found.write(tmp_path / "turns")
    pytest.importorskip("matplotlib")
    out = tmp_path / "result.json"
    cpu_workloads.main([str(tmp_path / "turns"), "--checkpoint", str(tmp_path), "--out", str(out)])
    bars = {bar["name"]: bar for bar in json.loads(out.read_text())["bars"]}
    assert bars["cpu/W1_over_transformers"]["value"] == 3.5
    assert bars["cpu/W1_over_transformers"]["holds"] is True  # at least 3
    assert bars["cpu/W1_over_best_peer"]["value"] == 0.9
    assert bars["cpu/W1_over_best_peer"]["details"]["peer"] == "openvino"
    assert bars["cpu/W1_over_best_peer"]["holds"] is False
    # The reference machine's floor of W1 is 13.8 s.
    assert bars["cpu/W1_percent_of_floor"]["value"] == pytest.approx(69, abs=1)
    assert not any("W3" in name for name in bars) and "cpu/W5_percent_of_floor" in bars
    assert out.with_suffix(".png").exists()


def test_the_reference_floor_is_that_of_the_run_that_set_the_goals(tmp_path, monkeypatch):
    """cpu/W*: 13.8, 10.5, 40.5 and 5.8 s, and 29.3 ms for each token of one stream after its first."""
    found = keep_turns(tmp_path, {"quire": 13.8})
    for workload, seconds in {"W2": 2 * 10.5, "W3": 40.5, "W4": 5.8}.items():
        found.turns.append(Turn("quire", workload, 0, seconds, seconds, 0.0, 100.0))
    found.turns.append(Turn("quire", "W5", 0, 0.5 + 127 * 0.0293, 4.2, 0.0, 1.0, first_token_s=0.5))
    found.rates = [
        Rates(66.0, 410.0)
    ]  # twice the reference's memory bandwidth, so the run's floor differs
    found.write(tmp_path / "turns")
    pytest.importorskip("matplotlib")
    out = tmp_path / "result.json"
    command = [str(tmp_path / "turns"), "--checkpoint", str(tmp_path), "--out", str(out)]
    facts = {"cpu": cpu_workloads.REFERENCE_CPU, "cores": 2}
    monkeypatch.setattr(cpu_workloads.report, "hardware", lambda: facts)
    cpu_workloads.main(command)
    bars = {bar["name"]: bar["value"] for bar in json.loads(out.read_text())["bars"]}
    reference = {name: value for name, value in bars.items() if "reference" in name}
    assert reference == {
        f"cpu/{workload}_percent_of_reference_floor": pytest.approx(share, abs=0.5)
        for workload, share in {"W1": 100, "W2": 50, "W3": 100, "W4": 100, "W5": 100}.items()
    }
    assert bars["cpu/W5_percent_of_floor"] < 60
    # The reference floor does not apply to another processor.
    monkeypatch.setattr(cpu_workloads.report, "hardware", lambda: facts | {"cpu": "another"})
    cpu_workloads.main(command)
    names = [bar["name"] for bar in json.loads(out.read_text())["bars"]]
    assert names == [name for name in bars if name not in reference]


def test_bars_of_quire_as_it_was_installed_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_workloads, "REFERENCE_CPU", "another")
    keep_turns(tmp_path, {"quire": 10.0, "quire-torch": 30.0, "openvino": 18.0})
    pytest.importorskip("matplotlib")
    out = tmp_path / "result.json"
    command = [str(tmp_path / "turns"), "--checkpoint", str(tmp_path), "--out", str(out)]
    cpu_workloads.main(command)
    bars = {bar["name"]: bar["value"] for bar in json.loads(out.read_text())["bars"]}
    assert bars["cpu/W1_over_best_peer"] == bars["cpu/W1_over_openvino"] == 1.8
    cpu_workloads.main([*command, "--baseline", "quire-torch", "--prefix", "cpu/other"])
    bars = {bar["name"]: bar["value"] for bar in json.loads(out.read_text())["bars"]}
    assert bars.pop("cpu/other/W1_percent_of_floor") == pytest.approx(46, abs=1)
    assert bars == {"cpu/other/W1_over_openvino": 0.6, "cpu/other/W1_over_best_peer": 0.6}

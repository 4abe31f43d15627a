"""The comparison with agents: the same turns for all systems, exact numbers, and a whole run in virtual time."""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np
import pytest

from quire.cluster.bench.load.load_generator import Record, Run
from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.replica.checkpoint.model_spec import ModelSpec
from quire.replica.config import EngineArgs
from quire.replica.core.step_plan import CopiesDone
from quire.replica.startup.sizing import resolve
from tests.perf.agents import agents, over_oracle
from tests.perf.agents.simulated_cluster import run_in_virtual_time
from tests.perf.cluster.paced_replica import PacedCopies
from tests.perf.cluster.test_data_plane import plan

OPTIONS = argparse.Namespace(agents=48, warm_up_s=12.0, duration_s=16.0, seed=1)


def test_a_small_run_in_virtual_time_finds_what_routing_is_worth(monkeypatch, capsys):
    shape = dataclasses.replace(agents.SHAPE, token_scale=1 / 128)
    monkeypatch.setattr(agents, "SHAPE", shape)
    rows = {
        system: run_in_virtual_time(agents.simulate(system, OPTIONS))
        for system in ("quire", "round_robin")
    }
    ours, theirs = rows["quire"], rows["round_robin"]
    assert ours["turns"] > 40 and theirs["turns"] > 20
    assert ours["prompt_per_output_token"] == pytest.approx(131, rel=0.2)
    # Whole blocks of 8 tokens are a larger part of these short prompts than of the real ones.
    assert ours["hit_percent"] > 85 > theirs["hit_percent"]
    assert ours["hit_percent"] == pytest.approx(
        ours["device_hit_percent"] + ours["host_hit_percent"], abs=0.02
    )
    assert ours["host_hit_percent"] > 10
    assert ours["moved_percent"] < 10 < 60 < theirs["moved_percent"]
    assert ours["ttft_ms"]["p50"] < theirs["ttft_ms"]["p50"]
    assert ours["sent_late_p99_ms"] == 0
    assert 3 < ours["working_set_over_devices"] < 6
    hit, ttft = agents.bars_of([ours, theirs], "virtual_")
    assert hit.name == "kv/agents/virtual_token_hit_percent" and not hit.at_most
    assert (ttft.value, ttft.goal) == (ours["ttft_p99_over_p50"], 2.0)
    assert ttft.details == {"round_robin": theirs["ttft_p99_over_p50"]}
    assert len(capsys.readouterr().out.splitlines()) == 2


def record(session: str, due_s: float, replica: str, cached: int = 0, host: int = 0) -> Record:
    return Record(
        *(due_s, due_s, (due_s + 0.1 * (1 + due_s),), (2,), 100, cached),
        session=session,
        replica=replica,
        host_cached_tokens=host,
    )


def test_a_row_counts_the_turns_after_the_warm_up():
    run = Run(
        [
            record("a", 3.0, "r2", cached=80, host=40),
            record("a", 1.0, "r1", cached=20),
            record("b", 2.0, "r1"),
            record("b", 0.5, "r2"),
        ]
    )
    records = agents.counted(run, 1.0)
    assert [r.due_s for r in records] == [1.0, 2.0, 3.0]
    row = agents.row_of("x", records, 2.0)
    assert (row["turns"], row["turns_per_s"], row["prompt_per_output_token"]) == (3, 1.5, 50.0)
    assert (row["hit_percent"], row["host_hit_percent"]) == (33.33, 13.33)
    assert row["moved_percent"] == 100
    assert row["ttft_p99_over_p50"] == pytest.approx(4 / 3, abs=1e-3)
    run.records.append(dataclasses.replace(run.records[0], error="status 500"))
    with pytest.raises(RuntimeError, match="1 requests failed: status 500"):
        agents.counted(run, 1.0)


def test_copies_follow_one_another_and_steps_wait_for_those_they_need():
    copies = PacedCopies(8, 1.0)
    writes = {"slots": np.array([[8 * 3]]), "copies": ()}  # block 3
    saves = plan([0])._replace(saves=np.array([[5, 0], [3, 1]]), **writes, uses_restores=False)
    # The save of the block that the step writes comes first.
    assert copies.launch(saves, 10.0) == 11.0
    restores = plan([0])._replace(
        step=2, restores=np.array([[7, 8], [6, 9]]), **writes, uses_restores=False
    )
    assert copies.launch(restores, 10.5) == 10.5
    assert copies.take_done(13.9) == CopiesDone((), 1, are_all=False)
    later = plan([0])._replace(step=3, **writes, uses_restores=True)
    assert copies.launch(later, 11.0) == 14.0
    overwrites = later._replace(step=4, slots=np.array([[8 * 5]]), uses_restores=False)
    assert copies.launch(overwrites, 11.0) == 12.0
    assert copies.take_done(14.0) == CopiesDone(((2, 2.0),), 4)


def test_virtual_time_has_the_sizes_of_the_real_replicas():
    (application,) = agents.serve_config(["quire"])["applications"]
    share = application["args"]["session"]["max_share"]
    args = EngineArgs(**application["args"]["engine"], device="cpu", session_max_share=share)
    checkpoint = resolve_checkpoint("embedded", None)
    real = resolve(args, ModelSpec.from_checkpoint(checkpoint), checkpoint)
    virtual = agents.engine_config()
    assert real.resume_margin == pytest.approx(virtual.resume_margin)
    same = ("block_size", "num_blocks", "num_host_blocks", "max_batch_tokens", "max_model_len")
    same += ("safety_margin", "max_prefill_ms", "plans_ahead", "session_max_share", "scheduler")
    for name in (*same, "restore", "max_running_requests", "demotion_order"):
        assert getattr(real, name) == getattr(virtual, name), name


FEW = argparse.Namespace(agents=48, warm_up_s=8.0, duration_s=5.0)


def test_an_oracle_with_one_cache_bounds_the_policy_and_pulls_bring_blocks(monkeypatch):
    shape = dataclasses.replace(agents.SHAPE, token_scale=1 / 128)
    monkeypatch.setattr(agents, "SHAPE", shape)
    monkeypatch.setattr(over_oracle, "SHAPE", shape)
    systems = ("least_requests", "least_tokens", "slo", "slo+pulls")
    rows = [run_in_virtual_time(over_oracle.simulate(system, 1, FEW)) for system in systems]
    oracle, _, ours, theirs = rows
    assert oracle["turns"] > 10 and oracle["moved_percent"] > 40 > ours["moved_percent"]
    assert oracle["hit_percent"] >= ours["hit_percent"] - 1
    assert oracle["restored_ms"] == 0 < ours["restored_ms"]
    assert ours["pulled_blocks"] == 0 < theirs["pulled_blocks"]
    for row in rows:
        parts = ("computed_ms", "restored_ms", "step_ms", "waiting_ms")
        assert sum(row[part] for part in parts) == pytest.approx(row["ttft_ms"], abs=0.1)
    ratio = over_oracle.ratios(rows, "slo", (1,))
    assert 0.9 < ratio["ttft"] < 1.5 and 0.9 < ratio["e2e"] < 1.3
    table = {name: {"slo+pulls": ratio, "slo": ratio} for name in ("development", "hold-out")}
    ttft, e2e = over_oracle.bars_of(table)
    assert ttft.name == "kv/agents/virtual_ttft_over_oracle" and ttft.value == ratio["ttft"]
    assert e2e.details["slo, development"] == ratio["e2e"]
    # Nothing depends on the time that this machine takes.
    assert run_in_virtual_time(over_oracle.simulate("slo+pulls", 1, FEW)) == theirs

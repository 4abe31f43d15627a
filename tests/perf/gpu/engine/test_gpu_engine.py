"""The engine's GPU benchmark without a GPU: every part runs end to end, and its formulas are correct."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

from quire.cluster.bench.results import report
from quire.kernels.tuning import BLOCK_SIZE
from quire.replica.proof.verdicts import TESTED_FOR_GPU
from tests.perf.gpu import gpu_smoke, gpu_tiny_models
from tests.perf.gpu.engine import (
    gpu_engine,
    gpu_engine_deterministic,
    gpu_engine_offload,
    gpu_engine_start,
    gpu_engine_throughput,
    gpu_engine_tokens,
    gpu_models,
)
from tests.perf.gpu.engine.gpu_crowd import Crowd, Crowds, Reading, Turns, between, random_prompts
from tests.perf.gpu.engine.gpu_engine_steps import DECODE_OPTIONS, Steps, Window
from tests.perf.gpu.engine.gpu_profile import Kernel
from tests.perf.gpu.engine.gpu_profile import describe as describe_profile
from tests.perf.gpu.gpu_session import NO_TIME, Session

# Every bar with its goal.
BARS = {
    "gpu/engine/different_tokens": "<= 0",
    "gpu/engine/beyond_tie_margin": "<= 0",
    "gpu/engine/start_to_first_token_s": "<= 25",
    "gpu/engine/compiles_after_ready": "<= 0",
    "gpu/engine/decode_percent_of_floor": ">= 85",
    "gpu/engine/decode_gap_us": "<= 50",
    "gpu/engine/host_percent_of_step": "<= 100",
    "gpu/engine/prefill_percent_of_gemm": ">= 65",
    "gpu/engine/offload_wrong_blocks": "<= 0",
    "gpu/engine/offload_percent_of_link": ">= 80",
    "gpu/engine/offload_drop_percent": "<= 5",
    "gpu/engine/deterministic_cost_percent": "<= 15",
    **{f"gpu/engine/throughput_of_goal/{name}": ">= 1" for name in gpu_models.NAMES},
    **{f"gpu/engine/ratio_to_varlen/{name}": ">= 4" for name in gpu_models.NAMES},
}
PARTS = {
    "machine",
    "tokens",
    "checkpoints",
    "start",
    "compiles",
    "decode",
    "prefill",
    "offload",
    "deterministic",
}
THROUGHPUT = {gpu_engine_throughput.part_name(name) for name in gpu_models.NAMES}
# Libraries that the GPU machine need not have. llguidance compiles grammars, which no part uses.
FOREIGN = ("ray", "grpc", "fastapi", "pydantic", "llguidance", "orjson", "accelerate", "psutil")


def session() -> Session:
    made = Session(torch.device("cpu"), True, time.monotonic() + 3000)
    made.copy_bytes_per_s, made.gemm_flops_per_s = 1e10, 1e11
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def rehearse(folder: Path, *options: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.perf", "gpu-engine"]
    if code:
        command = [sys.executable, "-c", code]
    command += ["--rehearse", "--checkpoints", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


# -- the command ---------------------------------------------------------------------------------------------

WITHOUT_OTHERS = f"""
import sys

for name in {FOREIGN}:
    sys.modules[name] = None  # not there, for whoever imports it and for whoever only looks
from tests.perf.gpu.engine.gpu_engine import main
sys.exit(main(sys.argv[1:]))
"""


def test_parts_are_rehearsed_one_by_one_with_torch_and_transformers_alone(tmp_path, folder):
    out = tmp_path / "gpu.json"
    # test_gpu_plan.py rehearses `compiles` and `decode`
    parts = ["tokens", "checkpoints", "prefill", "offload", "deterministic"]
    done = rehearse(folder, "--out", str(out), "--parts", *parts, code=WITHOUT_OTHERS)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert {bar["name"]: bar["goal"] for bar in result["bars"]} == BARS
    assert {(bar["value"], bar["holds"]) for bar in result["bars"]} == {(None, None)}
    found = result["parts"]
    assert found.keys() == {"machine", *parts} and min(p["points"] for p in found.values()) > 0
    assert not any(part["rows"] for part in found.values())
    assert "percent_of_gemm" in done.stdout and " 0 skipped" in done.stdout


def test_a_start_is_rehearsed(folder):
    rows = [
        gpu_engine_start.measure_start(folder, session(), point)
        for point in gpu_engine_start.start_points(True)[:1]
    ]
    phases = ("interpreter", "modules", "imports", "checkpoint", "load", "warm_up", "first_prompt")
    for row in rows:
        assert min(row[f"{name}_s"] for name in phases) > 0
        # The scheduler and the threads, between the phases, take little time.
        assert sum(row[f"{name}_s"] for name in phases) == pytest.approx(row["seconds"], rel=0.15)


def test_files_that_stay_in_memory_are_not_measured_as_dropped(folder, monkeypatch):
    model = gpu_models.checkpoint(folder, gpu_models.SMALL, session())
    for file in model.path.iterdir():
        file.read_bytes()
    assert gpu_engine_start.cached_fraction(model.path) == 1.0
    gpu_engine_start.drop_from_page_cache(model.path)
    assert gpu_engine_start.cached_fraction(model.path) < 1.0 or on_tmpfs(folder)
    monkeypatch.setattr(gpu_engine_start, "drop_from_page_cache", lambda path: None)
    monkeypatch.setattr(gpu_engine_start, "start", lambda *_: 1 / 0)
    for file in model.path.iterdir():
        file.read_bytes()
    part = gpu_engine_start.parts(folder)[1]
    (row,) = part.run(
        session(), [point for point in part.points(True) if point["files"] == "dropped"]
    )
    assert row["skipped"] == "files: 100% of them stay in memory, as on a tmpfs"


def on_tmpfs(folder: Path) -> bool:
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True)
    return kind.stdout.strip() == "tmpfs"


def test_a_workload_of_each_kind_is_rehearsed_against_transformers(folder):
    part = gpu_engine_throughput.parts(folder)[0]
    points = [p for p in part.points(True) if p["workload"] in ("3x32+16->4", "online, half")]
    batch, online = part.run(session(), points)
    for row in (batch, online):
        assert row["seconds"] > 0 and row["peer_seconds"] > 0
        assert (row["peer_attention"], row["peer_fast_percent"]) == ("sdpa", 0)
        assert row["ttft_p50_ms"] <= row["ttft_p99_ms"]
    # There is no fast path on the CPU, so only this bar covers the row.
    assert batch["varlen_ratio"] == batch["ratio"] and "of_goal" not in batch
    assert "ratio" not in online and online["latency_ratio"] > 0


def test_the_command_has_all_parts_and_each_ends_within_four_minutes(folder):
    parts = gpu_engine.all_parts(folder)
    assert {part.name for part in parts} == PARTS | THROUGHPUT
    assert max(part.budget_s for part in parts) <= 240


def test_the_committed_result_has_every_bar_and_part():
    result = json.loads((report.RESULTS / "gpu_engine.json").read_text())
    assert {bar["name"]: bar["goal"] for bar in result["bars"]} == BARS
    if result["rehearsal"]:
        assert {bar["holds"] for bar in result["bars"]} == {None}
        assert result["parts"].keys() == PARTS | THROUGHPUT


# -- deterministic -------------------------------------------------------------------------------------------


def test_the_cost_of_equal_bits_is_that_of_the_workload_that_loses_most():
    seconds = {("a", False): 8.0, ("a", True): 10.0, ("b", False): 9.9, ("b", True): 10.0}
    rows = [
        {"model": "m", "workload": name, "deterministic": on, "seconds": value}
        for (name, on), value in seconds.items()
    ]
    (bar,) = gpu_engine_deterministic.bars(rows)
    assert (bar.value, bar.details["at"]["workload"], bar.holds) == (20.0, "a", False)
    (bar,) = gpu_engine_deterministic.bars(rows[2:])
    assert (bar.value, bar.holds) == (1.0, True)
    late = {"model": "m", "workload": "c", "deterministic": True, "skipped": NO_TIME}
    (bar,) = gpu_engine_deterministic.bars([*rows[2:], late])
    assert bar.value is None and bar.details["so_far"] == 1.0


# -- models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"), [("Llama-3.1-8B", 8.03), ("Qwen3-8B", 8.19), ("Qwen3-0.6B", 0.596)]
)
def test_shapes_have_as_many_parameters_as_the_published_models(name, billions):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(gpu_models.config_of(name, False))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_checkpoint_in_shards_is_whole_and_an_interrupted_one_is_not_there(tmp_path, monkeypatch):
    config = gpu_models.config_of("Llama-3.1-8B", True)
    path, cpu = tmp_path / "model", torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(gpu_models, "save_file", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gpu_models.write_random(config, path, torch.float32, cpu, 100_000)
    assert not path.exists()
    gpu_models.write_random(config, path, torch.float32, cpu, 100_000)
    assert len(list(path.glob("*.safetensors"))) > 3
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    weight = model.model.layers[0].mlp.up_proj.weight
    assert float(weight.std()) == pytest.approx(config.initializer_range, rel=0.05)
    assert bool((model.model.norm.weight == 1).all())


def test_an_unknown_model_is_named(folder):
    with pytest.raises(ValueError, match=r"model: must be one of .*, got 'GPT-7'"):
        gpu_models.checkpoint(folder, "GPT-7", session())


# -- tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", gpu_engine_tokens.ARCHITECTURES)
def test_offloading_is_forced_and_the_tokens_are_equal_on_the_cpu(model):
    point = {"model": model, "dtype": "float32", "setting": "offload"}
    row = gpu_engine_tokens.measure_tokens(session(), point)
    assert (row["different"], row["requests"]) == (0, len(gpu_engine_tokens.PROMPTS))
    assert row["offloads"] > 0 and row["restores"] > 0


def test_a_cache_that_is_large_enough_is_no_proof_of_offloading(monkeypatch):
    monkeypatch.setitem(gpu_engine_tokens._TIGHT_BLOCKS, "llama", 400)
    point = {"model": "llama", "dtype": "float32", "setting": "offload"}
    with pytest.raises(RuntimeError, match="no request gave way"):
        gpu_engine_tokens.measure_tokens(session(), point)


def test_in_bfloat16_a_token_counts_when_it_is_not_among_those_that_tie():
    found = gpu_engine_tokens.reference("qwen3", "bfloat16", "cpu")
    row = gpu_engine_tokens._margins(found, found.answers)
    assert row["beyond_margin"] == 0 and row["tokens"] == 8 * gpu_engine_tokens.NEW_TOKENS
    wrong = [list(answer) for answer in found.answers]
    wrong[3][20] = (wrong[3][20] + 7) % 512
    changed = gpu_engine_tokens._margins(found, wrong)
    assert changed["beyond_margin"] >= 1 and changed["worst_gap"] > changed["margin"]


def test_every_architecture_has_a_row_before_any_has_a_second_setting():
    points = gpu_engine_tokens.tokens_points(False)
    first = [(point["model"], point["dtype"]) for point in points[: len(points) // 6]]
    assert len(set(first)) == len(first) == 2 * len(gpu_engine_tokens.ARCHITECTURES)
    assert len(points) == len({tuple(point.values()) for point in points})


def test_every_served_architecture_has_a_tiny_model():
    with torch.device("meta"):
        configs = map(gpu_tiny_models.config_of, gpu_tiny_models.NAMES)
        models = map(transformers.AutoModelForCausalLM.from_config, configs)
        assert {type(model).__name__ for model in models} == TESTED_FOR_GPU


# -- steps ---------------------------------------------------------------------------------------------------


def crowd_of(folder: Path, **options) -> Crowd:
    model = gpu_models.checkpoint(folder, gpu_models.SMALL, session())
    return Crowd(model, "cpu", **{"max_model_len": 128, **DECODE_OPTIONS, **options})


def test_a_crowd_gets_every_token_once_and_in_its_time(folder):
    crowd = crowd_of(folder)
    try:
        at_s = [0.0, 0.0, 0.3]
        turns = crowd.serve(random_prompts(3, 9, 512, 0), 5, at_s)
        arrivals = turns.arrivals_s(3)
        assert [len(each) for each in arrivals] == [5, 5, 5]
        assert all(each == sorted(each) for each in arrivals)
        assert all(each[0] > due for each, due in zip(arrivals, at_s, strict=True))
        with pytest.raises(TimeoutError, match="2 of 2 requests are open"):
            crowd.serve(random_prompts(2, 9, 512, 1), 100, timeout_s=1e-4)
    finally:
        crowd.close()


def test_a_window_covers_steps_of_all_rows_alone(folder):
    crowd = crowd_of(folder)
    try:
        window = Window(crowd, 2, 6)
        # The third request comes before the others end: 110 steps take more than 10 ms.
        crowd.serve(random_prompts(3, 9, 512, 0), 110, [0.0, 0.0, 0.01], on_full=window.on_full)
        first, last = window.readings
        assert between(first, last)["steps"] == 6
    finally:
        crowd.close()


def test_means_are_of_what_came_between_two_readings():
    def reading(steps: int, gaps: int, ms: float, gap_us: float) -> Reading:
        host = {"num_steps": steps, "plan_ms": ms, "launch_ms": ms, "commit_ms": ms, "send_ms": ms}
        device = {"num_steps": steps, "busy_ms": ms, "num_gaps": gaps, "gap_us": gap_us}
        graphs = {"num_hits": steps, "num_misses": 1}
        return Reading(0.0, {"host": host, "device": device, "graphs": graphs})

    row = between(reading(10, 8, 1.0, 100.0), reading(30, 28, 2.0, 40.0))
    assert row["plan_ms"] == 2.5 and row["host_ms"] == 10.0  # (30 * 2 - 10 * 1) / 20
    assert row["gap_us"] == 16.0  # (28 * 40 - 8 * 100) / 20
    assert (row["steps"], row["num_hits"], row["num_misses"]) == (20, 20, 0)


def test_turns_tell_each_requests_times():
    turns = Turns(10.0, [11.0, 12.0, 13.0], [[0, 1], [1], [0]])
    assert turns.arrivals_s(2) == [[1.0, 3.0], [1.0, 2.0]]


# -- smoke and profile ---------------------------------------------------------------------------------------


def test_smoke_names_what_is_wrong():
    well = {"same_twice": True, "compiles": 0, "graphs_off": None, "hits": 9}
    assert gpu_smoke.findings(well, {}, "cuda") == []
    (found,) = gpu_smoke.findings(well | {"graphs_off": "captures fail", "hits": 0}, {}, "cuda")
    assert found == "no graphs: captures fail"
    (found,) = gpu_smoke.findings(well | {"hits": 0}, {}, "cuda")
    assert found == "no step was replayed as a graph"
    assert gpu_smoke.findings(well | {"hits": 0}, {"cuda_graphs": "off"}, "cuda") == []
    assert gpu_smoke.findings(well | {"hits": 0}, {}, "cpu") == []
    wrong = gpu_smoke.findings(well | {"compiles": 3, "same_twice": False}, {}, "cpu")
    assert len(wrong) == 2 and "3 kernels or graphs" in wrong[1]


def test_a_profile_is_by_group_and_what_is_left_of_the_step_is_gaps():
    kernels = [
        Kernel("nvjet_tst_128x64_64x6_2x1_v_bz_coopA_TNN", 3000.0, 129.0),
        Kernel("_decode_kernel", 800.0, 32.0),
        Kernel("_merge_kernel", 100.0, 32.0),
        Kernel("void at::native::vectorized_elementwise_kernel<4, ...>", 90.0, 64.0),
        Kernel("Memcpy DtoH (Device -> Pinned)", 10.0, 1.0),
    ]
    row = describe_profile(4.5, kernels)
    assert (row["ms"], row["kernels_ms"], row["gaps_ms"], row["kernels"]) == (4.5, 4.0, 0.5, 258.0)
    assert row["percent"] == {
        "products": 75.0,
        "decode_attention": 20.0,
        "merge": 2.5,
        "elementwise": 2.25,
        "copies": 0.25,
    }
    assert row["largest"][1] == {"name": "_decode_kernel", "us": 800.0, "count": 32.0}


# -- a device that queues its work ---------------------------------------------------------------------------


@pytest.fixture
def queued_device(monkeypatch):
    """Run engines on the fake device, which runs queued work in any order that its events allow."""
    monkeypatch.syspath_prepend(str(report.ROOT / "tests" / "replica"))
    made = []

    def open_device(name, use_nvtx):
        made.append(importlib.import_module("fake_device").FakeDevice(len(made)))
        return made[-1]

    monkeypatch.setattr("quire.replica.runner.runner.open_device", open_device)
    return made


@pytest.mark.parametrize("setting", ["default", "no graphs", "offload"])
def test_tokens_on_a_device_that_queues_its_work(queued_device, setting):
    point = {"model": "llama", "dtype": "float32", "setting": setting}
    row = gpu_engine_tokens.measure_tokens(session(), point)
    assert row["different"] == 0
    assert (row["replays"] > 0) == (setting != "no graphs")
    assert queued_device[0].num_replays >= row["replays"]


def test_decode_steps_are_replayed_and_their_gaps_are_told(queued_device, folder):
    steps = Steps(folder, Crowds())
    try:
        row = steps.decode(session(), {"model": gpu_models.SMALL, "rows": 2, "context": 32})
        assert row["steps"] == row["num_hits"] == 6 and row["num_misses"] == 0
        assert row["gap_us"] >= 0 and row["host_percent"] > 0
    finally:
        steps.crowds.close()


def test_a_victims_blocks_move_beside_rows_that_decode(queued_device, folder):
    offload = gpu_engine_offload.Offload(folder, Crowds())
    model = gpu_models.SMALL
    try:
        row = offload.measure(
            session(),
            {"what": "beside", "model": model, "victim_tokens": 2 * BLOCK_SIZE, "every": 2},
        )
    finally:
        offload.crowds.close()
    # Two windows of six steps, with three copies of two blocks in each direction.
    assert row["moved_blocks"] == 2 * 2 * 3 * 2 and row["moved_gb_per_s"] > 0
    assert queued_device[0].num_copies >= row["moved_blocks"]


# -- offloading ----------------------------------------------------------------------------------------------


def test_blocks_that_come_back_changed_are_counted(folder, monkeypatch):
    model = gpu_models.checkpoint(folder, gpu_models.SMALL, session())
    assert gpu_engine_offload.round_trip(session(), model, 6)["wrong_blocks"] == 0
    real = gpu_engine_offload.HostPool.move

    def one_bit_off(self, saves, restores):
        if len(restores):
            self.data.view(torch.int16)[restores[2, 0], 5] ^= 1
        real(self, saves, restores)

    monkeypatch.setattr(gpu_engine_offload.HostPool, "move", one_bit_off)
    assert gpu_engine_offload.round_trip(session(), model, 6)["wrong_blocks"] == 1

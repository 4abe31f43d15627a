"""The engine's GPU benchmark without a GPU: parts run end to end, and the tokens that it compares are right."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch

from quire.bench import gpu_engine_parts, report
from quire.bench.gpu_session import Session

BARS = {
    "gpu/engine/different_tokens": "<= 0",
    "gpu/engine/decode_percent_of_floor": ">= 85",
    "gpu/engine/decode_gap_us": "<= 50",
    "gpu/engine/prefill_percent_of_gemm": ">= 65",
    "gpu/engine/start_to_first_token_s": "<= 25",
}


def test_parts_are_rehearsed_one_by_one(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "quire.bench", "gpu-engine", "--rehearse", "--out", str(out)]
    command += ["--checkpoints", str(tmp_path), "--parts", "decode", "prefill"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert {bar["name"]: bar["goal"] for bar in result["bars"]} == BARS
    assert {(bar["value"], bar["holds"]) for bar in result["bars"]} == {(None, None)}
    points = {name: part["points"] for name, part in result["parts"].items()}
    assert points.keys() == {"machine", "decode", "prefill"} and min(points.values()) > 0


def test_the_committed_result_has_every_bar():
    result = json.loads((report.RESULTS / "gpu_engine.json").read_text())
    assert {bar["name"]: bar["goal"] for bar in result["bars"]} == BARS
    if result["rehearsal"]:
        assert {bar["holds"] for bar in result["bars"]} == {None}


@pytest.mark.parametrize(("model", "setting"), [("gemma3", "default"), ("llama", "offload")])
def test_the_tokens_that_are_compared_are_equal_on_the_cpu(model, setting):
    session = Session(torch.device("cpu"), True, time.monotonic() + 300)
    row = gpu_engine_parts.measure_tokens(session, {"model": model, "setting": setting})
    assert (row["different"], row["requests"]) == (0, len(gpu_engine_parts.PROMPTS))


def test_the_floor_reads_the_parameters_of_the_shape():
    parameters, kv_elements = gpu_engine_parts._shape("halfb")
    assert parameters == pytest.approx(473e6, rel=0.01)
    assert kv_elements == 2 * 28 * 8 * 128

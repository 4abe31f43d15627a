"""`quire bench serve` on a real cluster: every kind of load, over HTTP and gRPC."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system


def bench_serve(out, *arguments):
    command = [sys.executable, "-m", "quire.cluster.cli", "bench", "serve", *map(str, arguments)]
    done = subprocess.run(
        [*command, "--out", str(out), "--no-plots"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "serve.json").read_text())["rows"]


def test_open_and_closed_loops_over_grpc(cluster, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"at_s": 0.1 * i, "prompt_tokens": 20 + i, "output_tokens": 3}) + "\n"
            for i in range(4)
        )
    )
    rows = bench_serve(
        tmp_path,
        *(f"grpc://127.0.0.1:{cluster.grpc_port}", "--trace", trace, "--rate", 8),
        *("--duration-s", 1.5, "--concurrency", 4, "--requests-per-user", 2),
        *("--prompt-tokens", "10-40", "--output-tokens", 6, "--vocab-size", 400),
    )
    replayed, open_loop, closed_loop = rows
    assert replayed["num_requests"] == 4 and replayed["output_tokens"] == 12
    assert open_loop["output_tokens"] == 6 * open_loop["num_requests"] > 0
    assert closed_loop["num_requests"] == 8 and closed_loop["max_in_flight"] <= 4
    for row in rows:
        assert row["num_failed"] == 0
        assert 0 < row["ttft_ms"]["p50"] <= row["latency_ms"]["p50"]
        assert row["sent_late_ms"]["p50"] >= 0


def test_sessions_and_shared_prefixes_over_http(cluster, tmp_path):
    rows = bench_serve(
        tmp_path,
        *(cluster.url, "--sessions", 3, "--turns", 3, "--think-s", 0.1),
        *("--session-rate", 20, "--prefixes", 1, "--prefix-tokens", 64, "--prompt-tokens", 40),
        *("--output-tokens", 8, "--vocab-size", 400, "--watch", f"127.0.0.1:{cluster.grpc_port}"),
    )
    (row,) = rows
    settings = json.loads((tmp_path / "serve.json").read_text())["settings"]
    assert settings["model"] == "embedded"  # found by itself
    assert row["num_requests"] == 9 and row["output_tokens"] == 72
    # Turns of 104, 152 and 200 prompt tokens: what was said before is found again, in blocks of 32.
    assert row["prompt_tokens"] == 3 * (104 + 152 + 200)
    assert row["cached_tokens"] >= 3 * (96 + 128) * 0.5

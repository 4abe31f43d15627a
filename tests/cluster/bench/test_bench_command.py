"""`quire bench` from its command line."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys

import pytest
from live_app import serving
from live_grpc import serving as grpc_serving

from quire.cluster.app import APIS
from quire.cluster.bench import commands, serve_command
from quire.cluster.bench.engines.floor import ModelShape, Rates
from quire.cluster.bench.load import workloads
from quire.cluster.bench.load.load_generator import Record, Run


def bench(*arguments):
    command = [sys.executable, "-m", "quire.cluster.cli", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def parse(*arguments):
    parser = argparse.ArgumentParser()
    commands.add_bench(parser.add_subparsers(required=True))
    return parser.parse_args(["bench", *arguments])


def test_offline_prints_a_table_and_writes_json_and_plots(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    done = bench(
        *("offline", "embedded", "--dtype", "float32", "--threads", 1, "--repetitions", 2),
        *("--workloads", "4x20->8", "4x64+10->4", "--engine-options", '{"num_blocks": 64}'),
        *("--out", out),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "offline.json").read_text())
    first, shared = result["rows"]
    assert first["num_requests"] == 4 and first["output_tokens"] == 32
    assert first["seconds"]["turns"] == 2 and 0 < first["percent_of_floor"] < 100
    assert first["hit_percent"] == 0
    # One of four requests computes the two shared blocks.
    assert shared["cached_tokens"] == 3 * 64
    assert result["settings"]["num_blocks"] == 64 and result["commit"] and result["hardware"]["cpu"]
    assert str(tmp_path) not in json.dumps(result)
    for name in ("offline_latency.png", "offline_4x20__8_cache.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "of floor" in done.stdout and "GFLOP/s" in done.stdout


def test_startup_measures_new_processes_beside_another_one(tmp_path):
    out = tmp_path / "out"
    done = bench(
        *("startup", "embedded", "--dtype", "float32", "--threads", 1, "--repetitions", 1),
        *("--beside", "--engine-options", '{"kv_cache_gib": 0.01}', "--out", out),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "startup.json").read_text())
    first, memory = result["bars"]
    assert first["name"] == "start/first_token_beside_another_s"
    phases = first["details"]["phases_s"]
    assert sum(seconds for (seconds,) in phases.values()) == pytest.approx(first["value"], abs=0.2)
    assert all(f"{name:12}" in done.stdout for name in ("process", "imports", "load", "warm_up"))
    sizes = memory["details"]
    # float32, about 0.9 M parameters; every block was written, so the cache is resident.
    assert 3 <= sizes["weights_mb"] <= 5 and sizes["cache_mb"] >= 10
    assert sizes["blocks_without_content"] <= 1
    assert sizes["peak_rss_mb"] > sizes["weights_mb"] + sizes["cache_mb"]


def test_startup_of_an_engine_that_cannot_start_fails(tmp_path):
    done = bench(
        *("startup", "embedded", "--engine-options", '{"block_size": 7}', "--out", tmp_path)
    )
    assert done.returncode == 1
    assert "block_size" in done.stderr and "ended with status 1" in done.stderr


def test_a_wrong_option_is_named(tmp_path):
    done = bench("serve", "http://127.0.0.1:1", "--out", tmp_path)
    assert done.returncode == 1
    assert done.stderr == "load: give --rate, --concurrency, --trace, --sessions or --agents\n"
    done = bench("offline", "embedded", "--workloads", "W9", "--out", tmp_path)
    assert done.returncode == 1 and "workload: must be one of W1" in done.stderr


def test_a_server_that_refuses_is_a_failed_run(tmp_path):
    done = bench(
        *("serve", "http://127.0.0.1:1", "--model", "m", "--concurrency", 1),
        *("--requests-per-user", 2, "--no-plots", "--out", tmp_path),
    )
    assert done.returncode == 1
    (row,) = json.loads((tmp_path / "serve.json").read_text())["rows"]
    assert row["num_failed"] == 2 and "ConnectionRefused" in row["first_error"]


def test_without_a_model_and_without_a_server_the_model_is_asked_for(tmp_path):
    done = bench("serve", "http://127.0.0.1:1", "--concurrency", 1, "--out", tmp_path)
    assert done.returncode == 1 and "give --model" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_with_keys_gets_the_key_which_is_never_shown(
    scheme, service, keys, tmp_path, monkeypatch, capsys
):
    def run(url: str, *more: str) -> int:
        load = ("--concurrency", "1", "--requests-per-user", "1", "--prompt-tokens", "3")
        options = (
            "--output-tokens",
            "2",
            "--vocab-size",
            "50",
            "--no-plots",
            "--quiet",
            "--out",
            str(tmp_path),
        )
        arguments = parse("serve", url, *load, *options, *more)
        return serve_command.main(arguments)

    async def over_grpc() -> list[int]:
        async with grpc_serving(service, "direct", access=keys.access()) as clients:
            return await asyncio.to_thread(run_all, f"grpc://127.0.0.1:{clients.port}")

    def run_all(url: str) -> list[int]:
        monkeypatch.delenv("QUIRE_API_KEY", raising=False)
        monkeypatch.setenv("OPENAI_API_KEY", "wrong")
        statuses = [run(url, "--model", "acme/tiny"), run(url, "--api-key", secret)]
        monkeypatch.setenv("QUIRE_API_KEY", secret)
        return [*statuses, run(url)]

    # The vocabulary of the service is small.
    monkeypatch.setattr(workloads, "FIRST_TOKEN_ID", 5)
    secret = keys.secrets["admin"]
    if scheme == "grpc":
        assert asyncio.run(over_grpc()) == [1, 0, 0]
    else:
        access = keys.access()
        with serving(service, apis=APIS, get_access=lambda: access) as client:
            assert run_all(str(client.base_url)) == [1, 0, 0]
    shown = "".join(capsys.readouterr())
    assert "written to" in shown and secret not in shown
    assert secret not in (tmp_path / "serve.json").read_text()
    with pytest.raises(ValueError, match="api-key: must be printable ASCII") as caught:
        serve_command.headers_of(parse("serve", "x", "--api-key", "a\nsecret: b"))
    assert "secret" not in str(caught.value)


def test_all_loads_are_run_in_order(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at_s": 0, "prompt_tokens": 3, "output_tokens": 2}\n')
    options = parse(
        *(
            "serve",
            "grpc://127.0.0.1:1",
            "--trace",
            str(trace),
            "--sessions",
            "2",
            "--agents",
            "3",
            "--rate",
            "5",
        ),
        *("--token-scale", "0.03", "--time-scale", "0.1"),
        *("--concurrency", "1", "3", "--prompt-tokens", "4-9", "--output-tokens", "2"),
    )
    chosen = list(serve_command.loads(options))
    assert [load.name for load in chosen] == [
        "trace x1",
        "2 sessions",
        "3 agents",
        "5/s",
        "1 users",
        "3 users",
    ]
    assert [load.num_requests for load in chosen[-2:]] == [8, 24]
    assert options.prompt_tokens == (4, 9) and options.output_tokens == (2, 2)


def test_the_floor_of_a_run_counts_work_not_waiting():
    shape = ModelShape(28, 16, 8, 128, 440_401_920, 32_000 * 1024, 2)
    rates = Rates(33.0, 400.0)

    def run(cached):
        record = Record(0.0, 0.0, (5.0, 9.0), (1, 99), 1000, cached)
        return Run([record, Record(0.0, 0.0, error="status 500")], 9.0)

    # 99 steps of one request read the weights 99 times.
    least_s = 99 * shape.weight_bytes / 33e9
    assert serve_command.floor_s(run(999), shape, rates) == pytest.approx(least_s, rel=0.15)
    assert (
        serve_command.floor_s(run(0), shape, rates)
        > serve_command.floor_s(run(999), shape, rates) + 2.0
    )
    assert serve_command.floor_s(Run([], 1.0), shape, rates) == 0.0


def test_an_engine_in_this_process_is_a_client_like_any_other():
    from quire.cluster.bench.load.engine_client import EngineClient

    async def ask():
        client = EngineClient(model="embedded", num_blocks=32, max_model_len=128, num_threads=1)
        try:
            answers = await asyncio.gather(*(client.complete([400 + i] * 40, 6) for i in range(3)))
            again = await client.complete([400] * 40, 6)
        finally:
            await client.close()
        return answers, again, client.samples

    answers, again, samples = asyncio.run(ask())
    assert [answer.num_tokens for answer in answers] == [6, 6, 6]
    assert all(answer.arrivals_s == sorted(answer.arrivals_s) for answer in answers)
    assert (answers[0].cached_tokens, again.cached_tokens) == (0, 32)
    assert again.token_ids == answers[0].token_ids
    assert all(s.free + s.cached + s.in_use == s.total == 32 for s in samples)

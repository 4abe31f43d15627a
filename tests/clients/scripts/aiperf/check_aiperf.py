"""aiperf: streams of chats and completions, and the server's metrics.

It reads them at `/metrics` of the address that it measures.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path

from checks import Count, Target, run

REQUESTS = 16
OUTPUT_LEN = 16
# What a dashboard needs first; with or without the prefix that Ray gives its metrics.
METRICS = ("prompt_tokens", "output_tokens", "requests_running", "time_to_first_token_seconds")


@cache
def _artifacts(target: Target, endpoint: str) -> Path:
    """The folder with what one run has written."""
    folder = target.work / endpoint
    command = ["aiperf", "profile", "--model", target.model, "--url", target.url]
    command += ["--endpoint-type", endpoint, "--streaming", "--tokenizer", target.tokenizer]
    command += ["--concurrency", "4", "--request-count", str(REQUESTS)]
    command += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", str(OUTPUT_LEN)]
    command += ["--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", str(folder)]
    # With it aiperf refuses a folder as its tokenizer.
    environment = {name: text for name, text in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-400:])
    return folder


def _count(target: Target, endpoint: str) -> Count:
    """Requests with the right number of tokens."""
    lines = _artifacts(target, endpoint).joinpath("profile_export.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    num = sum(m["usage_completion_tokens"]["value"] == OUTPUT_LEN for m in metrics)
    return Count(num, REQUESTS, "requests")


def chat_stream(target: Target) -> Count:
    return _count(target, "chat")


def completions_stream(target: Target) -> Count:
    return _count(target, "completions")


def server_metrics(target: Target) -> Count:
    """The families that aiperf has found, of those that it ought to find."""
    path = _artifacts(target, "chat") / "server_metrics_export.json"
    assert path.exists(), "aiperf has found no server metrics at /metrics"
    names = json.loads(path.read_text())["metrics"].keys()
    found = [metric for metric in METRICS if any(metric in name for name in names)]
    return Count(len(found), len(METRICS), "metrics", {"found": found, "families": len(names)})


run([chat_stream, completions_stream, server_metrics])

"""guidellm: concurrent streams, and how many iterations it counts."""

from __future__ import annotations

import json
import subprocess

from checks import Count, Target, run

REQUESTS = 8
OUTPUT_LEN = 16
# Of a stream: one chunk a token, then the finish reason, the usage and `[DONE]`.
ITERATIONS = OUTPUT_LEN + 3


def _requests(target: Target, endpoint: str) -> list[dict]:
    """The successful requests of a run."""
    path = target.work / f"{endpoint.replace('/', '_')}.json"
    backend = f"kind=openai_http,target={target.url},model={target.model},request_format={endpoint}"
    command = ["guidellm", "run", "--backend", backend, "--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={target.tokenizer}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_LEN}"]
    command += ["--output", f"kind=json,path={path}", "--disable-console"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return json.loads(path.read_text())["benchmarks"][0]["requests"]["successful"]


def _count(target: Target, endpoint: str) -> Count:
    """Requests with the right tokens and iterations."""
    requests = _requests(target, endpoint)
    timings = [request["info"]["timings"] for request in requests]
    found = [
        (request["output_tokens"], timing["token_iterations"], timing["request_iterations"])
        for request, timing in zip(requests, timings, strict=True)
    ]
    is_right = [
        tokens == iterations == OUTPUT_LEN and events <= ITERATIONS
        for tokens, iterations, events in found
    ]
    return Count(
        sum(is_right), REQUESTS, "requests", {"tokens_iterations_events": sorted(set(found))}
    )


def chat_iterations(target: Target) -> Count:
    return _count(target, "/v1/chat/completions")


def completions_iterations(target: Target) -> Count:
    return _count(target, "/v1/completions")


run([chat_iterations, completions_iterations])

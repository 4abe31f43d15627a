"""Options of `quire bench offline`, `serve`, `compare` and `startup`; `*_command.py` run them.

Each command imports its libraries when it runs, so that `quire --help` stays fast.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def add_bench(commands: argparse._SubParsersAction) -> None:
    """Add `bench` to the commands of `quire`."""
    parser = commands.add_parser("bench", help="measure an engine or a running server")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add_offline(actions)
    _add_serve(actions)
    _add_compare(actions)
    _add_startup(actions)


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out", type=Path, default=Path("bench-results"), help="folder (default: %(default)s)"
    )
    group.add_argument("--no-plots", action="store_true", help="no PNG files, no matplotlib")
    group.add_argument("--quiet", action="store_true", help="no progress bars")


def _add_slo(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("SLO, for goodput")
    group.add_argument("--slo-ttft-ms", type=float, default=1000.0, help="default: %(default)s")
    group.add_argument(
        "--slo-tpot-ms", type=float, default=100.0, help="per token after the first; %(default)s"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a checkpoint folder, a Hugging Face id, `embedded`, or one of the shapes with random weights: "
        "tiny, small, halfb",
    )
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores"
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path(tempfile.gettempdir()) / "quire-checkpoints",
        help="where random weights are kept (default: %(default)s)",
    )


def _add_workloads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["W1", "W2", "W3", "W4", "W5"],
        metavar="W",
        help="W1 to W5, or REQUESTSx[SHARED+]PROMPT->OUTPUT in tokens, such as '32x768+32->16'",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine-options",
        type=_json_object,
        default={},
        help="fields of quire.replica.config.EngineArgs as JSON: '{\"max_prefill_ms\": null}'",
    )


def _add_offline(actions: argparse._SubParsersAction) -> None:
    parser = actions.add_parser(
        "offline", help="batches through an engine in this process, against the machine's floor"
    )
    _add_model(parser)
    _add_workloads(parser)
    parser.add_argument("--repetitions", type=int, default=3, help="default: %(default)s")
    _add_engine_options(parser)
    _add_slo(parser)
    _add_output(parser)
    parser.set_defaults(run=_run("offline_command"))


def _add_compare(actions: argparse._SubParsersAction) -> None:
    parser = actions.add_parser(
        "compare", help="run engines alternately; report ratios with their spread"
    )
    _add_model(parser)
    _add_workloads(parser)
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["quire", "transformers"],
        metavar="NAME[=JSON]",
        help="quire, transformers, generate, vllm, openvino, http; the JSON may set engine, model, dtype, threads, "
        "options, env, and python: the interpreter of the engine's own environment. The first engine is the "
        "baseline of the ratios. Default: quire transformers",
    )
    parser.add_argument("--repetitions", type=int, default=3, help="turns; default: %(default)s")
    parser.add_argument(
        "--first-repetition",
        type=int,
        default=0,
        help="number of the first turn; another number means other prompts",
    )
    parser.add_argument(
        "--skip", nargs="*", default=[], metavar="NAME:W", help="workloads that an engine skips"
    )
    parser.add_argument("--log", type=Path, help="file for the engines' output")
    _add_output(parser)
    parser.set_defaults(run=_run("compare_command"))


def _add_startup(actions: argparse._SubParsersAction) -> None:
    parser = actions.add_parser(
        "startup", help="new engine processes: phases of the start, the first token, memory"
    )
    _add_model(parser)
    parser.add_argument("--repetitions", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--beside", action="store_true", help="while another process has the same engine"
    )
    _add_engine_options(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("bench-results"), help="folder (default: %(default)s)"
    )
    parser.set_defaults(run=_run("startup_command"))


def _add_serve(actions: argparse._SubParsersAction) -> None:
    parser = actions.add_parser("serve", help="send load to a running server")
    parser.add_argument("url", help="http://HOST:PORT (OpenAI's API) or grpc://HOST:PORT (Quire)")
    parser.add_argument(
        "--model", default="", help="model name in requests; default: the server's only model"
    )
    parser.add_argument(
        "--api-key",
        help="key of a server with keys; default: the variable QUIRE_API_KEY, then OPENAI_API_KEY",
    )
    parser.add_argument(
        "--extra", type=_json_object, default={}, help="more fields of HTTP bodies, as JSON"
    )
    parser.add_argument(
        "--watch",
        metavar="HOST:PORT",
        help="address of Quire's gRPC, to plot the cache over time; default with grpc://: the same address",
    )
    load = parser.add_argument_group("load; several are run one after the other")
    load.add_argument(
        "--rate", type=float, nargs="+", default=[], help="requests per second, open loop, Poisson"
    )
    load.add_argument(
        "--duration-s",
        type=float,
        default=30.0,
        help="for each rate, and of the agents; %(default)s",
    )
    load.add_argument("--concurrency", type=int, nargs="+", default=[], help="users, closed loop")
    load.add_argument(
        "--requests-per-user", type=float, default=8.0, help="closed loop; %(default)s"
    )
    load.add_argument("--trace", type=Path, help="JSON lines: at_s, prompt_tokens, output_tokens")
    load.add_argument("--speed", type=float, default=1.0, help="of the trace; 2 is twice as fast")
    load.add_argument("--limit", type=int, help="read at most this many requests of the trace")
    load.add_argument("--sessions", type=int, default=0, help="conversations of several turns")
    load.add_argument("--turns", type=int, default=4, help="turns of a session; %(default)s")
    load.add_argument("--session-rate", type=float, default=1.0, help="starts per second")
    load.add_argument("--think-s", type=float, default=1.0, help="mean pause before a turn")
    load.add_argument(
        "--agents", type=int, default=0, help="sessions with growing contexts and pauses for tools"
    )
    load.add_argument(
        "--token-scale", type=float, default=1.0, help="of the agents' token counts; %(default)s"
    )
    load.add_argument(
        "--time-scale", type=float, default=1.0, help="of the agents' pauses; %(default)s"
    )
    shape = parser.add_argument_group("prompts")
    shape.add_argument("--prompt-tokens", type=_bounds, default=(128, 128), metavar="N or LOW-HIGH")
    shape.add_argument("--output-tokens", type=_bounds, default=(64, 64), metavar="N or LOW-HIGH")
    shape.add_argument("--prefixes", type=int, default=0, help="shared prefixes, Zipf; 0: none")
    shape.add_argument(
        "--prefix-tokens", type=int, default=512, help="tokens of each prefix; %(default)s"
    )
    shape.add_argument("--vocab-size", type=int, default=1024, help="upper bound of token ids")
    shape.add_argument("--seed", type=int, default=0)
    floor = parser.add_argument_group("floor, when the server runs on this machine")
    floor.add_argument("--checkpoint", type=Path, help="folder of the served model")
    floor.add_argument("--dtype", default="bfloat16", help="of the served model; %(default)s")
    _add_slo(parser)
    _add_output(parser)
    parser.set_defaults(run=_run("serve_command"))


def _run(module: str) -> Any:
    def run(options: argparse.Namespace) -> int:
        import importlib

        try:
            return importlib.import_module(f"quire.cluster.bench.{module}").main(options)
        except (ValueError, OSError) as error:
            print(error, file=sys.stderr)
            return 1

    return run


def _bounds(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    return int(low), int(high if dash else low)


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value

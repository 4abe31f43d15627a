"""`make clients`: real clients, each in an environment of its own, against a real cluster with two applications.

One serves SmolLM2. Its chat template has no tools, so the other one serves the built-in model for tools and agents.

    python tests/clients [--model FOLDER] [--only NAME ...] [--home FOLDER] [--out FILE]

Every environment is made first, then both are served once and the scripts run one after the other. Each check of a
script is a bar `clients/CLIENT/CHECK`. The exit status is 1 where one does not hold.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # for `tests.perf`

import environments
import tools_model
import yaml
from checks import TOOLS, Outcome, Target
from earlier_results import with_others
from environments import Client

from quire.cluster.bench.results.report import RESULTS, ROOT, Bar, write
from tests.perf.cluster.live_cluster import live_cluster
from tests.perf.engine import packaged_checkpoints

APPLICATION = MODEL_NAME = "smollm2"
COMMAND = "make clients"
SCRIPT_TIMEOUT_S = 900


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/clients", description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; default: SmolLM2 is made")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="CLIENT",
        help="writes results with --out only, where the other clients' results stay",
    )
    parser.add_argument("--home", type=Path, default=ROOT / ".cache" / "clients", help="is kept")
    parser.add_argument("--out", type=Path, help="default: tests/perf/results/clients.json")
    options = parser.parse_args()
    clients = _chosen(parser, options.only)
    home = options.home.resolve()
    model = (options.model or packaged_checkpoints.make("smollm2", home / "smollm2")).resolve()
    folders = {}
    for client in clients:
        print(f"installing {client.name}", flush=True)
        folders[client] = environments.install(client, home)
    bars = []
    tools = tools_model.make(home / "tools_model")
    with live_cluster(_config(model, tools)) as cluster:
        url, grpc = f"http://127.0.0.1:{cluster.http_port}", f"127.0.0.1:{cluster.grpc_port}"
        for client, folder in folders.items():
            with tempfile.TemporaryDirectory() as work:
                places = (str(model), str(tools), Path(work))
                target = Target(url, grpc, APPLICATION, MODEL_NAME, *places)
                bars += [bar(client, outcome) for outcome in outcomes(client, folder, target)]
    _report(bars, clients, options)
    return int(not all(bar.holds for bar in bars))


def _chosen(parser: argparse.ArgumentParser, names: list[str] | None) -> list[Client]:
    known = {client.name: client for client in Client.all()}
    unknown = set(names or ()) - known.keys()
    if unknown:
        parser.error(
            f"--only: no client {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    return [known[name] for name in names or known]


def _config(model: Path, tools: Path) -> dict[str, Any]:
    """cluster.yaml with another model, and a second application for tools.

    In float32 an answer is the same bits in every batch, so checks may compare.
    """
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    (first,) = config["applications"]
    second = copy.deepcopy(first) | {"name": TOOLS, "route_prefix": f"/{TOOLS}"}
    first["name"] = APPLICATION
    second["args"].update(replicas=1, routers=1)
    config["applications"] = [first, second]
    for application, name, folder in ((first, MODEL_NAME, model), (second, TOOLS, tools)):
        arguments = {"model": str(folder), "served_model_name": name, "dtype": "float32"}
        application["args"].update(arguments, device="cpu")
    return config


def outcomes(client: Client, folder: Path, target: Target) -> Iterator[Outcome]:
    """Run a client's script; its last outcome says whether it came to its end."""
    print(f"running {client.name}", flush=True)
    started_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            environments.command(client, folder),
            env=environments.variables(folder, target.environment()),
            cwd=target.work,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=SCRIPT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        found = [outcome for line in output.splitlines() if (outcome := Outcome.parse(line))]
        yield from found
        error = ""
        if process.returncode or not found:
            errors.seek(0)
            error = f"exit status {process.returncode}: {errors.read()[-400:]}"
        elapsed = {"seconds": round(time.monotonic() - started_s, 1)}
        yield Outcome("finishes", int(not error), 1, "ok", error, details=elapsed)


def bar(client: Client, outcome: Outcome) -> Bar:
    """An outcome as it is written down."""
    details = dict(outcome.details)
    if outcome.error:
        details["error"] = outcome.error
    name = f"clients/{client.name}/{outcome.check}"
    return Bar(name, outcome.num, outcome.unit, outcome.of, at_most=False, details=details)


def _report(bars: list[Bar], clients: list[Client], options: argparse.Namespace) -> None:
    versions = {client.name: client.version for client in clients}
    if options.only and not options.out:
        for found in bars:
            print(found.to_json())
        return
    out = options.out or RESULTS / "clients.json"
    if options.only and out.exists():
        bars, versions = with_others(json.loads(out.read_text()), bars, versions)
    write(out, COMMAND, bars, versions=versions)


if __name__ == "__main__":
    sys.exit(main())

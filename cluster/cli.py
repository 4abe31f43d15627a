"""The `quire` command.

One function per sub-command adds its parser and names the function that runs it. Only the commands that need Ray import
it; none imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cluster.auth.key_file import KeyFileError
from quire.cluster.bench.commands import add_bench
from quire.cluster.config import serve_options
from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.config_problems import ConfigError, Problem
from quire.cluster.config.default_config import to_yaml
from quire.cluster.drain_command import add_drain_node
from quire.cluster.keys_command import add_keys
from quire.cluster.model_command import add_model
from quire.router.explain.decision_log import DecisionLogError
from quire.router.policy.by_name import POLICY_NAMES

if TYPE_CHECKING:
    from quire.cluster.config.serve_config import ServeConfig


def main(argv: list[str] | None = None) -> int:
    """Run `quire`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="quire", description="Serve large language models on a Ray cluster."
    )
    parser.add_argument("--version", action="version", version=f"quire {version('quire')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_config(commands)
    _add_router(commands)
    _add_serve(commands)
    add_keys(commands)
    add_model(commands)
    add_bench(commands)
    add_drain_node(commands)
    _add_top(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ConfigError, DecisionLogError, KeyFileError) as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # `quire config schema | head`
        # Python flushes stdout once more at exit. Redirect it to the null device, so that this does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _add_top(commands: argparse._SubParsersAction) -> None:
    # Its libraries for terminals take a fifth of a second to load, which other commands need not wait for.
    from quire.cluster.top.top_command import add_top

    add_top(commands)


def _add_config(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("config", help="check a Serve config or describe its arguments")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="find every mistake in a Serve config")
    check.add_argument("file", type=Path, help="a Serve config such as cluster.yaml")
    check.set_defaults(run=_config_check)
    show = actions.add_parser(
        "show",
        help="print the Serve config that `quire serve MODEL` runs",
        description="Prints the Serve config that `quire serve MODEL` runs with the same options, to save and edit.",
    )
    _add_model(show)
    show.set_defaults(run=_config_show)
    schema = actions.add_parser("schema", help="print the JSON schema of an application's args")
    schema.set_defaults(run=_config_schema)


def _config_show(arguments: argparse.Namespace) -> int:
    if serve_options.is_file(arguments.model):
        problem = "is a Serve config already; give a model"
        raise ConfigError([Problem(arguments.model, problem)])
    print(to_yaml(serve_options.config_of(arguments)), end="")
    return 0


def _serve_config(arguments: argparse.Namespace) -> ServeConfig:
    """Load and check the config FILE of a command line, or build one from its MODEL and options."""
    from quire.cluster.config import serve_config

    if not serve_options.is_file(arguments.model):
        return serve_config.check(serve_options.config_of(arguments))
    if given := serve_options.given_options(arguments):
        problem = f"only allowed with a MODEL; {arguments.model} is a Serve config and has its own settings"
        raise ConfigError([Problem(", ".join(given), problem)])
    return serve_config.load(arguments.model)


def _config_check(arguments: argparse.Namespace) -> int:
    from quire.cluster.config import serve_config

    for app in serve_config.load(arguments.file).applications:
        where = app.route_prefix or "no HTTP route"
        if app.config is None:
            print(f"{app.name}: {where}: {app.import_path} (arguments not checked)")
            continue
        config = app.config
        _check_folder(app.name, config)
        print(
            f"{app.name}: {where}: model {config.model_name} on {config.device}, "
            f"{config.replicas} replicas, {config.routers} routers"
        )
    return 0


def _check_folder(name: str, config: AppConfig) -> None:
    """Refuse an existing folder without a model. A folder that is missing here may exist on the cluster's nodes."""
    folder = Path(config.model)
    if not config.is_folder or (folder / "config.json").is_file():
        return
    if folder.exists():
        problem = f"{folder.absolute()} is no checkpoint folder: it has no config.json"
        raise ConfigError([Problem(f"{name}: model", problem)])
    print(f"{name}: model {config.model}: there is no folder {folder.absolute()} on this machine")


def _config_schema(arguments: argparse.Namespace) -> int:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **AppConfig.model_json_schema(),
    }
    print(json.dumps(schema, indent=2))
    return 0


def _add_router(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("router", help="analyze the decisions of routers")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    replay = actions.add_parser(
        "replay",
        help="replay a recorded log with another policy",
        description="Routes the requests of LOG again with another policy, each in its recorded state, and prints "
        "the differences. Routers write such logs if router.decision_log_folder is set.",
    )
    replay.add_argument(
        "log",
        type=Path,
        nargs="+",
        help="a log file, or a folder with the log files of all routers",
    )
    replay.add_argument("--policy", required=True, choices=POLICY_NAMES)
    replay.add_argument(
        "--weight",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a weight of the policy, for example eta=0.3; may be given several times",
    )
    replay.add_argument(
        "--seed", type=int, default=0, help="seed for random ties (default: %(default)s)"
    )
    replay.add_argument(
        "--changes",
        type=int,
        default=10,
        help="number of differences to print, largest first (default: %(default)s)",
    )
    replay.set_defaults(run=_router_replay)


def _router_replay(arguments: argparse.Namespace) -> int:
    from quire.router.explain import decision_log
    from quire.router.explain.decision_replay import replay, report
    from quire.router.policy.by_name import make_policy

    paths = []
    for path in arguments.log:
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise DecisionLogError(f"{path}: no *.jsonl file in this folder")
        paths += found
    try:
        weights = {
            name: float(value) for name, _, value in (w.partition("=") for w in arguments.weight)
        }
        policy = make_policy(arguments.policy, **weights)
        decisions = [decision for path in paths for decision in decision_log.read(path)]
    except OSError as error:
        raise DecisionLogError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, DecisionLogError):
            raise
        raise DecisionLogError(f"--weight: {error}") from None
    decisions.sort(key=lambda decision: decision.time_s)
    print(report(replay(decisions, policy, arguments.policy, arguments.seed), arguments.changes))
    return 0


def _add_serve(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model or a Serve config on this machine until Ctrl-C",
        description="Runs MODEL, or the Serve config FILE, with Ray's `serve run` on a new local Ray cluster, and "
        "reports when it is ready. `quire config show MODEL` prints the config that runs, to save and edit. To deploy "
        "to a running cluster, use Ray's `serve deploy FILE`. If Ray requires a token (it does once ~/.ray/auth_token "
        "exists), Ray's commands need RAY_AUTH_MODE=token in their environment.",
    )
    _add_model(parser, "default: cluster.yaml", nargs="?", default="cluster.yaml")
    parser.add_argument(
        "--log-file", type=Path, help="file for Ray's output (default: a new temporary file)"
    )
    parser.add_argument(
        "--ready-timeout-s",
        type=float,
        default=1800.0,
        help="give up if not ready after this many seconds, downloads included (default: "
        "%(default)s)",
    )
    parser.set_defaults(run=_serve)


def _add_model(parser: argparse.ArgumentParser, more: str = "", **positional: Any) -> None:
    kinds = "'embedded', a folder, a Hugging Face id, or a Serve config (*.yaml)"
    parser.add_argument(
        "model",
        metavar="MODEL|FILE",
        help=f"{kinds}; {more}" if more else kinds,
        **positional,
    )
    serve_options.add_options(parser)


def _serve(arguments: argparse.Namespace) -> int:
    from quire.cluster.local import local_serve, ports

    config = _serve_config(arguments)
    for app in config.applications:
        if app.config is not None and app.config.is_folder:
            serve_options.find_model(app.config.model)
            _check_folder(app.name, app.config)
    ports.check_ports(config)
    local_serve.check_room(config)
    with contextlib.ExitStack() as stack:
        path = Path(arguments.model)
        if not serve_options.is_file(arguments.model):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-serve-"))
            path = Path(folder) / "cluster.yaml"
            path.write_text(to_yaml(serve_options.config_of(arguments)))
        log_path = arguments.log_file
        if log_path is None:
            handle, name = tempfile.mkstemp(prefix="quire-serve-", suffix=".log")
            os.close(handle)
            log_path = Path(name)
        server = local_serve.LocalServe(config, local_serve.serve_command(path), log_path)
        return server.run(sys.stdout, arguments.ready_timeout_s)


if __name__ == "__main__":
    sys.exit(main())

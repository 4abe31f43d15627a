"""Options of `quire serve MODEL` and `quire config show MODEL`, and the Serve config that they describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from quire.cluster.config.app_config import EMBEDDED_MODEL, AppConfig, names_hub_model
from quire.cluster.config.config_problems import ConfigError, Problem
from quire.cluster.config.default_config import default_config
from quire.protos.unique_keys import parse_yaml

_YAML = (".yaml", ".yml", ".json")
# Option, path in the application's args, type, help.
_ARGS = (
    ("--replicas", "replicas", int, "number of replicas, one device each (default: 1)"),
    ("--routers", "routers", int, "number of routers, which serve HTTP and gRPC (default: 1)"),
    ("--device", "device", str, "auto, cpu or cuda (default: auto)"),
    ("--dtype", "dtype", str, "auto, float32, bfloat16 or float16 (default: auto)"),
    (
        "--max-model-len",
        "engine.max_model_len",
        int,
        "maximum tokens of prompt and output together",
    ),
    ("--kv-cache-gib", "engine.kv_cache_gib", float, "size of the KV cache in GiB"),
    ("--served-model-name", "served_model_name", str, "name of the model in requests"),
    ("--revision", "revision", str, "branch, tag or commit of a Hugging Face id"),
    ("--chat-template", "chat_template", str, "path of a Jinja file with the chat template"),
)
_PORTS: dict[str, Any] = {"host": "127.0.0.1", "port": 8000, "grpc_port": 9000}
# Defaults for trying a model on one machine, often with one device.
_ONE_MACHINE = {"replicas": 1, "routers": 1}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options. They have no defaults here, so that `given_options` can tell which were given."""
    group = parser.add_argument_group("with a MODEL")
    for flag, path, kind, text in _ARGS:
        metavar = "TEXT" if kind is str else "N" if kind is int else "GIB"
        group.add_argument(flag, type=kind, help=text, dest=path, metavar=metavar)
    group.add_argument("--host", help="address for clients (default: 127.0.0.1, this machine only)")
    group.add_argument("--port", type=int, help="HTTP (default: 8000)")
    group.add_argument("--grpc-port", type=int, help="gRPC (default: 9000)")
    group.add_argument(
        "--set",
        action="append",
        metavar="NAME=VALUE",
        help="any other argument, for example engine.scheduler=fifo; may be given several times "
        "(`quire config schema` describes them)",
    )


def is_file(model: str) -> bool:
    """Whether the argument names a Serve config instead of a model."""
    return model.endswith(_YAML) or Path(model).is_file()


def given_options(arguments: argparse.Namespace) -> list[str]:
    """The given options that need a MODEL."""
    flags = {path: flag for flag, path, _, _ in _ARGS}
    flags |= {"host": "--host", "port": "--port", "grpc_port": "--grpc-port", "set": "--set"}
    return [flag for name, flag in flags.items() if getattr(arguments, name) is not None]


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the Serve config for the MODEL and options of a command line.

    Raises
    ------
    ConfigError
        Lists every option that cannot be used.
    """
    args: dict[str, Any] = {"model": find_model(arguments.model), **_ONE_MACHINE}
    for _, path, _, _ in _ARGS:
        if (value := getattr(arguments, path)) is not None:
            _put(args, path, value)
    for item in arguments.set or ():
        name, separator, text = item.partition("=")
        if not (name and separator):
            raise ConfigError([Problem("--set", f"must be NAME=VALUE, got {item!r}")])
        _put(args, name, _value(item, text))
    if isinstance(args.get("chat_template"), str):
        args["chat_template"] = str(Path(args["chat_template"]).expanduser().absolute())
    AppConfig.from_args(args)
    given = {name: getattr(arguments, name) for name in _PORTS}
    ports: dict[str, Any] = {
        name: default if given[name] is None else given[name] for name, default in _PORTS.items()
    }
    return default_config(
        args, host=ports["host"], http_port=ports["port"], grpc_port=ports["grpc_port"]
    )


def find_model(word: str) -> str:
    """Resolve a model name to `embedded`, the absolute path of a folder, or a Hugging Face id.

    Raises
    ------
    ConfigError
        The name is none of these; the message names the folder that does not exist.
    """
    folder = Path(word).expanduser()
    is_path = word.startswith(("/", "./", "../", "~")) or word in (".", "..")
    if word == EMBEDDED_MODEL or (not is_path and not folder.is_dir() and names_hub_model(word)):
        return word
    absolute = folder.resolve()
    if absolute.is_dir():
        return str(absolute)
    others = "" if is_path else ", nor is it 'embedded' or a Hugging Face id such as Qwen/Qwen3-8B"
    raise ConfigError([Problem("model", f"there is no folder {absolute}{others}")])


def _put(args: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        args = args.setdefault(section, {})
        if not isinstance(args, dict):
            raise ConfigError([Problem(path, f"{section} is not a section of the arguments")])
    args[name] = value


def _value(item: str, text: str) -> Any:
    """Parse a value as YAML: 2, 0.5, true, null, [a, b] or a text."""
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            [Problem("--set", f"{item}: the value is not valid YAML: {error}")]
        ) from None

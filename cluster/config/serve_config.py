"""Load a Ray Serve config and check it strictly.

Ray ignores unknown keys in most of its schema, so a typo silently gives the default. This loader refuses duplicate and
unknown keys, validates the config with Ray's `ServeDeploySchema`, and checks the `args` of each Quire application with
`AppConfig`. It reports all problems at once.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.runtime_env import RuntimeEnv
from ray.serve.config import AutoscalingPolicy
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from quire.cluster.config import live_update
from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.config_problems import (
    ConfigError,
    Problem,
    did_you_mean,
    join_path,
    problems_from,
)
from quire.cluster.config.default_config import APP_IMPORT_PATH
from quire.protos import unique_keys

_ROUTE_PREFIX = re.compile(r"/|/[^{}]*[^{}/]")

# Fields that Ray types as a bare dict although only certain keys mean something.
_HIDDEN_MODELS: dict[tuple[type[BaseModel], str], type[BaseModel]] = {
    (ServeApplicationSchema, "autoscaling_policy"): AutoscalingPolicy,
}


@dataclass(frozen=True, slots=True)
class Application:
    """One application of a checked Serve config; `config` is None if it is not a Quire application."""

    name: str
    route_prefix: str | None
    import_path: str
    config: AppConfig | None


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A Serve config that has passed every check."""

    schema: ServeDeploySchema
    applications: tuple[Application, ...]


# --------------------------------------------------------------------------------------------------
# YAML
# --------------------------------------------------------------------------------------------------


def parse_yaml(text: str) -> Any:
    """Parse one YAML document: plain data only, no key twice.

    Raises
    ------
    ConfigError
        If `text` is not YAML, with the line.
    """
    try:
        return unique_keys.parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or error
        raise ConfigError([Problem(where, f"not valid YAML: {what}")]) from None


# --------------------------------------------------------------------------------------------------
# Unknown keys in Ray's part
# --------------------------------------------------------------------------------------------------


def unknown_keys(
    data: Any, model: type[BaseModel] = ServeDeploySchema, path: str = ""
) -> Iterator[Problem]:
    """Find the keys of `data` that `model`, or a model nested in it, does not have.

    Skips values of another shape than the model's; Ray's validation reports them.
    """
    if not isinstance(data, dict):
        return
    fields = {field.alias or name: name for name, field in model.model_fields.items()}
    for key, value in data.items():
        here = join_path(path, str(key))
        if key not in fields:
            yield Problem(here, f"unknown key{did_you_mean(key, fields)}")
            continue
        name = fields[key]
        if name == "runtime_env":
            yield from _runtime_env_problems(value, here)
            continue
        hidden = _HIDDEN_MODELS.get((model, name))
        annotation = hidden or model.model_fields[name].annotation
        yield from _unknown_in_value(value, annotation, here)


def _unknown_in_value(value: Any, annotation: Any, path: str) -> Iterator[Problem]:
    """Descend through Optional, Union and list to the models inside an annotation."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _unknown_in_value(value, argument, path)
    elif origin is typing.Annotated:
        yield from _unknown_in_value(value, arguments[0], path)
    elif origin is list and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_in_value(item, arguments[0], join_path(path, index))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from unknown_keys(value, annotation, path)


def _runtime_env_problems(value: Any, path: str) -> Iterator[Problem]:
    """Check a runtime_env; Ray only warns about an unknown key, and only when a replica starts."""
    if not isinstance(value, dict):
        return
    known = RuntimeEnv.known_fields - {"_ray_release", "_ray_commit", "_inject_current_ray"}
    for key in value:
        if key not in known:
            yield Problem(join_path(path, str(key)), f"unknown key{did_you_mean(key, known)}")
    env_vars = value.get("env_vars")
    if env_vars is None:
        return
    if not isinstance(env_vars, dict):
        yield Problem(join_path(path, "env_vars"), f"must be a mapping, got {env_vars!r}")
        return
    for key, item in env_vars.items():
        if not isinstance(item, str):
            here = join_path(join_path(path, "env_vars"), str(key))
            yield Problem(here, f"must be a string, got {item!r}; put it in quotes")


# --------------------------------------------------------------------------------------------------
# The whole file
# --------------------------------------------------------------------------------------------------


def check(data: Any) -> ServeConfig:
    """Check a Serve config given as plain data.

    Raises
    ------
    ConfigError
        Lists every problem once.
    """
    if not isinstance(data, dict):
        raise ConfigError([Problem("", f"a Serve config is a mapping, got {type(data).__name__}")])
    problems = list(unknown_keys(data))
    schema = None
    try:
        schema = ServeDeploySchema.model_validate(data)
    except ValidationError as error:
        problems += problems_from(error)
    except Exception as error:  # Ray's validators import the classes that some fields name
        problems.append(Problem("", f"Ray cannot use it: {type(error).__name__}: {error}"))
    problems += _port_problems(data)
    applications = []
    for application, found in _applications(data.get("applications")):
        applications.append(application)
        problems += found
    problems += _reflection_problems(data, applications)
    problems += _tls_problems(schema, applications)
    if not applications and not problems:
        problems.append(Problem("applications", "must name at least one application, got []"))
    if problems or schema is None:
        raise ConfigError(_first_of_each_path(problems))
    return ServeConfig(schema, tuple(applications))


def load(path: str | Path) -> ServeConfig:
    """Read and check a Serve config file.

    Raises
    ------
    ConfigError
        The file cannot be read, or lists every problem found in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error}")]) from None
    return check(parse_yaml(text))


def _applications(items: Any) -> Iterator[tuple[Application, list[Problem]]]:
    """Yield each application with the problems of its arguments."""
    for index, item in enumerate(items if isinstance(items, list) else []):
        if not isinstance(item, dict):
            continue
        import_path = item.get("import_path", "")
        config, problems = None, []
        if import_path == APP_IMPORT_PATH:
            try:
                config = AppConfig.from_args(item.get("args", {}), f"applications[{index}].args")
            except ConfigError as error:
                problems = list(error.problems)
        if config is not None and isinstance(item.get("deployments"), list):
            for i, deployment in enumerate(item["deployments"]):
                path = f"applications[{index}].deployments[{i}]"
                problems += live_update.problems(config, deployment, path)
        problems += _route_problems(item, f"applications[{index}].route_prefix")
        name, route_prefix = item.get("name", "default"), item.get("route_prefix", "/")
        yield Application(name, route_prefix, import_path, config), problems


def _route_problems(item: dict[str, Any], path: str) -> Iterator[Problem]:
    """Check a route prefix; Ray checks it only when the application is built."""
    prefix = item.get("route_prefix")
    if isinstance(prefix, str) and not _ROUTE_PREFIX.fullmatch(prefix):
        rule = "must start with '/', not end with '/' unless it is '/', and hold no '{' or '}'"
        yield Problem(path, f"{rule}, got {prefix!r}")


def _port_problems(data: dict[str, Any]) -> Iterator[Problem]:
    """Check the ports; Ray notices a bad one only when a proxy opens its socket."""
    ports = {"http_options.port": 8000, "grpc_options.port": 9000}
    for path in ports:
        section = data.get(path.partition(".")[0])
        port = section.get("port", ports[path]) if isinstance(section, dict) else ports[path]
        if isinstance(port, int) and not 1 <= port <= 65535:
            yield Problem(path, f"must be from 1 to 65535, got {port}")
        ports[path] = port
    if ports["http_options.port"] == ports["grpc_options.port"]:
        yield Problem(
            "grpc_options.port",
            f"must differ from http_options.port, got {ports['grpc_options.port']} for both",
        )


def _reflection_problems(
    data: dict[str, Any], applications: Iterable[Application]
) -> Iterator[Problem]:
    """Refuse Ray's gRPC reflection next to keys: Ray answers it itself, without asking for a key."""
    with_keys = [app.name for app in applications if app.config and app.config.auth]
    given = data.get("grpc_options")
    section = given if isinstance(given, dict) else {}
    serves_grpc = section.get("grpc_servicer_functions")
    if with_keys and serves_grpc and section.get("enable_reflection") is not False:
        yield Problem(
            "grpc_options.enable_reflection",
            f"must be false, because {with_keys[0]!r} has the section auth and reflection needs no key",
        )


def _tls_problems(
    schema: ServeDeploySchema | None, applications: Iterable[Application]
) -> Iterator[Problem]:
    """Refuse a TLS port that is another one's."""
    if schema is None:
        return
    taken = {
        schema.http_options.port: "http_options.port",
        schema.grpc_options.port: "grpc_options.port",
    }
    for index, app in enumerate(applications):
        if app.config is None or app.config.tls is None:
            continue
        for name in ("http_port", "grpc_port"):
            path, port = f"applications[{index}].args.tls.{name}", getattr(app.config.tls, name)
            if port in taken:
                yield Problem(path, f"must differ from {taken[port]}, got {port} for both")
            taken[port] = path


def _first_of_each_path(problems: Iterable[Problem]) -> list[Problem]:
    """Keep the first problem of each path: some mistakes are found by this module and, after it, by Ray."""
    by_path: dict[str, Problem] = {}
    for problem in problems:
        by_path.setdefault(problem.path, problem)
    return list(by_path.values())

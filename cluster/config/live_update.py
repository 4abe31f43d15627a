"""Options that can change while an application runs, without a restart.

If an application's `args` change, Serve gives all deployments a new version and restarts them one after the other.
Changes under `deployments` apply to the running deployments: `num_replicas`, and `user_config`, which Serve passes to
their `reconfigure`. A `user_config` may set light fields of one section of the arguments, which can change without a
restart (`ENGINE_FIELDS`, `ROUTER_FIELDS`); all other fields keep their values from `args`.

    deployments:
      - name: Replica           # light fields of `engine`
        num_replicas: 4
        user_config: {max_waiting_requests: 256}
      - name: Router            # light fields of `router`
        user_config: {max_move_s: 60.0}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.config_problems import (
    ConfigError,
    Problem,
    did_you_mean,
    join_path,
    problems_from,
)
from quire.cluster.config.engine_section import EngineArgs
from quire.cluster.config.router_section import RouterArgs
from quire.cluster.config.section import Section
from quire.replica.config import LIGHT_FIELDS as ENGINE_FIELDS

ROUTER_FIELDS = (
    "policy",
    "prefill_share",
    "max_prompt_tokens",
    "special_tokens_in_messages",
    "max_tokens_default",
    "max_stop_strings",
    "max_stop_bytes",
    "stream_idle_timeout_s",
    "max_migrations",
    "max_move_s",
    "stream_credit_tokens",
    "slow_client_timeout_s",
    "ready_timeout_s",
    "max_wait_s",
    "max_queued_requests",
    "max_queued_tokens",
    "dispatch_window_s",
    "max_replica_waiting_requests",
    "fairness_quantum_tokens",
    "max_watchers",
    "max_watchers_per_client",
    "max_explained_decisions",
    "decision_log_bytes",
)
AnySection = TypeVar("AnySection", bound=Section)


def engine_section(args: EngineArgs, user_config: Any, path: str = "user_config") -> EngineArgs:
    """Return `args` with the changes of `user_config`, a mapping of light fields of the section `engine`.

    `path` is the mapping's path in error messages. Raises ConfigError with every problem.
    """
    return _merge(args, ENGINE_FIELDS, user_config, path)


def router_section(args: RouterArgs, user_config: Any, path: str = "user_config") -> RouterArgs:
    """Return `args` with the changes of `user_config`, a mapping of light fields of the section `router`.

    `path` is the mapping's path in error messages. Raises ConfigError with every problem.
    """
    return _merge(args, ROUTER_FIELDS, user_config, path)


def problems(config: AppConfig, deployment: Any, path: str) -> list[Problem]:
    """Find the problems of one entry under `deployments` of a Quire application.

    Parameters
    ----------
    config
        The application's arguments.
    deployment
        The entry, as read from YAML.
    path
        Path of the entry in the file: `applications[0].deployments[1]`.
    """
    if not isinstance(deployment, dict):
        return []
    user_config = deployment.get("user_config")
    merge: dict[str, Callable[[str], object]] = {
        "Replica": lambda where: engine_section(config.engine, user_config, where),
        "Router": lambda where: router_section(config.router, user_config, where),
    }
    name = deployment.get("name")
    if name not in merge:
        return [Problem(join_path(path, "name"), f"must be Replica or Router, got {name!r}")]
    found = []
    if deployment.get("ray_actor_options") is not None:
        section = f"{name.lower()}_resources"
        where = join_path(path, "ray_actor_options")
        # Serve would replace all options that `build` gives, including the environment variables.
        found.append(Problem(where, f"give {section} under args instead"))
    if user_config is not None:
        try:
            merge[name](join_path(path, "user_config"))
        except ConfigError as error:
            found += error.problems
    return found


def _merge(args: AnySection, light: tuple[str, ...], user_config: Any, path: str) -> AnySection:
    """Return a section of the arguments with other values for some light fields.

    Raises
    ------
    ConfigError
        Lists every problem: fields that are not light, values out of bounds.
    """
    if not isinstance(user_config, Mapping):
        raise ConfigError([Problem(path, f"must be a mapping, got {user_config!r}")])
    found = []
    for key in user_config:
        if key in light:
            continue
        where = join_path(path, str(key))
        if key in type(args).model_fields:
            known = ", ".join(light)
            found.append(Problem(where, f"needs a restart: give it under args; in place: {known}"))
        else:
            found.append(Problem(where, f"unknown key{did_you_mean(key, light)}"))
    if found:
        raise ConfigError(found)
    try:
        return type(args).model_validate({**args.model_dump(), **user_config})
    except ValidationError as error:
        raise ConfigError(problems_from(error, type(args), path)) from None

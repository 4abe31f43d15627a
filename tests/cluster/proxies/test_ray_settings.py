"""The settings that Quire gives Ray Serve: which process gets which, and what the file can change."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from ray._common.utils import load_class
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

from quire.cluster.proxies import ray_proxies
from quire.cluster.proxies.ray_settings import (
    DEPLOYMENT_VARIABLES,
    FILE_VARIABLES,
    HAPROXY_VARIABLE,
    HOOK_VARIABLE,
    SERVE_DEFAULTS,
    deployment_variables,
    effective_variables,
)

# What Ray Serve has read, in a process of its own: the hook first, as Ray calls it.
READ = """
import json, os
from ray._common.utils import load_class
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
hook = os.environ.get(WORKER_PROCESS_SETUP_HOOK_ENV_VAR)
if hook:
    load_class(hook)()
from ray.serve._private import constants
plain = (bool, int, float, str, type(None))
print(json.dumps({k: v for k, v in vars(constants).items() if k.isupper() and isinstance(v, plain)}))
"""


def what_serve_reads(variables: dict[str, str]) -> dict[str, object]:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("RAY_SERVE_", "QUIRE_", "__RAY"))
    }
    result = subprocess.run(
        [sys.executable, "-c", READ], env=clean | variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_with_the_hook_serve_reads_the_same_as_with_every_variable_in_the_file():
    with_hook = what_serve_reads(dict(FILE_VARIABLES))
    assert with_hook["RAY_SERVE_ENABLE_HA_PROXY"] is True
    assert with_hook["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == 32 * 1024**2
    in_file = {**FILE_VARIABLES, **SERVE_DEFAULTS}
    assert with_hook == what_serve_reads(in_file)
    plain = what_serve_reads({})
    assert {name for name in plain if plain[name] != with_hook[name]} >= {
        "RAY_SERVE_ENABLE_HA_PROXY",
        "RAY_SERVE_HAPROXY_H2_BE_MAX_CONCURRENT_STREAMS",
        "PROXY_HEALTH_CHECK_PERIOD_S",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
    }
    # Otherwise ports that routers have left would be missing for an hour.
    assert with_hook["RAY_SERVE_PORT_QUARANTINE_S"] == plain["RAY_SERVE_PORT_QUARANTINE_S"]


def test_a_variable_of_the_file_wins():
    read = what_serve_reads({**FILE_VARIABLES, "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "32768"})
    assert read["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"] == 32768


def test_the_hook_is_a_function_that_ray_can_load():
    """Ray ends every process of Serve in which it cannot be loaded."""
    assert HOOK_VARIABLE == WORKER_PROCESS_SETUP_HOOK_ENV_VAR
    assert load_class(FILE_VARIABLES[HOOK_VARIABLE]) is ray_proxies.set_up


@pytest.mark.parametrize("haproxy", [False, True])
def test_deployments_get_what_the_file_does_not_give_and_the_controllers_proxy(haproxy: bool):
    whole = {**DEPLOYMENT_VARIABLES, HAPROXY_VARIABLE: "1" if haproxy else "0"}
    assert deployment_variables({}, haproxy) == whole
    given = {"MALLOC_ARENA_MAX": "4", **FILE_VARIABLES}
    assert deployment_variables(given, haproxy) == {
        name: value for name, value in whole.items() if name not in given
    }


def test_without_the_hook_only_the_file_counts():
    assert effective_variables({"A": "1"}) == {"A": "1"}
    assert effective_variables({**FILE_VARIABLES, "A": "1"}) == {
        **SERVE_DEFAULTS,
        **FILE_VARIABLES,
        "A": "1",
    }

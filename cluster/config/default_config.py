"""The built-in Serve config: `quire serve MODEL` runs it, and `quire config show` prints it.

`cluster.yaml` and `k8s/` hold the same settings with comments; tests compare them. `ray_settings.py` has Ray's
environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from quire.cluster.proxies.ray_settings import FILE_VARIABLES

APP_IMPORT_PATH = "quire.cluster.app:build"
SERVICERS = ("Generation", "Control", "Health")
_COMMENT = """\
# Made by `quire config show`. Run it with `quire serve FILE` or Ray's `serve run FILE`; `quire config schema` describes
# everything under args, and cluster.yaml in Quire's repository explains the rest.
"""


def default_config(
    args: Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    http_port: int = 8000,
    grpc_port: int = 9000,
) -> dict[str, Any]:
    """Build a Serve config of one application, as plain data.

    Parameters
    ----------
    args
        Arguments of the application: fields of `AppConfig` that differ from their defaults.
    host
        Address to listen on; 127.0.0.1 serves clients on this machine only.
    """
    module = "quire.cluster.grpc.grpc_servicers"
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": http_port},
        "grpc_options": {
            "port": grpc_port,
            "grpc_servicer_functions": [f"{module}.add_{s}Servicer_to_server" for s in SERVICERS],
            # Ray answers reflection without asking for a key.
            "enable_reflection": not args.get("auth"),
        },
        "controller_options": {"runtime_env": {"env_vars": dict(FILE_VARIABLES)}},
        "logging_config": {"log_level": "INFO", "enable_access_log": False},
        "applications": [
            {
                "name": "quire",
                "route_prefix": "/",
                "import_path": APP_IMPORT_PATH,
                "args": dict(args),
            }
        ],
    }


def to_yaml(config: Mapping[str, Any]) -> str:
    """The text of a config file."""
    return _COMMENT + yaml.safe_dump(dict(config), sort_keys=False, width=120)

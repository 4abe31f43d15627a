"""What Quire changes in the processes of Ray Serve's proxies, and in its own routers' ports.

`cluster.yaml` names `set_up` in an environment variable, and Ray calls it when a process of the Serve controller or of
a proxy starts, before that process reads its settings. Ray has no settings for these two:

- the text of HAProxy's configuration (`haproxy_template`);
- the address on which a gRPC server listens: every interface, although the HTTP server beside it listens where
  `http_options.host` says.
"""

from __future__ import annotations

import logging
import os
import resource
from typing import Any

from quire.cluster.haproxy_template import Limits, adapt

logger = logging.getLogger("ray.serve")

MAX_CONNECTIONS_VARIABLE = "RAY_SERVE_HAPROXY_MAXCONN"
REQUEST_TIMEOUT_VARIABLE = "QUIRE_HAPROXY_REQUEST_TIMEOUT_S"
# HAProxy does not start if it may not open so many files: two sockets for each connection, a pipe of two ends for every
# fourth one, and some of its own.
_FILES_PER_CONNECTION = 2.5
_OTHER_FILES = 500
_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "[::1]"}
_ALL_INTERFACES = "[::]"


def set_up() -> None:
    """Change this process; Ray ends a process in which this raises."""
    fit_connections()
    _adapt_haproxy()
    bind_grpc_like_http()


def fit_connections() -> None:
    """Lower the number of connections to what the limit of open files leaves."""
    wanted = int(os.environ.get(MAX_CONNECTIONS_VARIABLE, "4096"))
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    fitting = max(1, int((most_files - _OTHER_FILES) / _FILES_PER_CONNECTION))
    if most_files == resource.RLIM_INFINITY or wanted <= fitting:
        return
    logger.warning(
        "HAProxy takes %d connections and not %d: it may open %d files (ulimit -Hn)",
        fitting,
        wanted,
        most_files,
    )
    os.environ[MAX_CONNECTIONS_VARIABLE] = str(fitting)


def _adapt_haproxy() -> None:
    from ray.serve._private import haproxy_templates

    seconds = os.environ.get(REQUEST_TIMEOUT_VARIABLE, "")
    limits = Limits(int(seconds)) if seconds else Limits()
    template, missed = adapt(haproxy_templates.HAPROXY_CONFIG_TEMPLATE, limits)
    haproxy_templates.HAPROXY_CONFIG_TEMPLATE = template
    for purpose in missed:
        logger.warning("this version of Ray renders HAProxy's configuration without %s", purpose)


class GrpcAddress:
    """Makes a gRPC server of Serve listen on the loopback if its HTTP server does.

    Serve starts the HTTP server of a process first, and passes its options through `configure`.
    """

    def __init__(self, configure: Any, add_address: Any):
        self._configure = configure
        self._add_address = add_address
        self._host: str | None = None

    def configure(self, http_options: Any) -> Any:
        """In place of Serve's `configure_http_middlewares`."""
        self._host = _LOOPBACK.get(http_options.host)
        return self._configure(http_options)

    def add_address(self, server: Any, address: str) -> None:
        """In place of Serve's `add_grpc_address`."""
        if self._host is not None and address.startswith(_ALL_INTERFACES):
            address = self._host + address.removeprefix(_ALL_INTERFACES)
        self._add_address(server, address)


def bind_grpc_like_http() -> None:
    """For the gRPC servers that Serve starts in this process from now on: of a proxy or of a router.

    Replicas' ports between themselves stay as they are: another node's router calls them.
    """
    from ray.serve._private import default_impl, proxy, replica

    address = GrpcAddress(proxy.configure_http_middlewares, default_impl.add_grpc_address)
    proxy.configure_http_middlewares = address.configure
    replica.configure_http_middlewares = address.configure
    default_impl.add_grpc_address = address.add_address

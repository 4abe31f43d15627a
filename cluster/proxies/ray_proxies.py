"""What Quire changes in the processes of Ray Serve: HAProxy's configuration and where gRPC listens.

`cluster.yaml` names `set_up` in an environment variable, and Ray calls it when a process of the Serve controller, of a
proxy, a router or a replica starts, before that process reads its settings. It sets those that the file does not give
(`ray_settings`), and changes what Ray has no settings for:

- a part of HAProxy's configuration (`haproxy_template`);
- the address on which a gRPC server listens: every interface, although the HTTP server beside it listens where
  `http_options.host` says, and although a node with the loopback's address has no other nodes.
"""

from __future__ import annotations

import logging
import os
import resource
import weakref
from collections.abc import Callable
from typing import Any

from quire.cluster.proxies.haproxy_template import Limits, adapt
from quire.cluster.proxies.ray_settings import (
    HAPROXY_VARIABLE,
    MAX_CONNECTIONS_VARIABLE,
    REQUEST_TIMEOUT_VARIABLE,
    set_serve_defaults,
)
from quire.replica.serving.final_errors import MARK, reason_of

logger = logging.getLogger("ray.serve")

# HAProxy does not start if it may not open so many files: two sockets for each connection, a pipe of two ends for every
# fourth one, and some of its own.
_FILES_PER_CONNECTION = 2.5
_OTHER_FILES = 500
LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "[::1]"}
_ALL_INTERFACES = "[::]"


def set_up() -> None:
    """Change this process; Ray ends a process in which this raises."""
    set_serve_defaults(os.environ)
    fit_connections()
    _adapt_haproxy()
    bind_grpc()
    end_final_failures()


def fit_connections() -> None:
    """Lower the number of connections to what the limit of open files leaves."""
    if MAX_CONNECTIONS_VARIABLE not in os.environ:
        return
    wanted = int(os.environ[MAX_CONNECTIONS_VARIABLE])
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    fitting = max(1, int((most_files - _OTHER_FILES) / _FILES_PER_CONNECTION))
    if most_files == resource.RLIM_INFINITY or wanted <= fitting:
        return
    logger.debug(
        "HAProxy takes %d connections and not %d: it may open %d files (ulimit -Hn)",
        fitting,
        wanted,
        most_files,
    )
    os.environ[MAX_CONNECTIONS_VARIABLE] = str(fitting)


def runs_haproxy() -> bool:
    """Whether the controller runs HAProxy, by the environment that the processes it starts inherit."""
    return os.environ.get(HAPROXY_VARIABLE) == "1"


def _adapt_haproxy() -> None:
    from ray.serve._private import haproxy_templates

    seconds = os.environ.get(REQUEST_TIMEOUT_VARIABLE, "")
    limits = Limits(int(seconds)) if seconds else Limits()
    template, missed = adapt(haproxy_templates.HAPROXY_CONFIG_TEMPLATE, limits)
    haproxy_templates.HAPROXY_CONFIG_TEMPLATE = template
    for purpose in missed:
        logger.warning("this version of Ray renders HAProxy's configuration without %s", purpose)


class GrpcAddress:
    """Makes a gRPC server of Serve listen on the loopback if the HTTP server of its process does.

    Serve starts the HTTP server first, and asks `is_ipv6` for the family of its address.
    """

    def __init__(self, is_ipv6: Callable[[str], bool], add_address: Callable[[Any, str], Any]):
        self._is_ipv6 = is_ipv6
        self._add_address = add_address
        self._host: str | None = None

    def is_ipv6(self, http_host: str) -> bool:
        """In place of the `is_ipv6` of Serve's `http_util`."""
        self._host = LOOPBACK.get(http_host)
        return self._is_ipv6(http_host)

    def add_address(self, server: Any, address: str) -> None:
        """In place of Serve's `add_grpc_address`."""
        if self._host is not None:
            address = address.replace(_ALL_INTERFACES, self._host)
        self._add_address(server, address)


def bind_grpc() -> None:
    """For the gRPC servers that Serve starts in this process from now on.

    These names are replaced where they are looked up when they are called: Ray sends the classes of its proxies, with
    the functions that they name, from one process to another.
    """
    from ray.serve._private import default_impl, http_util, replica

    address = GrpcAddress(http_util.is_ipv6, default_impl.add_grpc_address)
    http_util.is_ipv6 = address.is_ipv6
    default_impl.add_grpc_address = address.add_address
    add_port = replica.add_port_to_grpc_server

    def add_internal_port(server: Any, address: str) -> int:
        """For calls between deployments: where no other node can be, on the loopback."""
        import ray

        host = LOOPBACK.get(ray.util.get_node_ip_address())
        return add_port(server, address.replace(_ALL_INTERFACES, host or _ALL_INTERFACES))

    replica.add_port_to_grpc_server = add_internal_port


def end_final_failures() -> None:
    """In the controller: a replica that can never start is not tried again, and its reason is the deployment's status.

    Serve makes three attempts for each replica, whatever the error, and reports a traceback. A version that has run
    before keeps its attempts: it may lack memory that comes free.
    """
    from ray.serve._private.deployment_state import DeploymentState

    attempts = DeploymentState._failed_to_start_threshold
    record = DeploymentState.record_replica_startup_failure
    final_reasons: weakref.WeakKeyDictionary[DeploymentState, str] = weakref.WeakKeyDictionary()

    def failed_to_start_threshold(self: DeploymentState) -> int:
        # A new deployment of the same name clears the message.
        is_final = self._replica_failure_message == final_reasons.get(self, ())
        return 1 if is_final else attempts.fget(self)

    def record_replica_startup_failure(self: DeploymentState, error_msg: str) -> None:
        reason = reason_of(error_msg)
        if reason is not None and not self._replica_has_started:
            final_reasons[self] = MARK + reason
        # The mark stays: `quire serve` then knows that this is the whole reason.
        record(self, error_msg if reason is None else MARK + reason)

    DeploymentState._failed_to_start_threshold = property(failed_to_start_threshold)
    DeploymentState.record_replica_startup_failure = record_replica_startup_failure


def open_ports() -> str | None:
    """A warning if anyone who reaches this Ray cluster can run code in it; None if nothing is open."""
    import ray
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    address = ray.util.get_node_ip_address()
    if is_token_auth_enabled() or address in LOOPBACK:
        return None
    return (
        f"this Ray cluster asks for no token and listens on {address}: anyone who reaches the ports of Ray (GCS 6379, "
        "dashboard and jobs 8265, nodes, workers, calls between Serve's replicas) can run code in it, since Ray "
        "unpickles what it receives there. Start every node with RAY_AUTH_MODE=token, or close these ports to others"
    )

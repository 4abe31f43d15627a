"""Changes to the processes of Ray Serve: HAProxy's configuration, and the addresses and ports of gRPC servers.

`cluster.yaml` names `set_up` in an environment variable. Ray calls it at the start of each process (Serve controller,
proxy, router, replica), before the process reads its settings. It sets the variables that the file does not give
(`ray_settings`), and changes three things that Ray has no settings for:

- a part of HAProxy's configuration (`haproxy_template`);
- the listening address of gRPC servers. Ray's gRPC servers listen on all interfaces, even if `http_options.host` is the
  loopback, and even if the node's address is a loopback address and no other node exists;
- gRPC ports of routers. Ray asks gRPC not to share a port, with a text where gRPC takes a number only. So two routers
  of one machine, of two nodes or two applications, would get the same port, and each one calls of the other.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import weakref
from collections.abc import Callable
from typing import Any

from quire.cluster.proxies.haproxy_template import Limits, adapt
from quire.cluster.proxies.ray_settings import (
    HAPROXY_VARIABLE,
    MAX_CONNECTIONS_VARIABLE,
    REQUEST_TIMEOUT_VARIABLE,
    SERVE_DEFAULTS,
    set_serve_defaults,
)
from quire.replica.serving.final_errors import MARK, reason_of

logger = logging.getLogger("ray.serve")

# HAProxy does not start if its limit of open files is too low. It needs two sockets per connection, a pipe with two
# ends for every fourth connection, and some files of its own.
_FILES_PER_CONNECTION = 2.5
_OTHER_FILES = 500
# Longest wait for an answer of Serve's controller.
_ASK_S = 10.0
LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "[::1]"}
_ALL_INTERFACES = "[::]"


def set_up() -> None:
    """Apply all changes to this process. If this raises, Ray ends the process."""
    set_serve_defaults(os.environ)
    fit_connections()
    _adapt_haproxy()
    bind_grpc()
    end_final_failures()


def fit_connections() -> None:
    """Lower the number of connections to fit the limit of open files."""
    if MAX_CONNECTIONS_VARIABLE not in os.environ:
        return
    wanted = int(os.environ[MAX_CONNECTIONS_VARIABLE])
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    fitting = max(1, int((most_files - _OTHER_FILES) / _FILES_PER_CONNECTION))
    if most_files == resource.RLIM_INFINITY or wanted <= fitting:
        return
    logger.debug(
        "HAProxy accepts %d connections instead of %d because it may open %d files (ulimit -Hn)",
        fitting,
        wanted,
        most_files,
    )
    os.environ[MAX_CONNECTIONS_VARIABLE] = str(fitting)


def runs_haproxy() -> bool:
    """Whether Serve's controller runs HAProxy, according to the environment that this process inherited from it."""
    return os.environ.get(HAPROXY_VARIABLE) == "1"


def serve_settings() -> dict[str, str]:
    """The values that this process has for the variables of `SERVE_DEFAULTS`."""
    return {name: os.environ.get(name) or default for name, default in SERVE_DEFAULTS.items()}


def _adapt_haproxy() -> None:
    from ray.serve._private import haproxy_templates

    seconds = os.environ.get(REQUEST_TIMEOUT_VARIABLE, "")
    limits = Limits(int(seconds)) if seconds else Limits()
    template, missed = adapt(haproxy_templates.HAPROXY_CONFIG_TEMPLATE, limits)
    haproxy_templates.HAPROXY_CONFIG_TEMPLATE = template
    for purpose in missed:
        logger.warning("HAProxy runs without %s: this version of Ray has another template", purpose)


class GrpcAddress:
    """Makes a gRPC server of Serve listen on the loopback if the HTTP server of the same process does.

    Serve starts the HTTP server first and calls `is_ipv6` with its address.
    """

    def __init__(self, is_ipv6: Callable[[str], bool], add_address: Callable[[Any, str], Any]):
        self._is_ipv6 = is_ipv6
        self._add_address = add_address
        self._host: str | None = None

    def is_ipv6(self, http_host: str) -> bool:
        """Replaces `is_ipv6` in Serve's `http_util`."""
        self._host = LOOPBACK.get(http_host)
        return self._is_ipv6(http_host)

    def add_address(self, server: Any, address: str) -> None:
        """Replaces Serve's `add_grpc_address`."""
        if self._host is not None:
            address = address.replace(_ALL_INTERFACES, self._host)
        self._add_address(server, address)


def check_port(port: int) -> None:
    """Raise what Serve's start of an HTTP server raises if another process listens on the port: then it takes another.

    Raises
    ------
    RuntimeError
        Caused by an OSError with EADDRINUSE.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        # Connections that have ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RuntimeError(f"port {port} is in use") from error
            raise


def bind_grpc() -> None:
    """Change the address and the port of gRPC servers that Serve starts in this process later.

    The functions are replaced in the modules in which they are looked up at call time, because Ray sends the classes of
    its proxies, with the functions that they reference, to other processes.
    """
    from ray.serve._private import default_impl, http_util, replica

    address = GrpcAddress(http_util.is_ipv6, default_impl.add_grpc_address)
    http_util.is_ipv6 = address.is_ipv6
    default_impl.add_grpc_address = address.add_address
    add_port = replica.add_port_to_grpc_server

    def add_internal_port(server: Any, address: str) -> int:
        """Open the port for calls between deployments: on the loopback if the cluster cannot have other nodes."""
        import ray

        host = LOOPBACK.get(ray.util.get_node_ip_address())
        return add_port(server, address.replace(_ALL_INTERFACES, host or _ALL_INTERFACES))

    replica.add_port_to_grpc_server = add_internal_port
    start = replica.start_grpc_server

    async def start_on_free_port(factory: Any, options: Any, **how: Any) -> Any:
        """Start a router's server for clients, unless another process has the port."""
        check_port(options.port)
        return await start(factory, options, **how)

    replica.start_grpc_server = start_on_free_port


def end_final_failures() -> None:
    """Make Serve's controller give up at once on a replica that can never start, with its reason as status message.

    By default Serve makes three attempts per replica after any error and reports a traceback. A version of a deployment
    that has run before keeps its attempts, because it may only lack memory that will become free.
    """
    from ray.serve._private.deployment_state import DeploymentState

    attempts = DeploymentState._failed_to_start_threshold
    record = DeploymentState.record_replica_startup_failure
    final_reasons: weakref.WeakKeyDictionary[DeploymentState, str] = weakref.WeakKeyDictionary()

    def failed_to_start_threshold(self: DeploymentState) -> int:
        # Deploying the same name again clears the message.
        is_final = self._replica_failure_message == final_reasons.get(self, ())
        return 1 if is_final else attempts.fget(self)

    def record_replica_startup_failure(self: DeploymentState, error_msg: str) -> None:
        reason = reason_of(error_msg)
        if reason is not None and not self._replica_has_started:
            final_reasons[self] = MARK + reason
        # The mark shows `quire serve` that this is the complete reason.
        record(self, error_msg if reason is None else MARK + reason)

    DeploymentState._failed_to_start_threshold = property(failed_to_start_threshold)
    DeploymentState.record_replica_startup_failure = record_replica_startup_failure


async def open_reflection() -> str | None:
    """Return a warning if Serve answers gRPC reflection, for which it asks for no key; None otherwise.

    Reflection is an option of the whole Serve instance, which only its controller knows.
    """
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        options = await asyncio.wait_for(controller.get_grpc_config.remote(), _ASK_S)
    except Exception as error:  # A router can serve without this answer.
        return f"grpc_options.enable_reflection must be false next to the section auth, got no answer: {error!r}"
    if not options.grpc_servicer_functions or not options.enable_reflection:
        return None
    return (
        "grpc_options.enable_reflection must be false next to the section auth, got true: Ray answers reflection "
        "itself, without a key. Start Serve again with the option"
    )


def open_ports() -> str | None:
    """Return a warning if any client that reaches this Ray cluster can run code in it; None otherwise."""
    import ray
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    address = ray.util.get_node_ip_address()
    if is_token_auth_enabled() or address in LOOPBACK:
        return None
    return (
        f"this Ray cluster requires no token and listens on {address}: any client that reaches Ray's ports (GCS 6379, "
        "dashboard and jobs 8265, nodes, workers, calls between Serve's replicas) can run code in it, because Ray "
        "unpickles the data that it receives there. Start every node with RAY_AUTH_MODE=token, or block these ports"
    )

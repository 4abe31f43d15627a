"""Environment variables of Ray, glibc and grpcio for the processes of Ray Serve.

Ray Serve reads its settings from the environment of each process, and only the file that starts Serve can set the
controller's environment. So `cluster.yaml` gives the controller a hook (`ray_proxies.set_up`), and every process that
the controller starts inherits it:

    cluster.yaml ──hook──▶ controller ──▶ proxies           SERVE_DEFAULTS, before the process reads its settings
                               └────────▶ routers, replicas  SERVE_DEFAULTS, and DEPLOYMENT_VARIABLES by `build`

A variable in the file, under `controller_options` or the application's `runtime_env`, takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from types import MappingProxyType

HOOK_VARIABLE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
HOOK = "quire.cluster.proxies.ray_proxies.set_up"
HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"
NICENESS_VARIABLE = "RAY_worker_niceness"
MAX_CONNECTIONS_VARIABLE = "RAY_SERVE_HAPROXY_MAXCONN"
REQUEST_TIMEOUT_VARIABLE = "QUIRE_HAPROXY_REQUEST_TIMEOUT_S"

# Variables that the file must set, because they are read before Quire's code runs in a process.
FILE_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        HOOK_VARIABLE: HOOK,
        # Ray's default niceness of 15 starves its workers when anything else runs on the machine.
        NICENESS_VARIABLE: "0",
    }
)

# Variables for every process of Serve. The hook sets each variable that the file does not set.
SERVE_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        # One HAProxy per node in front of the routers. It uses a fifth of the Python proxy's CPU time per streamed
        # token. "0" selects Ray's own proxy.
        HAPROXY_VARIABLE: "1",
        # Streams per gRPC connection of a client. With Ray's default of 100, the 101st stream waits.
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": "2000",
        # One stream per connection to a router. HAProxy 2.8 stops reading from a connection while one of its streams
        # has a full buffer, so a client that does not read would block others.
        "RAY_SERVE_HAPROXY_H2_BE_MAX_CONCURRENT_STREAMS": "1",
        # Maximum size of a gRPC message in bytes, uncompressed (Ray: 2 GiB). A request has at most 8 MiB.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": "33554432",
        # Refuses or replaces headers that Serve cannot decode; without this they give status 500.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "quire.cluster.http.http_middleware.middlewares",
        # Maximum bytes of a request's header or a call's metadata. With Ray's 16384, a longer one also ended all other
        # gRPC calls on its connection.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
        # Maximum number of client connections, idle ones included, and the number of seconds within which a connection
        # must send a complete request.
        MAX_CONNECTIONS_VARIABLE: "8192",
        REQUEST_TIMEOUT_VARIABLE: "10",
        # Seconds after which a client that neither sends nor reads is disconnected; longer than
        # router.slow_client_timeout_s. Waiting for an answer does not count.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "120",
        # Seconds that streams have after the list of routers has changed. HAProxy starts a new process then, and the
        # one before serves its streams to their end; Ray's default of 120 ends it, and them. A port that a router has
        # left is free again after Ray's 150 s: the old process sends nothing new to it, because its connections end
        # with their streams.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        "RAY_SERVE_PORT_QUARANTINE_S": "150",
        # A router that does not answer gets no new requests after at most 2.5 s (with Ray's default of 5s: 15 s).
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "750ms",
        # A dead proxy is replaced after about 5 s instead of 25 s (3 checks of 10 s by default).
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
    }
)

# Variables for routers and replicas only; `build` passes them to its deployments.
DEPLOYMENT_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        **FILE_VARIABLES,
        # With a separate thread for user code, Serve queues answers without a bound. In one thread, sending waits for
        # the socket, so a client that does not read pauses its request.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # Runs Serve's part of a call to a replica in the same thread. A separate thread would take the GIL from the
        # router for every sent gRPC message, although the message belongs to another call.
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        # By default glibc creates up to eight heaps per core, and each keeps its largest size, so routers would grow
        # as long as they run.
        "MALLOC_ARENA_MAX": "2",
        # The tokenizer library would use a thread for each core, which takes a fifth more processor time for the pieces
        # of an agent's prompts. The option `tokenizer_threads` says how many a router uses.
        "TOKENIZERS_PARALLELISM": "false",
        # grpcio polls its connections in one thread instead of a pool, which saves a tenth of a router's CPU time per
        # gRPC message. (The minus sign turns an experiment off.)
        "GRPC_EXPERIMENTS": "-event_engine_listener",
    }
)


def set_serve_defaults(process: MutableMapping[str, str]) -> None:
    """Set the missing variables of a process. Must run before Ray reads its settings."""
    for name, value in SERVE_DEFAULTS.items():
        process.setdefault(name, value)


def deployment_variables(given: Mapping[str, str], haproxy: bool) -> dict[str, str]:
    """The variables of a deployment that the file does not set.

    Parameters
    ----------
    given
        The variables of the file, as passed to the process that builds the application.
    haproxy
        Whether the controller runs HAProxy; a Serve that was not started by Quire's file may not.
    """
    variables = {**DEPLOYMENT_VARIABLES, HAPROXY_VARIABLE: str(int(haproxy))}
    return {name: value for name, value in variables.items() if name not in given}


def effective_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the controller's settings if the Serve config gives it `given`: with Quire's defaults if the hook runs."""
    return {**SERVE_DEFAULTS, **given} if given.get(HOOK_VARIABLE) == HOOK else dict(given)

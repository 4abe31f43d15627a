"""How Quire runs Ray Serve: the variables of Ray's, glibc's and grpcio's that its processes get.

Ray Serve reads its settings from the environment of each process, and the controller's environment can be given only
in the file that starts Serve. So `cluster.yaml` gives the controller a hook (`ray_proxies.set_up`), and every process
that the controller starts inherits it:

    cluster.yaml ──hook──▶ controller ──▶ proxies           SERVE_DEFAULTS, before the process reads its settings
                               └────────▶ routers, replicas  SERVE_DEFAULTS, and DEPLOYMENT_VARIABLES by `build`

A variable that the file gives, under `controller_options` or the application's `runtime_env`, wins over these.
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

# What the file must give: both are read before any of our code runs in the process.
FILE_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        HOOK_VARIABLE: HOOK,
        # Ray's default niceness of 15 starves its workers when anything else runs on the machine.
        NICENESS_VARIABLE: "0",
    }
)

# For every process of Serve. The hook sets those that the file does not give.
SERVE_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        # One HAProxy per node in front of the routers, which listen for it themselves: a fifth of the CPU that the
        # Python proxy takes for a streamed token. "0" goes back to Ray's own proxy.
        HAPROXY_VARIABLE: "1",
        # Streams on one gRPC connection of a client; the 101st would wait at Ray's default of 100.
        "RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS": "2000",
        # One stream on a connection to a router: HAProxy 2.8 reads nothing more from a connection while one of its
        # streams has a full buffer, so a client that does not read would stop others.
        "RAY_SERVE_HAPROXY_H2_BE_MAX_CONCURRENT_STREAMS": "1",
        # Largest gRPC message in bytes, unpacked, of requests and of answers (Ray: 2 GiB). A request has at most 8 MiB.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": "33554432",
        # Headers that Serve cannot decode are refused by name or replaced; without this they end in status 500.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "quire.cluster.http.http_middleware.middlewares",
        # Bytes of a request's header or a call's metadata. With Ray's 16384 a longer one ended every other gRPC call on
        # its connection too.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
        # Connections of all clients, also those that send nothing; one that does not finish its request within this
        # many seconds is closed.
        MAX_CONNECTIONS_VARIABLE: "8192",
        REQUEST_TIMEOUT_VARIABLE: "10",
        # A client that sends nothing of its request, or reads nothing of its answer, for so long is cut off; more than
        # router.slow_client_timeout_s. Waiting for an answer does not count.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "120",
        # A router that does not answer gets no new request after at most 2.5 s; after 15 s with Ray's 5s.
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "750ms",
        # A dead proxy is replaced after about 5 s instead of 25 s (3 checks of 10 s by default).
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
    }
)

# For routers and replicas only. `build` gives them to its deployments.
DEPLOYMENT_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        **FILE_VARIABLES,
        # With a thread of its own for our code Serve queues answers without a bound; in one thread sending waits for
        # the socket, and so a client that does not read pauses its request.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # Serve's part in a call to a replica runs in the same thread too. In a thread of its own it takes the GIL from
        # the router for every gRPC message that is sent, only to find that the message is another call's.
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        # glibc gives threads heaps of their own, eight times as many as there are cores, and each keeps the most that
        # it ever held: routers would grow for as long as they run.
        "MALLOC_ARENA_MAX": "2",
        # grpcio polls its connections in one thread and not in a pool that passes every event around: a tenth of what a
        # router takes for a gRPC message. (The minus sign turns an experiment of grpcio's off.)
        "GRPC_EXPERIMENTS": "-event_engine_listener",
    }
)


def set_serve_defaults(process: MutableMapping[str, str]) -> None:
    """Add the settings that a process' environment lacks. Ray must not have read its settings yet."""
    for name, value in SERVE_DEFAULTS.items():
        process.setdefault(name, value)


def deployment_variables(given: Mapping[str, str], haproxy: bool) -> dict[str, str]:
    """The variables that a deployment needs beyond those that the file gives.

    Parameters
    ----------
    given
        The variables of the file, as the process that builds the application has got them.
    haproxy
        Whether the controller runs HAProxy: a Serve that someone else has started need not.
    """
    variables = {**DEPLOYMENT_VARIABLES, HAPROXY_VARIABLE: str(int(haproxy))}
    return {name: value for name, value in variables.items() if name not in given}


def effective_variables(given: Mapping[str, str]) -> dict[str, str]:
    """The settings of a Serve whose controller gets `given` from the file."""
    return {**SERVE_DEFAULTS, **given} if given.get(HOOK_VARIABLE) == HOOK else dict(given)

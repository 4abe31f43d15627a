"""HAProxy's configuration of a TLS listener: pure text.

The listener is next to Ray's HAProxy, not in front of it, so a streamed token passes through one proxy with TLS as
without:

    client ──TLS──▶ listener (this configuration) ──┐
                                                    ├──▶ routers' own ports
    client ───────▶ Ray's HAProxy ──────────────────┘

Bounds are the same in both. Routers have numbered slots. The listener starts without routers, and `ListenerProcess`
fills the slots through HAProxy's runtime API, so routers come and go without a restart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.cluster.config.tls_section import TlsArgs
from quire.cluster.proxies.haproxy_template import RETRY_AFTER_S, UNAVAILABLE
from quire.cluster.proxies.ray_settings import (
    MAX_CONNECTIONS_VARIABLE,
    REQUEST_TIMEOUT_VARIABLE,
)

# `routers` is at most 64, and an update may start as many new ones.
NUM_SLOTS = 128
HTTP_BACKEND, GRPC_BACKEND = "routers_http", "routers_grpc"
_CONNECT_TIMEOUT_S = 5
_IDLE_TIMEOUT_S = 90
# A request may wait for its first token as long as the router lets it.
_SERVER_TIMEOUT = "24h"


@dataclass(frozen=True, slots=True)
class ListenerFiles:
    """Files in the listener's folder, which only Quire's user can read."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "haproxy.cfg"

    @property
    def socket(self) -> Path:
        """HAProxy's runtime API."""
        return self.folder / "admin.sock"

    # HAProxy reads the next two at its start. They are deleted then, and their paths are the names of the contents in
    # the runtime API.
    @property
    def server(self) -> Path:
        """Certificate, chain and key."""
        return self.folder / "server.pem"

    @property
    def client_authorities(self) -> Path:
        return self.folder / "clients.pem"


def slot(index: int) -> str:
    """Name of a slot in both backends."""
    return f"router{index}"


def configuration(args: TlsArgs, files: ListenerFiles, settings: Mapping[str, str]) -> str:
    """Return the text of HAProxy's configuration.

    Parameters
    ----------
    settings
        Values of the variables of `SERVE_DEFAULTS`: they bound this listener as they bound Ray's HAProxy.
    """
    request_timeout = f"{settings[REQUEST_TIMEOUT_VARIABLE]}s"
    check_interval = settings["RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER"]
    bind = f"ssl crt {files.server} ssl-min-ver TLSv{args.min_version}"
    if args.client_ca_file is not None:
        # A resumed session would skip the check of the client's certificate.
        bind += f" ca-file {files.client_authorities} verify required no-tls-tickets"
    host = f"[{args.host}]" if ":" in args.host else args.host
    error = {"message": UNAVAILABLE, "type": "unavailable_error", "param": None, "code": None}
    body = json.dumps({"error": error})
    slots = range(NUM_SLOTS)
    lines = [
        "global",
        "    log stderr format raw local0 notice",
        f"    stats socket {files.socket} mode 600 level admin",
        "    stats timeout 30s",
        f"    maxconn {settings[MAX_CONNECTIONS_VARIABLE]}",
        f"    tune.bufsize {settings['RAY_SERVE_HAPROXY_TUNE_BUFSIZE']}",
        f"    tune.h2.fe.max-concurrent-streams {settings['RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS']}",
        f"    tune.h2.be.max-concurrent-streams {settings['RAY_SERVE_HAPROXY_H2_BE_MAX_CONCURRENT_STREAMS']}",
        *(["    tune.ssl.cachesize 0"] if args.client_ca_file is not None else []),
        "defaults",
        "    mode http",
        f"    timeout connect {_CONNECT_TIMEOUT_S}s",
        f"    timeout client {settings['RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S']}s",
        f"    timeout server {_SERVER_TIMEOUT}",
        f"    timeout http-request {request_timeout}",
        f"    timeout http-keep-alive {_IDLE_TIMEOUT_S}s",
        # The last value of x-forwarded-for is the address of the client.
        "    option forwardfor",
        "    option abortonclose",
        "    option http-no-delay",
        "    option redispatch 1",
        "    retry-on conn-failure",
        "    balance leastconn",
        "    http-reuse always",
        "frontend tls_http",
        f"    bind {host}:{args.http_port} {bind} alpn h2,http/1.1",
        f"    http-request wait-for-body time {request_timeout} if {{ method POST PUT PATCH }}",
        f"    http-request return status 503 content-type application/json string '{body}'"
        f" hdr Retry-After {RETRY_AFTER_S} if {{ nbsrv({HTTP_BACKEND}) eq 0 }}",
        f"    default_backend {HTTP_BACKEND}",
        f"backend {HTTP_BACKEND}",
        "    option httpchk GET /-/healthz",
        "    default-server disabled check fall 2 rise 2 fastinter 250ms downinter 250ms"
        f" inter {check_interval}",
        *(f"    server {slot(i)} 127.0.0.1:1" for i in slots),
        "frontend tls_grpc",
        f"    bind {host}:{args.grpc_port} {bind} alpn h2",
        # A reflection client sends messages at any time during the stream.
        f"    http-request wait-for-body time {request_timeout} if !{{ path_beg /grpc.reflection. }}",
        "    http-request return status 200 hdr content-type application/grpc hdr grpc-status 14"
        f' hdr grpc-message "{UNAVAILABLE}" if {{ nbsrv({HTTP_BACKEND}) eq 0 }}',
        f"    default_backend {GRPC_BACKEND}",
        f"backend {GRPC_BACKEND}",
        # Both ports of a router belong to one process, so one health check is enough.
        *(
            f"    server {slot(i)} 127.0.0.1:1 proto h2 track {HTTP_BACKEND}/{slot(i)}"
            for i in slots
        ),
    ]
    return "\n".join(lines) + "\n"

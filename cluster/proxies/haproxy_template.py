"""Changes to the HAProxy configuration that Ray Serve writes: pure text, no Ray.

Ray renders HAProxy's configuration from its own Jinja template, and only a part of it has variables. This module adds
settings without a variable: time limits for requests that never arrive, the address of statistics and metrics, an
answer while there are no routes, and a bound on the HTTP methods that become label values.

Each change names the text of Ray's template that it replaces. `adapt` makes the changes that fit and returns the
others, so with another version of Ray a protection may be missing but the proxy still works. A test checks all changes
against the installed version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

# Methods that an application may use. Any other method gets status 501 and counts as OTHER.
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
RETRY_AFTER_S = 1  # HAProxy learns of new routes within a second
UNAVAILABLE = "no router is known to the proxy yet, or none answers; try again"


@dataclass(frozen=True, slots=True)
class Limits:
    """Values that this module writes into the template, because Ray has no variables for them."""

    # Time from a connection to its first request, and from the first byte of a request to the end of its header. After
    # the header, the body (or the part that fits one buffer of HAProxy) has the same time again.
    request_timeout_s: int = 10


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the template: the text `old`, which occurs exactly once, is replaced by `new`."""

    purpose: str
    old: str
    new: str


def changes(limits: Limits) -> tuple[Change, ...]:
    """All changes, in the order of the template."""
    error = {"message": UNAVAILABLE, "type": "unavailable_error", "param": None, "code": None}
    body = json.dumps({"error": error})
    answer = f"content-type application/json string '{body}' hdr Retry-After {RETRY_AFTER_S}"
    methods = " ".join(METHODS)
    return (
        Change(
            "a time limit for the header of a request",
            "    option log-health-checks\n",
            "    option log-health-checks\n"
            f"    timeout http-request {limits.request_timeout_s}s\n"
            # The last value of x-forwarded-for is then the address of HAProxy's peer.
            "    option forwardfor\n",
        ),
        Change(
            "503 with Retry-After where no router answers",
            "    errorfile 503 {{ config.error_file_path }}\n",
            f"    http-error status 503 {answer}\n",
        ),
        Change(
            "HAProxy's metrics on the host of the HTTP proxy",
            "    bind :{{ config.metrics_port }}\n",
            "    bind {{ config.frontend_host }}:{{ config.metrics_port }}\n",
        ),
        Change(
            "a bound on the HTTP methods",
            "    bind {{ config.frontend_host }}:{{ config.frontend_port }}\n",
            "    bind {{ config.frontend_host }}:{{ config.frontend_port }}\n"
            f"    acl known_method method {methods}\n"
            "    http-request set-var(txn.method) method if known_method\n"
            "    http-request set-var(txn.method) str(OTHER) if !known_method\n"
            "    http-request return status 501 content-type text/plain"
            f' string "method must be one of {methods}" if !known_method\n'
            f"    http-request wait-for-body time {limits.request_timeout_s}s"
            " if { method POST PUT PATCH }\n",
        ),
        Change(
            "a bound on the methods in metrics",
            " method=%HM ",
            " method=%[var(txn.method)] ",
        ),
        Change(
            "503 while no route is known",
            "    http-request return status 404 ",
            "    {%- if not backends %}\n"
            f"    http-request return status 503 {answer}\n"
            "    {%- endif %}\n"
            "    http-request return status 404 ",
        ),
        Change(
            "UNAVAILABLE while no gRPC route is known",
            "    # Trailers-only NOT_FOUND. gRPC clients surface this as\n",
            "    {%- if not grpc_backends %}\n"
            "    http-request return status 200 content-type application/grpc hdr grpc-status 14"
            f' hdr grpc-message "{UNAVAILABLE}"\n'
            "    {%- endif %}\n"
            "    # Trailers-only NOT_FOUND. gRPC clients surface this as\n",
        ),
        Change(
            "a time limit for the message of a gRPC request",
            "    bind {{ config.grpc_frontend_host }}:{{ config.grpc_frontend_port }} proto h2\n"
            "    mode http\n",
            "    bind {{ config.grpc_frontend_host }}:{{ config.grpc_frontend_port }} proto h2\n"
            "    mode http\n"
            # A reflection client sends messages at any time during the stream.
            f"    http-request wait-for-body time {limits.request_timeout_s}s"
            " if !{ path_beg /grpc.reflection. }\n",
        ),
        Change(
            "HAProxy's statistics on the host of the HTTP proxy",
            "  bind *:{{ config.stats_port }}\n",
            "  bind {{ config.frontend_host }}:{{ config.stats_port }}\n",
        ),
    )


def adapt(template: str, limits: Limits) -> tuple[str, list[str]]:
    """Apply the changes to Ray's template.

    Returns
    -------
    The new template, and the purpose of each change that did not fit.
    """
    missed = []
    for change in changes(limits):
        if template.count(change.old) == 1:
            template = template.replace(change.old, change.new)
        else:
            missed.append(change.purpose)
    return template, missed

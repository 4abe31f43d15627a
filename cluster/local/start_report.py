"""Lines that `quire serve` prints when all is ready: times, engines, open ports, a request to paste."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quire.cluster.local.ports import Endpoint, listening_lines
from quire.cluster.local.serve_api import answers, asks_for_token
from quire.protos.engine_facts import describe, describe_phases

if TYPE_CHECKING:
    from quire.cluster.config.serve_config import Application, ServeConfig


def dashboard_lines(url: str) -> Iterator[str]:
    """Yield lines with the URL of Ray's dashboard, and how to get its token if it requires one."""
    yield f"Ray dashboard: {url}"
    if asks_for_token():
        yield (
            "it requires a token: `ray get-auth-token` prints it; Ray's commands (`serve status`) read it with "
            "`export RAY_AUTH_MODE=token`"
        )


def ready_lines(
    config: ServeConfig,
    bodies: Mapping[str, Mapping[str, Any]],
    seconds: Mapping[str, float],
    listeners: Iterable[tuple[str, int]],
) -> Iterator[str]:
    """Yield all lines; the last ones have a request for each application, to paste into a shell.

    Parameters
    ----------
    bodies
        Body of `/ready` by application; empty for an application that is not Quire's.
    seconds
        Under `total` the seconds from the start to now, under `Ray` the seconds until Ray ran.
    """
    phases = [f"Ray {seconds['Ray']:.1f} s"]
    phases.append(f"Serve and applications {seconds['total'] - seconds['Ray']:.1f} s")
    for name, body in bodies.items():
        if startup := body.get("startup"):
            phases.append(f"of these in {name!r}: {describe_phases(startup)}")
    yield f"start-up {seconds['total']:.1f} s: {'; '.join(phases)}"
    endpoint = Endpoint.of(config)
    for app in config.applications:
        engine = bodies.get(app.name, {}).get("engine")
        if engine and app.config is not None:
            replicas = f"{app.config.replicas} x " if app.config.replicas > 1 else ""
            yield f"{app.name}: {replicas}{describe({**engine, 'model': app.config.model_name})}"
    yield from listening_lines(listeners)
    for app in config.applications:
        if app.config is not None and (tls := app.config.tls):
            asked = "" if tls.client_ca_file is None else "; clients need a certificate"
            yield f"TLS: HTTPS on port {tls.http_port}, gRPC on port {tls.grpc_port}{asked}"
    for app in config.applications:
        if app.config is not None and app.route_prefix is not None:
            metrics = endpoint.url(app.route_prefix, "/metrics")
            if answers(metrics):
                yield f"metrics: {metrics}"
    for app in config.applications:
        yield f"ready: {_try_it(endpoint, app)}"


def _try_it(endpoint: Endpoint, app: Application) -> str:
    """Return a `curl` command that streams a chat; for an application that is not Quire's, only its name."""
    if app.config is None or app.route_prefix is None:
        return app.name
    body = {
        "model": app.config.model_name,
        "stream": True,
        "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
    }
    options = ["-N", "-k"] if endpoint.scheme == "https" else ["-N"]
    url = endpoint.url(app.route_prefix, "/v1/chat/completions")
    headers = ["-H", "content-type: application/json"]
    if app.config.auth is not None:
        headers += ["-H", "authorization: Bearer KEY"]
    return shlex.join(["curl", *options, url, *headers, "-d", json.dumps(body)])

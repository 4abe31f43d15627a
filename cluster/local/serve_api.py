"""HTTP calls to a running Serve: `/ready` of an application, and Ray's REST API."""

from __future__ import annotations

import json
import os
import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

# Connection refused or reset, a status other than 2xx, not HTTP, not JSON.
_NO_ANSWER = (OSError, HTTPException, ValueError)


def fetch_ready(url: str, timeout_s: float = 2.0) -> dict[str, Any] | None:
    """Fetch the JSON object of `/ready`; None while the application is not ready."""
    context = _loopback_context(url)
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=context) as response:
            body = json.loads(response.read() or b"{}")
    except _NO_ANSWER:
        return None
    return body if isinstance(body, dict) else {}


def _loopback_context(url: str) -> ssl.SSLContext | None:
    """Make an SSL context that accepts any certificate; None for plain HTTP.

    The server is a child process on the loopback, and its certificate need not be valid for the loopback address.
    """
    if not url.startswith("https:"):
        return None
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def answers(url: str) -> bool:
    """Whether a GET is answered with status 2xx."""
    try:
        with urllib.request.urlopen(url, timeout=2.0, context=_loopback_context(url)):
            return True
    except _NO_ANSWER:
        return False


def asks_for_token() -> bool:
    """Whether the Ray that this process has started requires a token."""
    return bool(ray_auth_header(os.environ))


def ray_auth_header(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the header with the token for Ray's REST API, or no header. Looks for the token in the same places as Ray.

    On a machine's first run, `serve run` creates the token after Ray's client library in this process has looked for
    it, so this function reads the token at each call.
    """
    if "RAY_AUTH_TOKEN" in environ:
        return {"Authorization": f"Bearer {environ['RAY_AUTH_TOKEN']}"}
    path = environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    try:
        return {"Authorization": f"Bearer {Path(path).read_text().strip()}"}
    except OSError:  # RAY_AUTH_MODE=disabled: no token is needed
        return {}


def serve_details(dashboard_url: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """Fetch the state of Serve and its applications from Ray's REST API.

    Raises
    ------
    OSError, HTTPException, ValueError
        There is no answer, or it is not JSON.
    """
    url = f"{dashboard_url.rstrip('/')}/api/serve/applications/"
    request = urllib.request.Request(url, headers=ray_auth_header(os.environ))
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


@dataclass(frozen=True, slots=True)
class ApplicationStatus:
    """Serve's status of one application."""

    state: str  # RUNNING, DEPLOYING, DEPLOY_FAILED, ...
    message: str = ""  # messages of the application and its deployments, each once
    has_router: bool = False  # whether a router of Quire accepts requests


def application_status(
    dashboard_url: str, timeout_s: float = 5.0
) -> dict[str, ApplicationStatus] | None:
    """Status of each application, from Ray's REST API; None while it does not answer."""
    try:
        details = serve_details(dashboard_url, timeout_s)
    except _NO_ANSWER:  # the dashboard starts to answer some seconds after its URL is printed
        return None
    status = {}
    for name, app in details.get("applications", {}).items():
        deployments = app.get("deployments", {})
        messages = [app.get("message", "")]
        messages += [deployment.get("message", "") for deployment in deployments.values()]
        unique = dict.fromkeys(m.strip() for m in messages if m and m.strip())
        routers = deployments.get("Router", {}).get("replicas", ())
        has_router = any(replica.get("state") == "RUNNING" for replica in routers)
        status[name] = ApplicationStatus(app["status"], "\n".join(unique), has_router)
    return status

"""What a running Serve says of itself over HTTP: `/ready` of an application, and Ray's REST API."""

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

# Refused, reset, a status other than 2xx; not HTTP; not JSON.
_NO_ANSWER = (OSError, HTTPException, ValueError)


def fetch_ready(url: str, timeout_s: float = 2.0) -> dict[str, Any] | None:
    """The JSON object of `/ready`, or None while the application is not ready."""
    context = _loopback_context(url)
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=context) as response:
            body = json.loads(response.read() or b"{}")
    except _NO_ANSWER:
        return None
    return body if isinstance(body, dict) else {}


def _loopback_context(url: str) -> ssl.SSLContext | None:
    """For the child's own certificate, asked for over the loopback: there is nothing to verify it against."""
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
    """Whether the Ray that this process has started asks for a token."""
    return bool(ray_auth_header(os.environ))


def ray_auth_header(environ: Mapping[str, str]) -> dict[str, str]:
    """The header that Ray's REST API wants, by Ray's own rules for where its token is.

    `serve run` makes the token on a machine's first run, after Ray's client library has settled for
    this process that there is none; so it is read again here.
    """
    if "RAY_AUTH_TOKEN" in environ:
        return {"Authorization": f"Bearer {environ['RAY_AUTH_TOKEN']}"}
    path = environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    try:
        return {"Authorization": f"Bearer {Path(path).read_text().strip()}"}
    except OSError:  # RAY_AUTH_MODE=disabled: no token, none wanted
        return {}


def serve_details(dashboard_url: str, timeout_s: float = 10.0) -> dict[str, Any]:
    """What Ray's REST API says of Serve and its applications.

    Raises
    ------
    OSError, HTTPException, ValueError
        It does not answer, or not with JSON.
    """
    url = f"{dashboard_url.rstrip('/')}/api/serve/applications/"
    request = urllib.request.Request(url, headers=ray_auth_header(os.environ))
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


@dataclass(frozen=True, slots=True)
class ApplicationStatus:
    """What Serve says of one application."""

    state: str  # RUNNING, DEPLOYING, DEPLOY_FAILED, ...
    message: str = ""  # the application's and its deployments', each once
    has_router: bool = False  # one of Quire's routers takes requests


def application_status(
    dashboard_url: str, timeout_s: float = 5.0
) -> dict[str, ApplicationStatus] | None:
    """Status of each application, from Ray's REST API; None while it does not answer."""
    try:
        details = serve_details(dashboard_url, timeout_s)
    except _NO_ANSWER:  # the dashboard answers some seconds after its URL is printed
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

"""`quire serve`: one Serve config on a Ray cluster of its own, watched until it answers.

Ray's own `serve run` does the work in a child process; it never ends when a deployment fails and
writes everything to the terminal. So its output goes to a log file, and this module watches the
child process, Ray's status API and `/ready` of each Quire application (of any other, the proxy's
routes):

    start child ──▶ dashboard URL in log ──▶ status API, /ready ──▶ "ready" ──▶ signal, exit 0
         │                   │                       │                 │
         └── child ended ────┴── timeout ────────────┴─ DEPLOY_FAILED ─┴──▶ log's tail, exit 1
                                                                       │
                                    Ray's daemon ended, `serve shutdown`
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, TextIO

from quire.cluster.config import ConfigError, Problem
from quire.cluster.serve_config import Application, ServeConfig

LOG_TAIL_LINES = 40
POLL_S = 0.25
TERMINATE_S = 15.0
# Once ready: Ray's API is asked so often, and has to say so many times in a row that every application is gone.
WATCH_S = 2.0
WATCH_TIMES = 2
_LISTENS = "0A"  # a state in /proc/net/tcp
# Without one of these Ray does nothing more, while `serve run` and the dashboard stay.
RAY_DAEMONS = frozenset({"raylet", "gcs_server"})

# What else listens in HAProxy mode (Ray's defaults): HAProxy's statistics and metrics, without which it does not start,
# and the Python proxies to which it sends what comes while it knows of no router. Ray's proxies share a port that is
# taken, so with two clusters on one machine each would get a part of what is meant for the other's.
_HAPROXY_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
# Ray's name for "a node without other nodes": the node's address is then the loopback's, and Ray's own servers listen
# there. This Ray is of this machine alone (`serve_command`).
_LOOPBACK_NODE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Refused, reset, a status other than 2xx; not HTTP; not JSON.
_NO_ANSWER = (OSError, HTTPException, ValueError)
_DASHBOARD = re.compile(r"View the dashboard at \W*(?:\x1b\[\d+m)*(https?://[^\s\x1b]+)")


class ServeFailed(Exception):
    """The cluster cannot become ready, or ended; the message says why."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the HTTP proxy of a config answers on this machine."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, config: ServeConfig) -> Endpoint:
        options = config.schema.http_options
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
        return cls("https" if options.ssl_certfile else "http", host, options.port)

    def url(self, route_prefix: str, path: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{route_prefix.rstrip('/')}{path}"


def check_ports(config: ServeConfig) -> None:
    """Refuse a port that another process holds, which Ray would report only in a proxy's log.

    Two clusters in HAProxy mode on one machine need ports of their own for HAProxy's statistics and metrics and for the
    proxies that it falls back to.

    Raises
    ------
    ConfigError
        With each port in use.
    """
    endpoint = Endpoint.of(config)
    problems = []
    listeners = {"http_options.port": (endpoint.host, endpoint.port)}
    if config.schema.grpc_options.grpc_servicer_functions:
        listeners["grpc_options.port"] = (endpoint.host, config.schema.grpc_options.port)
    options = config.schema.controller_options
    env_vars = ((options and options.runtime_env) or {}).get("env_vars", {})
    if env_vars.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        for name, default in _HAPROXY_PORTS.items():
            if name.endswith("_GRPC_PORT") and "grpc_options.port" not in listeners:
                continue
            path = f"controller_options.runtime_env.env_vars.{name}"
            port = env_vars.get(name, str(default))
            if port.isdecimal() and 1 <= int(port) <= 65535:
                listeners[path] = ("0.0.0.0", int(port))
            else:
                problems.append(Problem(path, f"must be from 1 to 65535, got {port!r}"))
    for path, (host, port) in listeners.items():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                problems.append(Problem(path, f"cannot listen on port {port}: {error.strerror}"))
    if problems:
        raise ConfigError(problems)


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nobody uses, for a cluster that is to listen on them seconds from now.

    Never from the range out of which the kernel takes ports for outgoing connections and for `bind`
    to 0: Ray opens hundreds of these while it starts, and one of them could be ours by then. Nor
    below 20000, where Ray's own workers listen.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_768), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"found {len(ports)} free ports from 20000 to 32767, wanted {count}")


def fetch_ready(url: str, timeout_s: float = 2.0) -> dict[str, Any] | None:
    """The JSON object of `/ready`, or None while the application is not ready."""
    context = None
    if url.startswith("https:"):
        # The child's own certificate, asked for over the loopback: nothing to verify it against.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=context) as response:
            body = json.loads(response.read() or b"{}")
    except _NO_ANSWER:
        return None
    return body if isinstance(body, dict) else {}


def ray_auth_header(environ: Mapping[str, str]) -> dict[str, str]:
    """The header that Ray's REST API wants, by Ray's own rules for where its token is.

    `serve run` makes the token on a machine's first run, after Ray's client library has settled for
    this process that there is none; so it is read anew here.
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


def application_status(
    dashboard_url: str, timeout_s: float = 5.0
) -> dict[str, tuple[str, str]] | None:
    """Status and message of each application, from Ray's REST API; None while it does not answer."""
    try:
        details = serve_details(dashboard_url, timeout_s)
    except _NO_ANSWER:  # the dashboard answers some seconds after its URL is printed
        return None
    status = {}
    for name, app in details.get("applications", {}).items():
        messages = [app.get("message", "")]
        messages += [d.get("message", "") for d in app.get("deployments", {}).values()]
        unique = dict.fromkeys(m.strip() for m in messages if m and m.strip())
        status[name] = app["status"], "\n".join(unique)
    return status


@dataclass(slots=True)
class LocalServe:
    """One `serve run` child process, from its start to its end.

    Parameters
    ----------
    config
        What it runs, checked.
    command
        The child's command line.
    log_path
        File that takes the child's output.
    status
        Maps the dashboard's URL to each application's status and message, or to None while Ray's API does not answer.
    """

    config: ServeConfig
    command: list[str]
    log_path: Path
    status: Callable[[str], dict[str, tuple[str, str]] | None] = application_status
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self, out: TextIO, ready_timeout_s: float) -> int:
        """Serve until SIGINT or SIGTERM.

        Parameters
        ----------
        out
            Takes the few lines for the user.
        ready_timeout_s
            Seconds from the start after which an application that is not ready counts as failed.

        Returns
        -------
        Exit status: 0 after a signal, 1 if the cluster failed.
        """
        # Handlers before the child: a shell starts background jobs with SIGINT ignored, and what is
        # ignored here would be ignored by the child too.
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            self._start()
            print(f"starting; the log is {self.log_path}", file=out, flush=True)
            self._until_ready(out, ready_timeout_s)
            self._watch()
            print("stopping", file=out, flush=True)
            return 0
        except ServeFailed as error:
            print(f"{self._log_tail()}\nfailed: {error}", file=out, flush=True)
            print(f"the whole log is {self.log_path}", file=out, flush=True)
            return 1
        finally:
            self._end_child()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self) -> None:
        with self.log_path.open("wb") as log:
            # Its own session, so that Ctrl-C reaches this process only, which stops the child in
            # order.
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_LOOPBACK_NODE | os.environ,
                start_new_session=True,
            )

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop.set()

    def _until_ready(self, out: TextIO, ready_timeout_s: float) -> None:
        """Return when every application is ready, or when a signal came."""
        started_s = time.monotonic()
        ray_s = None
        bodies: dict[str, dict[str, Any]] = {}
        dashboard_url = None
        while len(bodies) < len(self.config.applications):
            if self._stop.wait(POLL_S):
                return
            self._check_child()
            elapsed_s = time.monotonic() - started_s
            if elapsed_s > ready_timeout_s:
                waiting = [a.name for a in self.config.applications if a.name not in bodies]
                raise ServeFailed(f"not ready after {ready_timeout_s:.0f} s: {', '.join(waiting)}")
            dashboard_url = dashboard_url or self._dashboard_url()
            if dashboard_url is None:
                continue
            if ray_s is None:
                ray_s = elapsed_s
                print(f"Ray dashboard: {dashboard_url}", file=out, flush=True)
            self._poll(dashboard_url, bodies)
        for line in self._ready_lines(bodies, ray_s or 0.0, time.monotonic() - started_s):
            print(line, file=out, flush=True)

    def _poll(self, dashboard_url: str, bodies: dict[str, dict[str, Any]]) -> None:
        """Add what `/ready` says of each application that became ready."""
        status = self.status(dashboard_url) or {}
        for app in self.config.applications:
            state, message = status.get(app.name, ("NOT_STARTED", ""))
            if state == "DEPLOY_FAILED":
                raise ServeFailed(f"application {app.name!r}: {message}")
            if app.name in bodies or state not in ("RUNNING", "DEPLOYING"):
                continue
            if app.config is None or app.route_prefix is None:
                if state == "RUNNING" and self._is_routed(app):
                    bodies[app.name] = {}
                continue
            body = fetch_ready(Endpoint.of(self.config).url(app.route_prefix, "/ready"))
            if body is not None:
                bodies[app.name] = body

    def _watch(self) -> None:
        """Return on a signal.

        Raises
        ------
        ServeFailed
            The child, Ray or every application has ended without this process.
        """
        daemons = session_daemons(self._child.pid)
        dashboard_url = self._dashboard_url()
        names = {app.name for app in self.config.applications}
        asked_s, times_gone = time.monotonic(), 0
        while not self._stop.wait(POLL_S):
            self._check_child()
            ended = daemons.keys() - session_daemons(self._child.pid).keys()
            if ended:
                names_ended = ", ".join(sorted(daemons[pid] for pid in ended))
                raise ServeFailed(f"Ray's node has ended: its process {names_ended} is gone")
            if dashboard_url is None or time.monotonic() - asked_s < WATCH_S:
                continue
            asked_s = time.monotonic()
            status = self.status(dashboard_url)
            is_gone = status is not None and not names & status.keys()
            times_gone = times_gone + 1 if is_gone else 0
            if times_gone == WATCH_TIMES:
                gone = ", ".join(sorted(names))
                raise ServeFailed(
                    f"Ray Serve has no application {gone} any more: `serve shutdown`?"
                )

    def _is_routed(self, app: Application) -> bool:
        """Whether a request would find the application: RUNNING speaks of its replicas only, and the
        proxy hears of the route by a way of its own."""
        if app.route_prefix is None or self.config.schema.proxy_location == "Disabled":
            return True
        routes = fetch_ready(Endpoint.of(self.config).url("/", "/-/routes"))
        return routes is not None and app.route_prefix in routes

    def _ready_lines(
        self, bodies: dict[str, dict[str, Any]], ray_s: float, total_s: float
    ) -> Iterator[str]:
        phases = [f"Ray {ray_s:.1f} s", f"Serve and applications {total_s - ray_s:.1f} s"]
        for name, body in bodies.items():
            inside = ", ".join(_phases(body.get("startup")))
            if inside:
                phases.append(f"of these in {name!r}: {inside}")
        yield f"start-up {total_s:.1f} s: {'; '.join(phases)}"
        yield from listening_lines(listeners(self._child.pid))
        for app in self.config.applications:
            yield f"ready: {self._try_it(app)}"

    def _try_it(self, app: Application) -> str:
        """A command to paste that streams a chat."""
        if app.config is None or app.route_prefix is None:
            return app.name
        body = {
            "model": app.config.model_name,
            "stream": True,
            "messages": [{"role": "user", "content": "Tell me a story about a lighthouse."}],
        }
        endpoint = Endpoint.of(self.config)
        options = ["-N", "-k"] if endpoint.scheme == "https" else ["-N"]
        url = endpoint.url(app.route_prefix, "/v1/chat/completions")
        header = "content-type: application/json"
        return shlex.join(["curl", *options, url, "-H", header, "-d", json.dumps(body)])

    def _dashboard_url(self) -> str | None:
        match = _DASHBOARD.search(self.log_path.read_text(errors="replace"))
        return match and match[1]

    def _check_child(self) -> None:
        code = self._child.poll()
        if code is not None:
            raise ServeFailed(f"`serve run` ended with exit status {code}")

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _end_child(self) -> None:
        """SIGTERM ends Ray and all its processes within seconds; what is left after `TERMINATE_S` is killed.

        SIGINT would drain first, and Serve keeps an ingress replica for 30 s after its last
        request, so that load balancers notice: nothing that a local run needs. Impatient further
        signals change nothing: SIGKILL would leave Ray's daemons and HAProxy behind, holding the ports.

        Ray gives a daemon one second to end and then kills it, so on a loaded machine its workers may
        outlive the driver. They share the child's session whatever their process groups are.
        """
        if self._child is None:
            return
        self._child.terminate()
        kill_s = time.monotonic() + TERMINATE_S
        while self._child.poll() is None or session_pids(self._child.pid):
            if time.monotonic() >= kill_s:
                self._kill_session()
            time.sleep(POLL_S)

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)  # all there is to do without /proc
        for pid in session_pids(self._child.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def session_pids(session: int) -> list[int]:
    """The processes of a session that have not ended, by Linux' /proc; none are found elsewhere."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name, in parentheses, may contain anything; fields from the third on follow.
            state, _, _, of_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it ended meanwhile
            continue
        if int(of_session) == session and state not in "ZX":
            pids.append(int(stat.parent.name))
    return pids


def listeners(session: int) -> set[tuple[str, int]]:
    """Address and TCP port of all that a session's processes listen on, by Linux' /proc; none are found elsewhere."""
    sockets = set()
    for pid in session_pids(session):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(link))
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *rest = line.split()
            if state == _LISTENS and f"socket:[{rest[5]}]" in sockets:
                address, _, port = local.partition(":")
                found.add((_address(address), int(port, 16)))
    return found


def _address(digits: str) -> str:
    """The kernel writes an address as words of 32 bits in the machine's byte order."""
    words = (int(digits[i : i + 8], 16) for i in range(0, len(digits), 8))
    ip = ipaddress.ip_address(b"".join(socket.htonl(word).to_bytes(4, "big") for word in words))
    return str(getattr(ip, "ipv4_mapped", None) or ip)


def listening_lines(found: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Which ports are open to whom, for the user."""
    ports: dict[str, set[int]] = {}
    for address, port in sorted(found):
        ip = ipaddress.ip_address(address)
        if ip.is_loopback:
            who = "this machine only"
        elif ip.is_unspecified:
            who = "every machine that reaches this one"
        else:
            who = f"every machine that reaches {address}"
        ports.setdefault(who, set()).add(port)
    for who in sorted(ports):
        yield f"listens for {who}: {', '.join(map(str, sorted(ports[who])))}"


def session_daemons(session: int) -> dict[int, str]:
    """Names of Ray's daemons in a session, by process id."""
    found = {}
    for pid in session_pids(session):
        with contextlib.suppress(OSError):  # it ended meanwhile
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if name in RAY_DAEMONS:
                found[pid] = name
    return found


def serve_command(path: Path) -> list[str]:
    """`serve run` in this interpreter's environment.

    `--address local` starts a Ray of its own even where another one runs on the machine.
    """
    return [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", str(path)]


def _phases(startup: Any) -> Iterator[str]:
    """Flatten `{"load_s": 0.3, "replica": {"warm_up_s": 1.2}}` to `load 0.3 s`, `replica warm up "
    "1.2 s`."""
    if not isinstance(startup, dict):
        return
    for name, value in startup.items():
        if isinstance(value, dict):
            yield from (f"{name} {phase}" for phase in _phases(value))
        elif isinstance(value, int | float):
            yield f"{name.removesuffix('_s').replace('_', ' ')} {value:.1f} s"

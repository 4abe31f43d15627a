"""`quire serve`: run a Serve config on a new local Ray cluster and watch it.

Ray's `serve run` does the work in a child process. It does not end when a deployment fails, and it writes everything to
the terminal. So its output goes to a log file, and this module watches the child process, Ray's status API and `/ready`
of each Quire application (for other applications, the proxy's routes):

    start child ──▶ dashboard URL in log ──▶ status API, /ready ──▶ "ready" ──▶ signal, exit 0
         │                   │                       │                 │
         └── child ended ────┴── timeout ────────────┴─ DEPLOY_FAILED ─┴──▶ reason or log's tail, exit 1
                                                                       │
                                    Ray's daemon ended, `serve shutdown`
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ray._private.resource_and_label_spec import ResourceAndLabelSpec

from quire.cluster.config.config_problems import ConfigError, Problem
from quire.cluster.config.resources import device_of, lacking, reservations
from quire.cluster.config.serve_config import Application, ServeConfig
from quire.cluster.local import start_report
from quire.cluster.local.ports import Endpoint, listeners
from quire.cluster.local.process_session import (
    is_in_session,
    ray_session,
    session_daemons,
    session_pids,
)
from quire.cluster.local.serve_api import ApplicationStatus, application_status, fetch_ready
from quire.replica.node_pool.pool_file import remove_pools
from quire.replica.serving.final_errors import reason_of

LOG_TAIL_LINES = 40
POLL_S = 0.25
TERMINATE_S = 15.0
# Interval of the calls to Ray's API once all is ready, and the number of calls in a row that must report every
# application as gone.
WATCH_S = 2.0
WATCH_TIMES = 2

# Ray's setting for a cluster of one node: the node has the loopback address, and Ray's servers listen there. The Ray
# that `serve_command` starts is for this machine only.
_LOOPBACK_NODE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_DASHBOARD = re.compile(r"View the dashboard at \W*(?:\x1b\[\d+m)*(https?://[^\s\x1b]+)")


class ServeFailed(Exception):
    """The cluster cannot become ready, or it ended; the message says why.

    Parameters
    ----------
    is_clear
        Whether the message is the complete reason, so that the log's tail is not needed.
    """

    def __init__(self, message: str, *, is_clear: bool = False):
        super().__init__(message)
        self.is_clear = is_clear


def check_room(config: ServeConfig) -> None:
    """Refuse applications that need more GPUs, cores or memory than this machine has, before Ray starts.

    Raises
    ------
    ConfigError
        Lists each application that cannot be placed.
    """
    spec = ResourceAndLabelSpec()
    # The resources that `ray.init` will detect.
    machine = spec.resolve(is_head=True, node_ip_address="127.0.0.1").to_resource_dict()
    problems = []
    for app in config.applications:
        if app.config is not None:
            device = device_of(app.config, [machine])
            if lack := lacking(reservations(app.config, device), [machine]):
                problems.append(Problem(app.name, f"{lack}; `quire serve` runs on this machine"))
    if problems:
        raise ConfigError(problems)


@dataclass(slots=True)
class LocalServe:
    """One `serve run` child process, from its start to its end.

    Parameters
    ----------
    config
        The checked config that it runs.
    command
        The child's command line.
    log_path
        File for the child's output.
    status
        Maps the dashboard's URL to each application's status and message, or to None while Ray's API does not answer.
    """

    config: ServeConfig
    command: list[str]
    log_path: Path
    status: Callable[[str], dict[str, ApplicationStatus] | None] = application_status
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False)
    # Ray's name, once all is ready; when a daemon of Ray has ended, no process may be left to ask.
    _ray_session: str | None = field(default=None, init=False)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)

    def run(self, out: TextIO, ready_timeout_s: float) -> int:
        """Serve until SIGINT or SIGTERM.

        Parameters
        ----------
        out
            Stream for the lines that the user sees.
        ready_timeout_s
            Seconds from the start after which an application that is not ready counts as failed.

        Returns
        -------
        Exit status: 0 after a signal, 1 if the cluster failed.
        """
        # Set the handlers before starting the child. A shell starts background jobs with SIGINT ignored, and the
        # child would inherit that.
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
            if not error.is_clear:
                print(self._log_tail(), file=out)
            print(f"failed: {error}", file=out, flush=True)
            print(f"the whole log is {self.log_path}", file=out, flush=True)
            return 1
        finally:
            self._end_child()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self) -> None:
        with self.log_path.open("wb") as log:
            # A new session, so that Ctrl-C reaches only this process, which then stops the child in order.
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_LOOPBACK_NODE | os.environ,
                start_new_session=True,
            )

    @property
    def _serve_run(self) -> subprocess.Popen[bytes]:
        """The child; `_start` has started it."""
        assert self._child is not None
        return self._child

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop.set()

    def _until_ready(self, out: TextIO, ready_timeout_s: float) -> None:
        """Return when every application is ready or a signal has arrived."""
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
                for line in start_report.dashboard_lines(dashboard_url):
                    print(line, file=out, flush=True)
            self._poll(dashboard_url, bodies)
        seconds = {"Ray": ray_s or 0.0, "total": time.monotonic() - started_s}
        found = listeners(session_pids(self._serve_run.pid))
        for line in start_report.ready_lines(self.config, bodies, seconds, found):
            print(line, file=out, flush=True)

    def _poll(self, dashboard_url: str, bodies: dict[str, dict[str, Any]]) -> None:
        """Add the body of `/ready` for each application that is ready now."""
        status = self.status(dashboard_url) or {}
        for app in self.config.applications:
            told = status.get(app.name, ApplicationStatus("NOT_STARTED"))
            if told.state == "DEPLOY_FAILED":
                raise _deploy_failure(app, told.message)
            if app.name in bodies or told.state not in ("RUNNING", "DEPLOYING"):
                continue
            if app.config is None or app.route_prefix is None:
                if told.state == "RUNNING" and self._is_routed(app):
                    bodies[app.name] = {}
                continue
            # Ask only if a router runs: without a router, Ray's proxy would hold the request.
            if told.has_router:
                body = fetch_ready(Endpoint.of(self.config).url(app.route_prefix, "/ready"))
                if body is not None:
                    bodies[app.name] = body

    def _watch(self) -> None:
        """Return on a signal.

        Raises
        ------
        ServeFailed
            The child, Ray or every application has ended, although this process did not stop it.
        """
        self._ray_session = ray_session(self._serve_run.pid)
        daemons = session_daemons(self._serve_run.pid)
        dashboard_url = self._dashboard_url()
        names = {app.name for app in self.config.applications}
        asked_s, times_gone = time.monotonic(), 0
        while not self._stop.wait(POLL_S):
            self._check_child()
            session = self._serve_run.pid
            ended = {name for pid, name in daemons.items() if not is_in_session(pid, session)}
            if ended:
                raise ServeFailed(
                    f"Ray's node has ended: its process {', '.join(sorted(ended))} is gone"
                )
            if dashboard_url is None or time.monotonic() - asked_s < WATCH_S:
                continue
            asked_s = time.monotonic()
            status = self.status(dashboard_url)
            is_gone = status is not None and not names & status.keys()
            times_gone = times_gone + 1 if is_gone else 0
            if times_gone == WATCH_TIMES:
                gone = ", ".join(sorted(names))
                raise ServeFailed(
                    f"Ray Serve no longer has the application {gone}; was it removed with `serve shutdown`?"
                )

    def _is_routed(self, app: Application) -> bool:
        """Whether the proxy routes requests to the application.

        The state RUNNING describes replicas only; the proxy learns of routes separately.
        """
        if app.route_prefix is None or self.config.schema.proxy_location == "Disabled":
            return True
        routes = fetch_ready(Endpoint.of(self.config).url("/", "/-/routes"))
        return routes is not None and app.route_prefix in routes

    def _dashboard_url(self) -> str | None:
        match = _DASHBOARD.search(self.log_path.read_text(errors="replace"))
        return match and match[1]

    def _check_child(self) -> None:
        code = self._serve_run.poll()
        if code is not None:
            raise ServeFailed(f"`serve run` ended with exit status {code}")

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def _end_child(self) -> None:
        """End the child and its session: SIGTERM first, and SIGKILL after `TERMINATE_S`.

        SIGTERM ends Ray and its processes within seconds. SIGINT would drain first: Serve keeps an ingress replica for
        30 s after its last request, so that load balancers notice its end. A local run does not need this. Further
        signals from the user change nothing, because an early SIGKILL would leave Ray's daemons and HAProxy on the
        ports.

        Ray gives a daemon one second to end and then kills it, so on a loaded machine workers may run longer than the
        child. This method waits for them too, because all of them are in the child's session. Ray ends replicas without
        calling their destructors, so the files of their pools are removed here.
        """
        child = self._child
        if child is None:
            return
        ray_name = self._ray_session or ray_session(child.pid)
        child.terminate()
        kill_s = time.monotonic() + TERMINATE_S
        while child.poll() is None or session_pids(child.pid):
            if time.monotonic() >= kill_s:
                _kill_session(child.pid)
            time.sleep(POLL_S)
        if ray_name is not None:
            remove_pools(ray_name)


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for pid in session_pids(leader):
        # Without /proc only the process group can be killed.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _deploy_failure(app: Application, message: str) -> ServeFailed:
    """Make the error of a failed deployment: Quire's reason alone if there is one, otherwise Serve's whole message."""
    reason = reason_of(message)
    return ServeFailed(f"application {app.name!r}: {reason or message}", is_clear=bool(reason))


def serve_command(path: Path) -> list[str]:
    """The command line of `serve run` in this interpreter's environment.

    `--address local` starts a new Ray even if another one runs on the machine.
    """
    return [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", str(path)]

"""`quire` as a user runs it: real processes, real exit statuses."""

from __future__ import annotations

import io
import itertools
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire.cluster.config import serve_config
from quire.cluster.config.config_problems import ConfigError
from quire.cluster.config.default_config import APP_IMPORT_PATH
from quire.cluster.local import local_serve, ports, process_session, serve_api, start_report
from quire.cluster.local.serve_api import ApplicationStatus
from quire.replica.node_pool.node_pool import open_node_pool
from quire.replica.node_pool.pool_file import pool_name, remove_pools
from quire.replica.node_pool.pool_layout import PoolLayout

ROOT = Path(__file__).parents[2]
QUIRE = [sys.executable, "-m", "quire.cluster.cli"]


def quire(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*QUIRE, *arguments], capture_output=True, text=True, timeout=120, **options
    )


# --------------------------------------------------------------------------------------------------
# config, --version
# --------------------------------------------------------------------------------------------------


def test_version_is_the_distributions():
    result = quire("--version")
    assert result.stdout == "quire 0.1.0\n"
    assert result.returncode == 0


def test_check_prints_one_line_for_each_application():
    result = quire("config", "check", str(ROOT / "cluster.yaml"))
    assert result.returncode == 0, result.stderr
    expected = "quire: /: model embedded on auto, 2 replicas, 2 routers\n"
    assert result.stdout == expected


def test_check_prints_every_problem_and_fails(tmp_path):
    text = (ROOT / "cluster.yaml").read_text()
    path = tmp_path / "cluster.yaml"
    path.write_text(text.replace("model: embedded", "modle: x").replace("port: 8000", "prot: 1"))
    result = quire("config", "check", str(path))
    assert result.returncode == 1
    assert result.stdout == ""
    assert "http_options.prot: unknown key; did you mean 'port'?" in result.stderr
    assert "applications[0].args.modle: unknown key; did you mean 'model'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_check_looks_into_a_folder_that_is_here(tmp_path):
    (tmp_path / "model").mkdir()
    path = tmp_path / "cluster.yaml"
    path.write_text(
        (ROOT / "cluster.yaml").read_text().replace("model: embedded", "model: ~/model")
    )
    home = {**os.environ, "HOME": str(tmp_path)}
    result = quire("config", "check", str(path), env=home)
    assert result.returncode == 1
    assert f"quire: model: {tmp_path}/model is no checkpoint folder" in result.stderr
    (tmp_path / "model" / "config.json").write_text("{}")
    assert quire("config", "check", str(path), env=home).returncode == 0
    path.write_text(path.read_text().replace("~/model", "./elsewhere"))
    result = quire("config", "check", str(path), env=home, cwd=tmp_path)
    assert result.returncode == 0  # it may be on the cluster's nodes
    assert f"there is no folder {tmp_path}/elsewhere on this machine" in result.stdout


def test_check_names_an_application_that_is_not_quires(tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("applications: [{name: other, import_path: 'a.b:c'}]")
    result = quire("config", "check", str(path))
    assert result.stdout == "other: /: a.b:c (arguments not checked)\n"


def test_check_of_a_missing_file_fails(tmp_path):
    result = quire("config", "check", str(tmp_path / "none.yaml"))
    assert result.returncode == 1
    assert "none.yaml: cannot be read" in result.stderr


def test_schema_is_a_json_schema():
    result = quire("config", "schema")
    schema = json.loads(result.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["replicas"]["default"] == 2
    assert result.returncode == 0


def test_schema_loads_neither_ray_nor_torch():
    code = (
        "import sys; from quire.cluster.cli import main; main(['config', 'schema']); "
        "sys.exit(sorted(sys.modules.keys() & {'ray', 'torch', 'transformers'}) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_schema_into_a_closed_pipe_is_quiet():
    command = f"{shlex.join([*QUIRE, 'config', 'schema'])} | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("{\n", "")


@pytest.mark.parametrize("arguments", [[], ["config"], ["sing"], ["serve", "a", "b"]])
def test_a_wrong_command_line_exits_with_2(arguments: list[str]):
    result = quire(*arguments)
    assert result.returncode == 2
    assert "usage: quire" in result.stderr


# --------------------------------------------------------------------------------------------------
# serve: the parts
# --------------------------------------------------------------------------------------------------


def test_reflection_is_refused_next_to_keys(tmp_path):
    text = (ROOT / "cluster.yaml").read_text()
    with_keys = text.replace("args:\n", "args:\n      auth: {key_file: /keys.json}\n")
    path = tmp_path / "keys.yaml"
    path.write_text(with_keys)
    result = quire("config", "check", str(path))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "grpc_options.enable_reflection: must be false, because 'quire' has the section auth and reflection needs no "
        "key\n"
    )
    path.write_text(with_keys.replace("enable_reflection: true", "enable_reflection: false"))
    assert quire("config", "check", str(path)).returncode == 0


def checked(
    http_port: int = 8000,
    grpc_port: int = 9000,
    controller_options: dict[str, Any] | None = None,
    auth: dict[str, Any] | None = None,
    tls: dict[str, Any] | None = None,
    **http: Any,
) -> serve_config.ServeConfig:
    return serve_config.check(
        {
            "controller_options": controller_options,
            "http_options": {"host": "127.0.0.1", "port": http_port, **http},
            "grpc_options": {
                "port": grpc_port,
                "grpc_servicer_functions": ["a.b"],
                "enable_reflection": auth is None,
            },
            "applications": [
                {
                    "name": "one",
                    "route_prefix": "/one",
                    "import_path": APP_IMPORT_PATH,
                    "args": {"served_model_name": "it's", "auth": auth, "tls": tls},
                }
            ],
        }
    )


def test_free_ports_are_none_that_the_kernel_hands_out():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = ports.free_ports(50)
    assert len(set(found)) == 50
    assert not [port for port in found if low <= port <= high]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", found[0]))
        taken.listen()
        # All 12 768 are asked for a thousand at a time; the one that is taken never comes.
        assert found[0] not in {p for _ in range(30) for p in ports.free_ports(900)}


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_a_port_in_use_is_refused_by_name(free_ports, which: int):
    tls_name = r"applications\[0\].args.tls."
    names = (
        "http_options.port",
        "grpc_options.port",
        f"{tls_name}http_port",
        f"{tls_name}grpc_port",
    )
    name, plain, of_tls = names[which], free_ports[:2], ports.free_ports(2)
    tls = dict(zip(("http_port", "grpc_port"), of_tls, strict=True)) | {"host": "127.0.0.1"}
    tls |= {"certificate_file": "tls.crt", "key_file": "tls.key"}
    config = checked(*plain, tls=tls)
    ports.check_ports(config)
    with socket.socket() as holder:
        taken = [*plain, *of_tls][which]
        holder.bind(("127.0.0.1", taken))
        holder.listen()
        with pytest.raises(ConfigError, match=rf"{name}: .*port {taken}: .*in use"):
            ports.check_ports(config)


HAPROXY_PORTS = ("HAPROXY_STATS", "HAPROXY_METRICS", "FALLBACK_PROXY_HTTP", "FALLBACK_PROXY_GRPC")


@pytest.mark.parametrize("name", HAPROXY_PORTS)
def test_what_else_listens_in_haproxy_mode_needs_free_ports(free_ports, name: str):
    with socket.create_server(("127.0.0.1", 0)) as holder, socket.create_server(("", 0)) as other:
        spare = other.getsockname()[1]
        other.close()
        env_vars = {f"RAY_SERVE_{n}_PORT": str(spare) for n in HAPROXY_PORTS}
        env_vars[f"RAY_SERVE_{name}_PORT"] = str(holder.getsockname()[1])
        options = {"runtime_env": {"env_vars": env_vars}}
        ports.check_ports(checked(*free_ports, controller_options=options))
        env_vars["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
        with pytest.raises(ConfigError, match=rf"env_vars\.RAY_SERVE_{name}_PORT: cannot"):
            ports.check_ports(checked(*free_ports, controller_options=options))


def test_a_port_that_another_clusters_proxy_shares_is_refused(free_ports):
    """Ray's proxies would listen on it together."""
    with socket.socket() as theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        theirs.bind(("127.0.0.1", 0))
        theirs.listen()
        env_vars = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
        for name, port in zip(HAPROXY_PORTS, ports.free_ports(4), strict=True):
            env_vars[f"RAY_SERVE_{name}_PORT"] = str(port)
        config = checked(*free_ports, controller_options={"runtime_env": {"env_vars": env_vars}})
        ports.check_ports(config)
        env_vars["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] = str(theirs.getsockname()[1])
        with pytest.raises(ConfigError, match=r"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT: .*in use"):
            ports.check_ports(config)


@pytest.mark.parametrize(
    ("host", "prefix", "url"),
    [
        ("0.0.0.0", "/", "http://127.0.0.1:8000/ready"),
        ("10.1.2.3", "/one", "http://10.1.2.3:8000/one/ready"),
        ("::", "/", "http://[::1]:8000/ready"),
    ],
)
def test_urls_are_of_this_machine(host: str, prefix: str, url: str):
    assert ports.Endpoint.of(checked(host=host)).url(prefix, "/ready") == url


def test_ray_token_is_found_by_rays_rules(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert serve_api.ray_auth_header({}) == {}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("home\n")
    (tmp_path / "other").write_text("path")
    assert serve_api.ray_auth_header({}) == {"Authorization": "Bearer home"}
    environ = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "other")}
    assert serve_api.ray_auth_header(environ) == {"Authorization": "Bearer path"}
    environ["RAY_AUTH_TOKEN"] = "own"
    assert serve_api.ray_auth_header(environ) == {"Authorization": "Bearer own"}


# --------------------------------------------------------------------------------------------------
# serve: one LocalServe, its child and its cluster played by the test
# --------------------------------------------------------------------------------------------------


class Ready(BaseHTTPRequestHandler):
    """The server's `path`: 503 at first, then its `body`."""

    def do_GET(self):
        self.server.asked += 1
        found = self.path == self.server.path and self.server.asked > 2
        found |= self.path == "/one/metrics"
        self.send_response(200 if found else 503)
        self.end_headers()
        self.wfile.write(json.dumps(self.server.body).encode() if found else b"no")

    def log_message(self, *arguments):
        pass


ENGINE = {
    "model": "it's",
    "dtype": "bfloat16",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 8192,
    "kv_cache_tokens": 43_680,
    "request_tokens": 2048,
    "concurrent_requests": 21,
}


@pytest.fixture
def ready_server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        server.asked, server.path = 0, "/one/ready"
        server.body = {"startup": {"load": 0.25, "warm_up": 1.5}, "engine": ENGINE}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


RUNNING = ApplicationStatus("RUNNING", has_router=True)
DASHBOARD_LINE = (
    "print('View the dashboard at \\x1b[1m\\x1b[32mhttp://127.0.0.1:1 \\x1b[39m', flush=True)"
)
# Some seconds on an idle machine; less than the sleeper sleeps.
NOTICED_S = 40.0
SLEEPER = f"import time; {DASHBOARD_LINE}; time.sleep(60)"
STUBBORN = (
    f"import signal, time; signal.signal(15, signal.SIG_IGN); {DASHBOARD_LINE}; time.sleep(60)"
)


def served(
    tmp_path: Path,
    code: str,
    config: serve_config.ServeConfig,
    state: ApplicationStatus,
    ready_timeout_s: float = 20.0,
) -> tuple[int, str, local_serve.LocalServe]:
    """Run a child with `code`, signalling SIGINT to this process once "ready" is printed."""

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("ready:"):
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    out = Out()
    command = [sys.executable, "-c", code]
    server = local_serve.LocalServe(
        config, command, tmp_path / "serve.log", status=lambda url: {"one": state}
    )
    status = server.run(out, ready_timeout_s)
    assert server._child.poll() is not None, "the child outlived the command"
    return status, out.getvalue(), server


def test_ready_prints_what_matters_and_a_command_to_paste(tmp_path, ready_server, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    config = checked(ready_server.server_port)
    before = signal.getsignal(signal.SIGINT)
    status, out, server = served(tmp_path, SLEEPER, config, RUNNING)
    assert status == 0
    assert server._child.returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before
    lines = out.splitlines()
    assert lines[1] == "Ray dashboard: http://127.0.0.1:1"
    assert "`ray get-auth-token`" in lines[2] and "RAY_AUTH_MODE=token" in lines[2]
    assert lines[3].startswith("start-up ")
    assert lines[3].endswith("of these in 'one': load 0.2 s, warm up 1.5 s")
    assert lines[4] == (
        "one: 2 x model it's, bfloat16 on cpu with 1 thread; KV cache 43,680 tokens: 21 requests of 2,048 tokens at a "
        "time; a request may have 8,192 tokens"
    )
    metrics = f"metrics: http://127.0.0.1:{ready_server.server_port}/one/metrics"
    assert metrics in lines
    command = shlex.split(lines[-2].removeprefix("ready: "))
    assert command[:2] == ["curl", "-N"]
    assert command[2] == f"http://127.0.0.1:{ready_server.server_port}/one/v1/chat/completions"
    body = json.loads(command[-1])
    assert (body["model"], body["stream"]) == ("it's", True)
    assert ready_server.asked >= 3


def test_the_request_to_paste_has_a_place_for_the_key(free_ports):
    config = checked(free_ports[0], auth={"key_file": "/keys.json"})
    times = {"Ray": 1.0, "total": 2.0}
    *_, line = start_report.ready_lines(config, {}, times, [])
    assert "authorization: Bearer KEY" in shlex.split(line)


def watched(
    tmp_path: Path,
    code: str,
    port: int,
    after: dict[str, ApplicationStatus] | None,
    on_ready: Callable[[], None] = lambda: None,
) -> tuple[int, str, float]:
    """Exit status, output, and the seconds from "ready"; `after` is the status of all applications from then on."""
    ready_s = []

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("ready:"):
                ready_s.append(time.monotonic())
                on_ready()
            return super().write(text)

    def status(url: str) -> dict[str, ApplicationStatus] | None:
        return after if ready_s else {"one": RUNNING}

    out = Out()
    server = local_serve.LocalServe(
        checked(port), [sys.executable, "-c", code], tmp_path / "serve.log", status=status
    )
    code = server.run(out, 20)
    return code, out.getvalue(), time.monotonic() - ready_s[0]


def test_a_shutdown_by_another_command_ends_it(tmp_path, ready_server):
    code, out, seconds = watched(tmp_path, SLEEPER, ready_server.server_port, {})
    assert code == 1
    assert (
        "failed: Ray Serve no longer has the application one; was it removed with `serve shutdown`?"
        in out
    )
    assert seconds < NOTICED_S


@pytest.mark.parametrize("state", [None, "DEPLOYING", "UNHEALTHY"])
def test_an_api_that_does_not_answer_and_an_update_do_not(
    tmp_path, ready_server, monkeypatch, state
):
    after = state and {"one": ApplicationStatus(state)}
    monkeypatch.setattr(local_serve, "WATCH_S", 0.01)
    timer = threading.Timer(2, signal.raise_signal, (signal.SIGINT,))
    code, _, seconds = watched(tmp_path, SLEEPER, ready_server.server_port, after, timer.start)
    timer.join()
    assert code == 0 and seconds > 1


def test_the_end_of_rays_node_ends_it(tmp_path, ready_server, monkeypatch):
    """The driver and the dashboard stay. The raylet ends once it has been seen, however long the start takes."""

    def ended_daemons(leader: int) -> dict[int, str]:
        daemons = process_session.session_daemons(leader)
        for pid in daemons:
            os.kill(pid, signal.SIGKILL)
        return daemons

    monkeypatch.setattr(local_serve, "session_daemons", ended_daemons)
    monkeypatch.setattr(local_serve, "TERMINATE_S", 1.0)
    (tmp_path / "raylet").symlink_to("/bin/sleep")
    node = f"import subprocess; subprocess.Popen([{str(tmp_path / 'raylet')!r}, '60']); {SLEEPER}"
    running = {"one": RUNNING}
    code, out, seconds = watched(tmp_path, node, ready_server.server_port, running)
    assert code == 1
    assert "failed: Ray's node has ended: its process raylet is gone" in out
    assert seconds < NOTICED_S


def test_what_listens_is_said_with_who_can_reach_it():
    loopback = [("127.0.0.1", 8000), ("::1", 9)]
    others = [("0.0.0.0", 9000), ("::", 9000), ("::", 7), ("10.0.0.7", 8), ("127.0.0.1", 9000)]
    assert list(ports.listening_lines([*loopback, *others])) == [
        "listens for every machine that reaches 10.0.0.7: 8",
        "listens for every machine that reaches this one: 7, 9000",
        "listens for this machine only: 9, 8000, 9000",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_listeners_are_those_of_the_session(host: str):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        assert (host, port) in ports.listeners(process_session.session_pids(os.getsid(0)))
    assert (host, port) not in ports.listeners(process_session.session_pids(os.getsid(0)))


def test_a_child_that_ignores_sigterm_is_killed(tmp_path, ready_server, monkeypatch):
    monkeypatch.setattr(local_serve, "TERMINATE_S", 0.5)
    config = checked(ready_server.server_port)
    status, _, server = served(tmp_path, STUBBORN, config, RUNNING)
    assert status == 0
    assert server._child.returncode == -signal.SIGKILL


def test_the_pools_of_its_replicas_are_removed(tmp_path, ready_server, monkeypatch):
    """Ray kills a replica, whose pool would outlive it. The child's command line names a session of Ray's."""
    monkeypatch.setattr(local_serve, "remove_pools", partial(remove_pools, folder=tmp_path))
    monkeypatch.setattr(local_serve, "TERMINATE_S", 1.0)
    name = pool_name("session_2026-11-28_1_2", "one", "node")
    pool = open_node_pool(name, PoolLayout(4, 512), folder=tmp_path)
    pool._file.close(remove=False)
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep(60)', '--session-name=session_2026-11-28_1_2']); {SLEEPER}"
    )
    assert pool.path.exists()
    status, _, _ = served(tmp_path, code, checked(ready_server.server_port), RUNNING)
    assert status == 0 and not pool.path.exists()


def test_what_the_child_leaves_behind_is_killed(tmp_path, ready_server, monkeypatch):
    """A daemon in a process group of its own that does not end with the child: as a Ray worker may."""
    monkeypatch.setattr(local_serve, "TERMINATE_S", 1.0)
    daemon = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    code = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {daemon!r}], "
        f"process_group=0); {SLEEPER}"
    )
    config = checked(ready_server.server_port)
    status, _, server = served(tmp_path, code, config, RUNNING)
    assert (status, server._child.returncode) == (0, -signal.SIGTERM)
    assert process_session.session_pids(server._child.pid) == []


@pytest.mark.parametrize("prefix", ["/one", "/two"])
def test_an_application_of_somebody_else_is_ready_once_the_proxy_has_its_route(
    tmp_path, ready_server, prefix: str
):
    ready_server.path, ready_server.body = "/-/routes", {"/one": "one"}
    config = serve_config.check(
        {
            "http_options": {"host": "127.0.0.1", "port": ready_server.server_port},
            "applications": [{"name": "one", "route_prefix": prefix, "import_path": "a.b:c"}],
        }
    )
    is_there = prefix == "/one"
    # On a full machine the first answers take seconds.
    limit_s = 60.0 if is_there else 15.0
    status, out, _ = served(tmp_path, SLEEPER, config, RUNNING, limit_s)
    assert (status, "ready: one\n" in out) == ((0, True) if is_there else (1, False))
    assert ready_server.asked >= 3


def test_a_failed_deployment_ends_it_with_the_reason_and_the_logs_tail(tmp_path):
    state = ApplicationStatus("DEPLOY_FAILED", "no such folder: /models/x")
    status, out, _ = served(tmp_path, SLEEPER, checked(), state)
    assert status == 1
    assert "failed: application 'one': no such folder: /models/x" in out
    assert "View the dashboard" in out
    assert "ready:" not in out


def test_a_child_that_ends_is_a_failure(tmp_path):
    code = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit(3)"
    status, out, _ = served(tmp_path, code, checked(), ApplicationStatus("NOT_STARTED"))
    assert status == 1
    assert "failed: `serve run` ended with exit status 3" in out
    assert "\n99\n" in out
    assert "\n59\n" not in out, "only the tail of the log"


@pytest.mark.parametrize("state", ["DEPLOYING", "RUNNING"])
def test_what_is_never_ready_times_out(tmp_path, free_ports, state: str):
    config = checked(free_ports[0])
    status, out, _ = served(
        tmp_path, SLEEPER, config, ApplicationStatus(state), ready_timeout_s=1.5
    )
    assert status == 1
    assert "failed: not ready after 2 s: one" in out


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n\r\nnot json", b"\x00\xff" * 9])
def test_an_answer_that_is_not_ready_is_none(answer: bytes):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        threading.Thread(target=reply, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/ready"
        assert serve_api.fetch_ready(url) is None


def test_ready_is_asked_over_tls_where_the_config_has_a_certificate(tmp_path, ready_server):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    options = ["-subj", "/CN=elsewhere", "-days", "1", "-keyout", key, "-out", certificate]
    subprocess.run(
        ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", *options],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    ready_server.socket = context.wrap_socket(ready_server.socket, server_side=True)
    config = checked(ready_server.server_port, ssl_certfile=str(certificate), ssl_keyfile=str(key))
    status, out, _ = served(tmp_path, SLEEPER, config, RUNNING)
    assert status == 0
    assert f"curl -N -k https://127.0.0.1:{ready_server.server_port}/one/v1" in out


def test_a_start_that_cannot_succeed_ends_before_ray_starts(tmp_path):
    text = (ROOT / "cluster.yaml").read_text()
    path = tmp_path / "cluster.yaml"
    wrong = {
        "model: ./nope": f"model: there is no folder {tmp_path}/nope",
        "model: embedded\n      replica_resources: {num_cpus: 4000}": "a replica needs 4000 CPU",
    }
    for model, said in wrong.items():
        path.write_text(text.replace("model: embedded", model))
        result = quire("serve", str(path), cwd=tmp_path)
        assert (result.returncode, result.stdout) == (1, "")
        assert said in result.stderr
    result = quire("serve", "nope", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"there is no folder {tmp_path}/nope, nor is it 'embedded'" in result.stderr


def test_a_file_takes_no_options_of_a_model(tmp_path):
    result = quire("serve", str(ROOT / "cluster.yaml"), "--port", "1", "--set", "a=1")
    assert result.returncode == 1
    assert "--port, --set: only allowed with a MODEL" in result.stderr


def test_show_prints_a_config_that_passes_the_check(tmp_path):
    result = quire("config", "show", "embedded", "--replicas", "3")
    assert result.returncode == 0
    path = tmp_path / "mine.yaml"
    path.write_text(result.stdout)
    result = quire("config", "check", str(path))
    assert result.stdout == "quire: /: model embedded on auto, 3 replicas, 1 routers\n"


def test_nothing_is_asked_of_an_application_without_a_router(tmp_path, ready_server):
    """Ray's proxy would keep each request until there is one, and log that the client has gone."""
    config = checked(ready_server.server_port)
    state = ApplicationStatus("DEPLOYING")
    status, _, _ = served(tmp_path, SLEEPER, config, state, ready_timeout_s=1.5)
    assert (status, ready_server.asked) == (1, 0)


def test_a_reason_of_ours_is_all_that_is_printed(tmp_path):
    message = (
        "Failed to update ['Replica'].\nTraceback\nx.CannotStart: replica on node 'n': no room"
    )
    state = ApplicationStatus("DEPLOY_FAILED", message)
    status, out, _ = served(tmp_path, SLEEPER, checked(), state)
    assert status == 1
    assert "failed: application 'one': replica on node 'n': no room\n" in out
    assert "Traceback" not in out and "View the dashboard" not in out


# --------------------------------------------------------------------------------------------------
# serve: with Ray
# --------------------------------------------------------------------------------------------------

TINY_APP = """
import os
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Tiny:
    def __call__(self, request):
        return {"pid": os.getpid(), "nice": os.nice(0)}

app = Tiny.bind()

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Broken:
    def __init__(self):
        raise RuntimeError("the model has no weights")

broken = Broken.bind()
"""


def tiny_config(tmp_path: Path, ports: tuple[int, int], attribute: str) -> Path:
    (tmp_path / "tiny_app.py").write_text(TINY_APP)
    path = tmp_path / "tiny.yaml"
    config = {
        "http_options": {"host": "127.0.0.1", "port": ports[0]},
        "grpc_options": {"port": ports[1]},
        "applications": [
            {
                "name": "tiny",
                "import_path": f"tiny_app:{attribute}",
                "runtime_env": {"env_vars": {"RAY_worker_niceness": "0"}},
            }
        ],
    }
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


@pytest.mark.system
def test_serve_runs_an_application_until_sigterm(tmp_path, free_ports, ray_environment):
    path = tiny_config(tmp_path, free_ports, "app")
    log = tmp_path / "serve.log"
    # Alone it takes 16 s on two cores, beside 24 busy processes up to 112 s.
    options = ["--log-file", str(log), "--ready-timeout-s", "220"]
    process = subprocess.Popen(
        [*QUIRE, "serve", str(path), *options],
        cwd=tmp_path,
        env=ray_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        lines = iter(process.stdout.readline, "")
        printed = list(itertools.takewhile(lambda line: line != "ready: tiny\n", lines))
        assert process.poll() is None, "".join(printed)
        with urllib.request.urlopen(f"http://127.0.0.1:{free_ports[0]}/", timeout=30) as response:
            answer = json.load(response)
        assert answer["nice"] == os.nice(0), "workers run at this process' niceness"
        session = os.getsid(answer["pid"])
        assert session != os.getsid(process.pid)
        assert answer["pid"] in process_session.session_pids(session)
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "stopping\n"), log.read_text()
    assert process_session.session_pids(session) == [], "nothing outlives the command"


@pytest.mark.system
def test_serve_ends_when_a_deployment_fails(tmp_path, free_ports, ray_environment):
    path = tiny_config(tmp_path, free_ports, "broken")
    result = quire("serve", str(path), cwd=tmp_path, env=ray_environment)
    assert result.returncode == 1
    assert "failed: application 'tiny'" in result.stdout
    assert "the model has no weights" in result.stdout

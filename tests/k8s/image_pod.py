"""Runs inside an image's root as the pod's user: starts Ray as KubeRay does, deploys, and asks every port and probe.

Started by `image_start.py` as `python -c`, because the root is read-only. Standard input: a JSON object with the
manifest's facts. The last line of the output: what was found, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 420.0


def get(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if ":8265" in url:
        headers["Authorization"] = f"Bearer {os.environ['RAY_AUTH_TOKEN']}"
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as response:
        found: bytes = response.read()
    return found


def wait(what: str, is_so: Callable[[], Any], ray: subprocess.Popen[bytes]) -> float:
    """Wait until `is_so` returns something true; return the seconds. The end of `ray start` is an error."""
    began, last = time.monotonic(), ""
    while True:
        if ray.poll() is not None:
            raise RuntimeError(
                f"{what}: `ray start` ended with status {ray.returncode}; {last[-2000:]}"
            )
        try:
            if is_so():
                return time.monotonic() - began
        except urllib.error.HTTPError as error:
            last = error.read().decode()
        except OSError as error:
            last = str(error)
        if time.monotonic() - began > READY_TIMEOUT_S:
            raise TimeoutError(f"{what}: {last[-2000:]}")
        time.sleep(1)


def is_written(path: str) -> bool:
    try:
        with open(path, "w"):
            return True
    except OSError:
        return False


def grpc_health(port: int) -> int:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(service="quire.v1.Generation"), timeout=10)
    return int(reply.status)


def main() -> None:
    given = json.load(sys.stdin)
    found: dict[str, Any] = {
        "uid": os.getuid(),
        "groups": os.getgroups(),
        "written": [
            path for path in ("/x", "/usr/local/x", "/etc/x", "/var/x") if is_written(path)
        ],
        "capabilities": next(
            line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")
        ),
        "seconds": {},
    }
    help_text = subprocess.run(given["command"], capture_output=True, text=True, check=True).stdout
    found["help"] = help_text.splitlines()[0]
    ray = subprocess.Popen(
        given["ray_start"], stdout=sys.stderr, stderr=sys.stderr, stdin=subprocess.DEVNULL
    )
    raylet, ready = given["raylet_url"], given["readiness"]
    found["seconds"]["raylet"] = wait("the raylet's probe", lambda: get(raylet), ray)
    wait("the dashboard", lambda: get("http://127.0.0.1:8265/api/version"), ray)
    url = "http://127.0.0.1:8265/api/serve/applications/"
    # KubeRay tries again too, while Ray's agents start.
    wait("Serve takes its config", lambda: get(url, given["serve_config"], "PUT") is not None, ray)
    found["seconds"]["readiness"] = wait(
        "the readiness probe", lambda: subprocess.run(ready, timeout=30).returncode == 0, ray
    )
    found["seconds"]["ready"] = wait("/ready", lambda: get("http://127.0.0.1:8000/ready"), ray)
    body = {"model": "embedded", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
    answer = json.loads(get("http://127.0.0.1:8000/v1/completions", body))
    found["completion_tokens"] = answer["usage"]["completion_tokens"]
    found["healthz"] = bool(get("http://127.0.0.1:8000/-/healthz"))
    found["grpc_health"] = grpc_health(9000)
    found["metrics"] = get("http://127.0.0.1:8000/metrics").decode().count("\nquire_")
    found["ray_metrics"] = get("http://127.0.0.1:8080/metrics").decode().count("\nray_")
    from quire.kernels.cpu import native_library
    from quire.router import compiled_router

    libraries = {"kernels": native_library, "router": compiled_router}
    found["compiled"] = [name for name, module in libraries.items() if module.load() is not None]
    ray.terminate()
    ray.wait(60)
    print(json.dumps(found))


def print_logs() -> None:
    """Print the ends of Ray's logs, which lie in a volume that ends with this process."""
    logs = Path("/tmp/ray/session_latest/logs")
    for name in ("raylet.err", "raylet.out", "gcs_server.err", "dashboard.err"):
        if (logs / name).exists():
            print(f"-- {name}\n{(logs / name).read_text()[-1500:]}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        print_logs()
        raise

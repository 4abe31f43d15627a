"""Time that a key, its quotas and a line of usage add to a request.

    python -m tests.perf auth_cost [--out FILE]

Requests pass to a service that does nothing: through `HttpDoor` with a key (1,000 keys in the file, both quotas, a
usage log on the disk), the same with neither quotas nor a log, and without a door. The difference of the fastest rounds
is the cost in the event loop, because other programs slow a core down. All times are CPU times. The time of the thread
that makes and writes the lines is added: it does not hold up the loop, but takes the interpreter's lock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

from quire.cluster.auth.access_control import AccessControl
from quire.cluster.auth.access_rules import HTTP_RULES
from quire.cluster.auth.http_door import HttpDoor, service_of_caller
from quire.cluster.auth.key_file import new_key
from quire.cluster.auth.key_ring import KeyRing
from quire.cluster.auth.request_bill import Ledger
from quire.cluster.auth.tenant_counters import TenantCounters
from quire.cluster.auth.usage_log import UsageLog
from quire.cluster.bench.results import report
from quire.cluster.http.http_api import build_app
from quire.router.bill import BilledAnswer
from quire.router.types import GenerationRequest

KEYS, REQUESTS, ROUNDS = 1000, 100, 300
QUOTAS = {"tokens_per_minute": 10**12, "concurrent_requests": 1000}
PATH = "/v1/chat/completions"
ANSWER = BilledAnswer("stop", True, False, 200, 0, 1024, 256, 0, 0.01, 0.1, 2.0)
Handle = Callable[[Scope, Receive, Send], Awaitable[None]]


class NullService:
    """Answers at once, and bills as `RouterService` does."""

    async def generate(self, request: GenerationRequest) -> None:
        if request.bill is not None:
            request.bill.begin(2000, 1)
            request.bill.end(ANSWER)

    def model_info(self) -> Any:
        raise AssertionError("requests name their model")


def request() -> GenerationRequest:
    return GenerationRequest(request_id="0" * 32, model="embedded", prompt="x")


def key_file(folder: Path, quotas: dict[str, int]) -> tuple[Path, str]:
    """A file of `KEYS` keys, and one of them."""
    folder.mkdir()
    entries = []
    for i in range(KEYS):
        secret, digest = new_key()
        entry = {"sha256": digest, "name": f"key-{i}", "tenant": f"tenant-{i}"}
        entries.append(entry | {"rights": ["generate"], "quotas": quotas})
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": entries}))
    return path, secret


async def us_per_request(handle: Handle, scope: Scope) -> float:
    """CPU microseconds of one request in this thread, over `REQUESTS`."""
    began_s = time.thread_time()
    for _ in range(REQUESTS):
        await handle({**scope, "state": {}}, None, None)
    return 1e6 * (time.thread_time() - began_s) / REQUESTS


def with_key(service: NullService, access: AccessControl, secret: str) -> tuple[Handle, Scope]:
    """The service behind a door, and a request with a key."""

    async def below_door(scope: Scope, receive: Receive, send: Send) -> None:
        await service_of_caller(service, access).generate(request())
        if headers := scope["state"].get("answer_headers"):
            headers()

    routes = build_app(lambda: service, max_body_bytes=1000).router.routes
    others = [(f"x-header-{i}".encode(), b"value") for i in range(10)]
    headers = [*others, (b"authorization", f"Bearer {secret}".encode())]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
    return HttpDoor(below_door, lambda: access, HTTP_RULES, routes), scope


async def measure(folder: Path) -> dict[str, list[float]]:
    service = NullService()

    async def without(scope: Scope, receive: Receive, send: Send) -> None:
        await service.generate(request())

    log = UsageLog(folder / "usage", "router", max_bytes=1 << 26, num_files=2)
    handles: dict[str, tuple[Handle, Scope]] = {"without": (without, {})}
    all_access = []
    for name, quotas, used_log in (("with", QUOTAS, log), ("key alone", {}, None)):
        path, secret = key_file(folder / name, quotas)
        ledger = Ledger(counters=TenantCounters(), log=used_log, num_routers=lambda: 2)
        access = AccessControl(KeyRing(path, max_labels=50), ledger)
        all_access.append(access)
        handles[name] = with_key(service, access, secret)
    found: dict[str, list[float]] = {name: [] for name in handles}
    began_s = time.process_time() - time.thread_time()
    for _ in range(ROUNDS):
        for name, (handle, scope) in handles.items():
            found[name].append(await us_per_request(handle, scope))
    for access in all_access:
        access.close()
    others_s = time.process_time() - time.thread_time() - began_s
    found["log thread"] = [1e6 * others_s / (ROUNDS * REQUESTS)]
    if log.num_dropped:
        raise RuntimeError(f"{log.num_dropped} lines were dropped: the disk is too slow")
    return found


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "auth_cost.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder)))
    cost_us = min(found["with"]) - min(found["without"]) + min(found["log thread"])
    details = {name: report.spread_json(report.Spread.of(values)) for name, values in found.items()}
    bar = report.Bar("auth/request", cost_us, "us", 20, details={"keys": KEYS, **details})
    alone_us = min(found["key alone"]) - min(found["without"])
    print(f"a key without quotas and usage log: {alone_us:.1f} us")
    report.write(arguments.out, "python -m tests.perf auth_cost", [bar])


if __name__ == "__main__":
    main()

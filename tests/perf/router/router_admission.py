"""Time to admit a request, and to refuse one while the queue is full.

    python -m tests.perf router_admission [--out FILE]

A real `RouterService` and `Bus` with replicas that never answer. The first requests fill the replicas, about nine
hundred requests of a hundred tenants wait, and then more requests arrive with prompts of 20,000 characters. *Refused*
is the time from `generate` to its `Overloaded`, while the queue works. *Pass* is the time that the gate adds to a
request when the queue is empty, with 4 and with 1000 replicas, without the ranking that every request needs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import time
from pathlib import Path

import numpy as np

from quire.cluster.bench.results import report
from quire.protos.errors import Overloaded
from quire.protos.wire import Frame, Hello
from quire.replica.checkpoint.checkpoint import resolve_checkpoint
from quire.router.admission.gate import AdmissionGate, Arrival
from quire.router.admission.wait_bounds import AdmissionLimits
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.policy.policy import RouteRequest
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.service import RouterService
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.transport.bus import Bus
from quire.router.types import GenerationRequest
from tests.perf.router.bus_overhead import StubHandle

EPOCH = "epoch"
MAX_LEN = 32_768
TENANTS, WAITING, REFUSALS = 100, 1000, 300


HELLO = Hello(
    replica="r0",
    epoch=EPOCH,
    model_name="embedded",
    revision="",
    dtype="float32",
    vocab_size=0,  # set from the tokenizer, see `service_of`
    max_model_len=MAX_LEN,
    max_cache_tokens=MAX_LEN,
    block_size=32,
    eos_token_ids=[],
    startup_s={},
)


def table_of(num_replicas: int) -> ReplicaTable:
    table = ReplicaTable(PrefixIndex(), lost_after_s=1e9)
    for i in range(num_replicas):
        table.add(f"r{i}", EPOCH, weights=HELLO.weights)
        table.on_frame(f"r{i}", Frame(EPOCH, snapshot=np.empty(0, np.uint64)), time.monotonic())
    return table


def service_of(table: ReplicaTable) -> RouterService:
    tokenizer = TextTokenizer.load(resolve_checkpoint("embedded", None, weights=False))
    bus = Bus(StubHandle(), "router-admission", "router", table)
    vocab_size = tokenizer.backend.get_vocab_size()
    bus.hellos["r0"] = dataclasses.replace(HELLO, vocab_size=vocab_size)
    return RouterService(
        ModelFacts(name="embedded", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
        router_id="router",
        tokenizer=AsyncTokenizer(tokenizer, num_threads=1),
        template=None,
        table=table,
        policy=make_policy("slo"),
        transport=bus,
        admission=AdmissionLimits(max_wait_s=5.0, max_queued_requests=2 * WAITING),
    )


async def refused_ms() -> tuple[int, list[float]]:
    """Fill the queue. Returns the number of waiting requests, and the milliseconds of each refusal."""
    service = service_of(table_of(4))
    prompt = "A quire of voices sings. " * 800

    def ask(i: int, text: str) -> GenerationRequest:
        tenant = f"tenant {i % TENANTS}"
        return GenerationRequest(request_id=str(i), prompt=text, max_tokens=16, tenant=tenant)

    waiting = [
        asyncio.create_task(service.generate(ask(i, f"{i} {prompt[:500]}"))) for i in range(WAITING)
    ]
    await asyncio.sleep(3)  # until every request is sent, waits, or was refused
    num_waiting = len(service.gate.queue)
    times_ms = []
    for i in range(REFUSALS):
        began_s = time.perf_counter()
        try:
            await asyncio.wait_for(service.generate(ask(i, f"{i} {prompt}")), 5)
        except Overloaded:
            times_ms.append(1e3 * (time.perf_counter() - began_s))
        await asyncio.sleep(0.002)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return num_waiting, times_ms


async def pass_us(num_replicas: int, rounds: int = 2000) -> list[float]:
    """Microseconds of `AdmissionGate.enter` without ranking and sending, and of reporting the first token."""
    table, policy, rng = table_of(num_replicas), make_policy("slo"), random.Random(1)
    now_s = time.monotonic()
    fleet = table.fleet(np.empty(0, np.uint64), 1000, now_s)
    ranking = policy.choose(RouteRequest(1000), fleet, now_s, rng)
    gate = AdmissionGate(AdmissionLimits(), time.monotonic)
    arrival = Arrival(
        tenant="",
        tokens=1000,
        priority=0,
        deadline_s=None,
        rank=lambda: ranking,
        send=lambda ranking: None,
    )
    times_us = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        entry = await gate.enter(arrival)
        entry.answered()
        times_us.append(1e6 * (time.perf_counter() - began_s))
    return times_us


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=report.RESULTS / "router_admission.json")
    args = parser.parse_args()
    num_waiting, times_ms = asyncio.run(refused_ms())
    refused = sorted(times_ms)
    bars = [
        report.Bar(
            "router/refusal_p99",
            refused[int(0.99 * (len(refused) - 1))],
            "ms",
            100,
            details={
                **report.spread_json(report.Spread.of(refused)),
                "waiting": num_waiting,
                "tenants": TENANTS,
            },
        )
    ]
    for num_replicas in (4, 1000):
        spread = report.Spread.of(asyncio.run(pass_us(num_replicas)))
        details = report.spread_json(spread)
        name = f"router/gate_pass_{num_replicas}"
        bars.append(report.Bar(name, spread.median, "us", 30, details=details))
    for bar in bars:
        print(bar.to_json())
    report.write(args.out, "python -m tests.perf router_admission", bars)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

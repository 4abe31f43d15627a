"""A router is ready when some replica is idle or finishes steps."""

from __future__ import annotations

import time
from types import SimpleNamespace

from quire.protos.wire import Frame, Load
from quire.replica.builtin_model import CHECKPOINT
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.service import RouterService
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer


def ready(*stalled_s: float) -> tuple[bool, int, str]:
    """Return the readiness over replicas with these values in their last reports."""
    table = ReplicaTable(PrefixIndex())
    for i, seconds in enumerate(stalled_s):
        table.add(f"r{i}", "e")
        load = Load(num_running=2, stalled_s=seconds)
        table.on_frame(f"r{i}", Frame("e", load=load), time.monotonic())
    service = RouterService(
        ModelFacts(name="quire", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
        router_id="router",
        tokenizer=AsyncTokenizer(TextTokenizer.load(CHECKPOINT), num_threads=1),
        template=None,
        table=table,
        policy=make_policy("slo"),
        transport=SimpleNamespace(hellos={}),
        ready_timeout_s=10.0,
    )
    readiness = service.readiness()
    return readiness.ready, readiness.replicas, readiness.reason


def test_ready_while_one_replica_finishes_steps():
    assert ready(0.0, 0.1) == (True, 2, "ok")
    assert ready(9.9, 30.0) == (True, 1, "ok")


def test_not_ready_when_every_step_hangs_or_no_replica_is_attached():
    is_ready, num_replicas, reason = ready(12.0, 30.0)
    assert (is_ready, num_replicas) == (False, 0)
    assert "no step" not in reason and "for 12.0 s" in reason
    assert ready() == (False, 0, "no replica is attached yet")

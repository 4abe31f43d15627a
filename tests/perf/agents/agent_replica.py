"""Replicas for `agents`: the paced device, with times for prefill and for copies between the tiers.

Scheduler, prefix cache, eviction, host tier and its queue of copies are the product's; only the computation is
replaced. So a first token's time depends on the tokens that the cache lacks, the blocks that it copies back and the
requests in front of it, and hardly on the cores of this machine.
"""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from quire.cluster.app import application
from quire.cluster.config.app_config import AppConfig
from quire.replica.serving.actor import Replica
from tests.perf.cluster.paced_replica import Pace, PacedEngine

# Copying a token's KV takes a sixteenth of computing it, as for an 8B model on a GPU with 50 GB/s to the host.
BLOCK_SIZE = 8
PREFILL_TOKEN_S = 0.3e-3
PACE = Pace(
    step_s=0.030,
    prefill_token_s=PREFILL_TOKEN_S,
    copied_block_s=BLOCK_SIZE * PREFILL_TOKEN_S / 16,
)


class AgentEngine(PacedEngine):
    """An engine with this pace."""

    pace = PACE


class AgentReplica(Replica):
    """A replica with such an engine."""

    engine_class = AgentEngine


def build(args: dict[str, Any]) -> Application:
    """The application of `quire.cluster.app` with these replicas."""
    return application(AppConfig.from_args(args), AgentReplica)

"""What the others lose while a long victim's blocks are saved and restored, on a clock: nothing to speak of.

The real scheduler and host pool; a device that computes nothing and knows when each stream would be done.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from small_config import small_config

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Phase, Request
from quire.replica.core.step_plan import StepResult
from quire.replica.device import host_pool
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.device.device import Stream
from quire.replica.device.host_pool import HostPool
from quire.replica.device.kv_pool import KVPool
from quire.replica.kv_cache.groups import LayerGroup
from quire.replica.scheduler.scheduler import Scheduler

# Llama-3.1-8B on PCIe 5: 4 MiB of 32 tokens, and a step of 64 rows with 1k context.
COPY_S = 80e-6
STEP_S = 8e-3
BLOCK_SIZE = 32
VICTIM_BLOCKS = 256
PIECE_BLOCKS = 8
GROUP = LayerGroup(layers=(0,), num_kv_heads=1, head_dim=2)


@dataclass(frozen=True)
class At:
    """An event of `Clock`."""

    device: Clock
    at_s: float

    def is_done(self) -> bool:
        return self.at_s <= self.device.host_s

    def wait(self) -> None:
        self.device.host_s = max(self.device.host_s, self.at_s)


class Clock(CpuDevice):
    """When each stream is done with what was queued; the host's own work takes no time."""

    is_immediate = False

    def __init__(self):
        self.host_s = 0.0
        self.done_s = dict.fromkeys(Stream, 0.0)

    def copy(self, stream, target, source, name):
        self._queue(stream, COPY_S * len(target))

    def compute(self) -> tuple[float, At]:
        """A step; how long the device waited before it, and its end."""
        before_s = max(self.done_s[Stream.COMPUTE], self.host_s)
        self._queue(Stream.COMPUTE, STEP_S)
        return before_s, At(self, self.done_s[Stream.COMPUTE])

    def _queue(self, stream, seconds):
        self.done_s[stream] = max(self.done_s[stream], self.host_s) + seconds

    def record(self, stream, name, *, timed=False):
        return At(self, max(self.done_s[stream], self.host_s))

    def seconds_between(self, first, second):
        return second.at_s - first.at_s

    def wait(self, stream, event):
        self.done_s[stream] = max(self.done_s[stream], event.at_s)


def lost_s(max_in_flight: int) -> float:
    """Seconds that the compute stream waits for copies, from the first step on until the victim runs again."""
    config = small_config(
        device="cuda",
        block_size=BLOCK_SIZE,
        num_blocks=VICTIM_BLOCKS + 30,
        num_host_blocks=400,
        max_batch_tokens=8192,
        max_model_len=8704,
        max_running_requests=9,
        max_prefill_ms=None,
        prefix_caching=False,  # or most of its blocks would still be in the device's cache
        restore="always",
    )
    device, scheduler = Clock(), Scheduler(config)
    pool = KVPool(config.num_blocks, (GROUP,), BLOCK_SIZE, torch.float32)
    tier = HostPool(config.num_host_blocks, pool, device)
    victim = Request("long", [1] * (VICTIM_BLOCKS * BLOCK_SIZE - 8), SamplingParams(max_tokens=400))
    # Six that need its room, and two that are still there when it returns.
    others = [
        Request(i, [2 + i] * 60, SamplingParams(max_tokens=120 if i < 6 else 300, ignore_eos=True))
        for i in range(8)
    ]
    for request in (victim, *others):
        assert scheduler.add(request) is None
    lost, was_offloaded = 0.0, False
    in_flight: deque = deque()
    while not (was_offloaded and victim.phase is Phase.DECODING):
        plan = scheduler.plan(0.0)
        if plan is not None:
            idle_s = max(device.done_s[Stream.COMPUTE], device.host_s)
            written = plan.written_blocks(BLOCK_SIZE)
            options = dict(step=plan.step, written=written, used_now=plan.uses_restores)
            tier.move(plan.saves, plan.restores, **options)
            begins_s, done = device.compute()
            lost += begins_s - idle_s
            tier.move_rest()
            in_flight.append((plan, done))
        if plan is None or len(in_flight) > max_in_flight:
            plan, done = in_flight.popleft()
            done.wait()
            tokens = np.full(len(plan.sampling.token_index), 7)
            result = StepResult(tokens, STEP_S, copies=tier.take_done())
            scheduler.commit(plan, result, 0.0)
        was_offloaded |= victim.phase is Phase.OFFLOADED
    assert tier.num_saved >= VICTIM_BLOCKS and tier.num_restored > 0.9 * VICTIM_BLOCKS
    return lost


@pytest.mark.parametrize("max_in_flight", [0, 1], ids=["step by step", "one ahead"])
def test_a_long_victim_costs_the_others_a_fraction_of_a_step(max_in_flight, monkeypatch):
    block_bytes = GROUP.num_kv_heads * GROUP.head_dim * 2 * BLOCK_SIZE * 4
    monkeypatch.setattr(host_pool, "_PIECE_BYTES", PIECE_BLOCKS * block_bytes)
    assert lost_s(max_in_flight) <= 0.25 * STEP_S < 0.1 * 2 * VICTIM_BLOCKS * COPY_S

"""The product's routing as a plug-in of a simulator: `Stack` is the router's own table, index and policy.

The simulator is not part of this project: a folder with `sim.py`, `policies.py`, `gen.py` and traces, given on the
command line. Its policies see a request, the replicas' last load reports and KV events; `Stack` turns these into the
frames of a real replica. Step times, which a replica measures but the reports lack, are computed from the simulated
hardware.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from quire.protos.wire import CacheEvents, Frame, Load
from quire.router.fleet.replicas import ReplicaTable
from quire.router.fleet.request_bookings import RequestBooking
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.policy import Policy, RouteRequest

_NETWORK_S = 0.001  # the simulator's delay of first tokens and of ends of answers
_MEASURED_WEIGHT = 0.05


class Stack:
    """One router as a plug-in of the simulator.

    Parameters
    ----------
    policy
        A name for `quire.router.policy.by_name.make_policy`.
    """

    wants_kv = True
    late = False

    def __init__(self, policy: Policy, seed: int = 1):
        self.policy = policy
        self.rng = random.Random(seed)
        self.queue: list[Any] = []

    def setup(self, num_replicas: int, hardware: Any) -> None:
        self._hardware = hardware
        self._table = ReplicaTable(
            PrefixIndex(),
            submit_lag_s=1e-6,  # a report does not contain requests that are routed at the same time
            routing_block_tokens=hardware.block,
            attention_context_tokens=hardware.c_p / hardware.c_a,
            lost_after_s=1e9,
        )
        self._names = [str(i) for i in range(num_replicas)]
        self._rows = {name: i for i, name in enumerate(self._names)}
        self._epochs = [0] * num_replicas
        self._reported_s = [-1.0] * num_replicas
        self._prefill_s_per_token = [0.0] * num_replicas
        self._bookings: dict[int, RequestBooking] = {}
        self._seq = [0] * num_replicas
        for name in self._names:
            self._table.add(name, "0", hardware.block)
            self._table.on_frame(name, Frame("0", snapshot=np.empty(0, np.uint64)), -1e-9)

    def choose(self, request: Any, replicas: Any, now_s: float) -> int:
        for i, replica in enumerate(replicas):
            if replica.rep["t"] != self._reported_s[i]:
                self._reported_s[i] = replica.rep["t"]
                self._report(i, replica)
        hashes = request.h[: request.nfull]
        fleet = self._table.fleet(hashes, request.inp, now_s)
        self._ranking = self.policy.choose(RouteRequest(request.inp), fleet, now_s, self.rng)
        best = self._ranking[0]
        request.pred_hit = best.cached_tokens
        return self._rows[best.replica]

    def _report(self, i: int, replica: Any) -> None:
        hardware, report = self._hardware, replica.rep
        decode_s = hardware.c_d * report["running"] + hardware.c_kv * report["kv_tokens"]
        load = Load(
            num_running=report["running"],
            num_waiting=report["waiting"],
            queued_prefill_tokens=report["queued_prefill"],
            num_decode_tokens=report["kv_tokens"],
            blocks_free=report["kv_free"],
            blocks_in_use=report["kv_used"],
            blocks_total=hardware.cap_blocks,
            prefill_s_per_token=self._prefill_s_per_token[i] * replica.speed,
            decode_step_s=(hardware.t0 + decode_s) * replica.speed if report["running"] else 0.0,
            num_steps=len(self._bookings) + 1 + int(report["t"] * 1e6),
        )
        name = self._names[i]
        self._table.on_frame(
            name,
            Frame(
                str(self._epochs[i]),
                events_seq=self._seq[i],
                digest=self._table.index.digest(name),
                load=load,
            ),
            report["t"],
        )

    def on_route(self, request: Any, i: int, now_s: float) -> None:
        hashes = request.h[: request.nfull]
        self._bookings[request.id] = self._table.book(self._ranking, hashes, request.inp, now_s)

    def on_first(self, i: int, request: Any) -> None:
        self._table.answered(self._bookings[request.id], request.t_first + _NETWORK_S)
        # As the replica measures it: the mean over prefilled tokens, in which long prompts weigh more.
        tokens = request.inp - request.hit
        hardware = self._hardware
        s_per_token = hardware.prefill_time(tokens, request.hit) / tokens
        measured = self._prefill_s_per_token[i] or s_per_token
        weight = min(1.0, _MEASURED_WEIGHT * tokens / hardware.max_batched_tokens)
        self._prefill_s_per_token[i] = measured + weight * (s_per_token - measured)

    def on_finish(self, i: int, request: Any) -> None:
        booking = self._bookings.pop(request.id)
        self._table.end(booking, request.t_end + _NETWORK_S, request.out)

    def on_kv(self, i: int, stored: bool, blocks: list[int]) -> None:
        hashes = np.array(blocks, np.uint64)
        none = np.empty(0, np.uint64)
        self._seq[i] += 1
        events = CacheEvents(self._seq[i], *((hashes, none) if stored else (none, hashes)))
        # Not in a frame, which would carry a newer load report than the simulator's.
        self._table.index.apply(self._names[i], str(self._epochs[i]), events)

    def on_reset(self, i: int, lost: list[Any]) -> None:
        """The replica restarted with an empty cache."""
        for request in lost:
            booking = self._bookings.pop(request.id, None)
            if booking is not None:
                self._table.end(booking, self._reported_s[i])
        self._epochs[i] += 1
        self._seq[i] = 0
        frame = Frame(str(self._epochs[i]))
        self._table.on_frame(self._names[i], frame, self._reported_s[i])

"""The bill of one request: its quotas, its tenant's counters and its line in the usage log."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.cluster.auth.key_ring import LoadedKey
from quire.cluster.auth.tenant_counters import TenantCounters
from quire.cluster.auth.usage_log import UsageLog
from quire.protos.errors import RateLimited
from quire.router.bill import BilledAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where the bills of a router go.

    Attributes
    ----------
    log
        None: no usage is logged.
    num_routers
        Returns the number of routers that share the quotas.
    clock
        A monotonic clock, seconds.
    """

    counters: TenantCounters
    log: UsageLog | None
    num_routers: Callable[[], int]
    clock: Callable[[], float] = time.monotonic


class RequestBill:
    """Implements `router.bill.Bill`. It counts as a running request of its key until it is closed.

    Parameters
    ----------
    counts_output
        False for a request of a prompt alone, for which the engine generates a token that the client does not get.

    Raises
    ------
    RateLimited
        Too many requests of the key run.
    """

    __slots__ = (
        "_answers",
        "_counts_output",
        "_ended_s",
        "_is_open",
        "_key",
        "_ledger",
        "_model",
        "_num_open",
        "_num_prompt_tokens",
        "_request_id",
        "tenant",
    )

    def __init__(
        self, key: LoadedKey, ledger: Ledger, request_id: str, model: str, *, counts_output: bool
    ):
        key.meter.enter(ledger.num_routers())
        self.tenant = key.entry.tenant
        self._key = key
        self._ledger = ledger
        self._request_id = request_id
        self._model = model
        self._counts_output = counts_output
        self._is_open = True
        self._ended_s = 0.0
        self._num_open = 0
        self._num_prompt_tokens = 0
        self._answers: list[BilledAnswer] = []

    def begin(self, num_prompt_tokens: int, num_answers: int) -> None:
        """See `Bill`."""
        ledger = self._ledger
        try:
            self._key.meter.take(num_prompt_tokens, ledger.clock(), ledger.num_routers())
        except RateLimited:
            ledger.counters.on_rate_limited(self._key.label)
            raise
        self._num_prompt_tokens = num_prompt_tokens
        self._num_open = num_answers
        if not num_answers:
            self._end_all()

    def end(self, answer: BilledAnswer) -> None:
        """See `Bill`."""
        self._answers.append(answer)
        self._num_open -= 1
        if self._num_open == 0:
            self._end_all()

    def close(self) -> None:
        """End the request if no answer has begun. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._key.meter.leave()

    def _end_all(self) -> None:
        self.close()
        key = self._key
        num_output = num_cached = 0
        is_answered = False
        for answer in self._answers:
            is_answered = is_answered or answer.is_answered
            if self._counts_output:
                num_output += answer.completion_tokens
            if not answer.is_fork:
                num_cached += answer.cached_tokens
        if not is_answered:
            # Refused after its prompt was charged, or a resumed stream that was complete: it costs nothing.
            key.meter.charge(-self._num_prompt_tokens)
            return
        key.meter.charge(num_output)
        self._ledger.counters.on_end(key.label, self._num_prompt_tokens, num_cached, num_output)
        if self._ledger.log is not None:
            self._ended_s = time.time()
            self._ledger.log.put(self.line)

    def line(self) -> dict[str, Any]:
        """Return the line of the usage log for a request that has ended; the slowest answer's time of each phase."""
        num_output = num_reasoning = num_cached = num_host = num_peer = 0
        queue_s = prefill_s = decode_s = 0.0
        for answer in self._answers:
            if self._counts_output:
                num_output += answer.completion_tokens
                num_reasoning += answer.reasoning_tokens
            if not answer.is_fork:
                num_cached += answer.cached_tokens
                num_host += answer.host_cached_tokens
                num_peer += answer.peer_cached_tokens
            queue_s = max(queue_s, answer.queue_s)
            prefill_s = max(prefill_s, answer.prefill_s)
            decode_s = max(decode_s, answer.decode_s)
        return {
            "time": self._ended_s,
            "request_id": self._request_id,
            "tenant": self.tenant,
            "key": self._key.entry.name,
            "model": self._model,
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_output,
            "reasoning_tokens": num_reasoning,
            "cached_tokens": {
                "device": num_cached - num_host,
                "host": num_host - num_peer,
                "peer": num_peer,
            },
            "ms": {
                "queue": round(1000 * queue_s, 3),
                "prefill": round(1000 * prefill_s, 3),
                "decode": round(1000 * decode_s, 3),
            },
            "finish_reasons": [answer.finish_reason for answer in self._answers],
        }

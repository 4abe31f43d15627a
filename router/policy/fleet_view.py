"""The replicas that can take a request, as a policy sees them.

In columns, so that a thousand of them are a few array operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from quire.router.policy.columns import COLUMN, NUM_COLUMNS


class Demand(NamedTuple):
    """What arrives at the fleet, as exponential averages (`router/fleet/demand.py`)."""

    arrivals_per_s: float = 0.0  # at each replica
    prefill_share: float = 0.0  # [0, 1) of a replica's time that prefill takes
    mean_prefill_s: float = 0.0
    mean_square_prefill_s2: float = 0.0
    output_tokens: float = 200.0  # of one request
    # Seconds by which one more token in the KV cache of the decoding requests lengthens a step.
    decode_s_per_kv_token: float = 0.0


@dataclass(slots=True)
class FleetView:
    """What a policy may know of the replicas that can take a request: one row for each.

    *Work* counts prefill tokens, weighted by the attention to what precedes them: a token at context c
    is 1 + c / `attention_context_tokens` of work (`prefill_work`).

    Attributes
    ----------
    replicas
        [n] names.
    columns
        [NUM_COLUMNS, n] float64, indexed by `COLUMN` (`router/policy/columns.py`), each row contiguous. The properties
        below are [n] float64, made from it.
    held
        [2, n] float64, contiguous, prompt tokens: `gpu_tokens` and `host_tokens`.
    prefill_s_per_work
        [n] float64, measured and still believed; 0: not yet known.
    now_s
        The time that ages are taken at.
    work_per_token
        Of a queued token.
    prior_s_per_work
        Median of those that are known; 0: none is.
    longest_prefix
        Hash of the longest prefix of this prompt that is held.
    followers
        Requests of late with that prefix.
    session_row
        Where the session's last request went; -1: nowhere.
    """

    replicas: Sequence[str]
    columns: np.ndarray
    held: np.ndarray
    prefill_s_per_work: np.ndarray
    now_s: float = 0.0
    work_per_token: float = 1.0
    prior_s_per_work: float = 0.0
    demand: Demand = field(default_factory=Demand)
    attention_context_tokens: float = 30_000.0
    longest_prefix: int | None = None
    followers: float = 0.0
    session_row: int = -1

    def __len__(self) -> int:
        return len(self.replicas)

    @classmethod
    def of(
        cls, replicas: Sequence[str], named: Mapping[str, np.ndarray], **facts: Any
    ) -> FleetView:
        """A fleet of the columns that `named` returns, [n] float64 each, as of time 0.

        Raises
        ------
        ValueError
            Some are missing, or there are others; one has not a number for each replica; `session_row` is none of them.
        """
        if named.keys() != set(COLUMN_NAMES):
            raise ValueError(f"columns must be {sorted(COLUMN_NAMES)}, got {sorted(named)}")
        n = len(replicas)
        named = {name: np.array(column, np.float64) for name, column in named.items()}
        for name, column in named.items():
            if column.shape != (n,):
                raise ValueError(f"{name} must have shape [{n}], got {list(column.shape)}")
        if not -1 <= facts.get("session_row", -1) < n:
            raise ValueError(f"session_row must be from -1 to {n - 1}, got {facts['session_row']}")
        values = np.zeros((NUM_COLUMNS, n))
        for name, column in _COLUMN_OF.items():
            values[column] = named[name]
        for name, column in _MOMENT_OF.items():
            values[column] = 0.0 - named[name]
        held = np.stack([named["gpu_tokens"], named["host_tokens"]])
        return cls(replicas, values, held, named["prefill_s_per_work"], **facts)

    def only(self, row: int) -> FleetView:
        """The fleet as if there were no other replica; what is said of the whole stays."""
        one, is_session = slice(row, row + 1), self.session_row == row
        return replace(
            self,
            replicas=self.replicas[one],
            columns=self.columns[:, one],
            held=self.held[:, one].copy(),
            prefill_s_per_work=self.prefill_s_per_work[one],
            session_row=0 if is_session else -1,
        )

    def named(self) -> dict[str, np.ndarray]:
        """What a policy may know of each replica, by name: copies, [n] float64 each."""
        return {name: np.array(getattr(self, name), np.float64) for name in COLUMN_NAMES}

    @property
    def gpu_tokens(self) -> np.ndarray:
        """Of the prompt, that it holds or will hold on its device."""
        return self.held[0]

    @property
    def host_tokens(self) -> np.ndarray:
        """Further ones in host memory."""
        return self.held[1]

    @property
    def report_s(self) -> np.ndarray:
        """When it reported last; -inf: never."""
        return self.columns[COLUMN.report_s]

    @property
    def report_age_s(self) -> np.ndarray:
        """inf: it has never reported."""
        return self.now_s - self.columns[COLUMN.report_s]

    @property
    def reported_work(self) -> np.ndarray:
        """Queued by its last report."""
        return self.columns[COLUMN.queued_tokens] * self.work_per_token

    @property
    def booked_work(self) -> np.ndarray:
        """Of our own requests that the report cannot contain."""
        return self.columns[COLUMN.booked_work]

    @property
    def unanswered_work(self) -> np.ndarray:
        """Of all our own requests without a first token."""
        return self.columns[COLUMN.unanswered_work]

    @property
    def head_work(self) -> np.ndarray:
        """Of the oldest of those."""
        return self.columns[COLUMN.head_work]

    @property
    def head_age_s(self) -> np.ndarray:
        """For how long it has been the oldest."""
        return self.now_s - self.columns[COLUMN.head_s]

    @property
    def num_requests(self) -> np.ndarray:
        """In flight: running and waiting by the report, and booked."""
        return self.columns[COLUMN.num_requests]

    @property
    def kv_tokens(self) -> np.ndarray:
        """Of the decoding requests, with our own unanswered ones."""
        return self.columns[COLUMN.kv_tokens]

    @property
    def mean_kv_tokens(self) -> np.ndarray:
        """Of the decoding ones, mean of the last half minute."""
        return self.columns[COLUMN.mean_kv_tokens]

    @property
    def host_copy_s_per_token(self) -> np.ndarray:
        """From host memory to the device."""
        return self.columns[COLUMN.host_copy_s_per_token]

    @property
    def cache_age_s(self) -> np.ndarray:
        """For how long a block stays cached; inf: nothing evicted."""
        return self.columns[COLUMN.cache_age_s]

    @property
    def free_tokens(self) -> np.ndarray:
        """Of KV memory, evictable ones included; inf: not known."""
        return self.columns[COLUMN.free_tokens]

    @property
    def used_tokens(self) -> np.ndarray:
        """Of KV memory of running requests."""
        return self.columns[COLUMN.used_tokens]

    @property
    def num_waiting(self) -> np.ndarray:
        """Requests that wait there for a place, by the last report."""
        return self.columns[COLUMN.num_waiting]

    @property
    def num_places(self) -> np.ndarray:
        """Further requests of ours until it refuses one; inf: no bound."""
        return self.columns[COLUMN.num_places]


_OWN_ARRAYS = ("gpu_tokens", "host_tokens", "prefill_s_per_work")
_MOMENT_OF = {"report_age_s": COLUMN.report_s, "head_age_s": COLUMN.head_s}
# Not `seen_s`: a view has no replicas that take no requests.
_COLUMN_OF = {"reported_work": COLUMN.queued_tokens} | {
    name: column
    for name, column in COLUMN._asdict().items()
    if name not in ("seen_s", "report_s", "head_s", "queued_tokens")
}
COLUMN_NAMES = (*_OWN_ARRAYS, *_COLUMN_OF, *_MOMENT_OF)
"""All that a policy may know of each replica."""


def prefill_work(
    num_tokens: np.ndarray | float, context: np.ndarray | float, attention_context_tokens: float
) -> np.ndarray | float:
    """Work of prefilling tokens after a context: sum of 1 + c / A over their positions c."""
    return num_tokens * (1.0 + (context + num_tokens * 0.5) * (1.0 / attention_context_tokens))

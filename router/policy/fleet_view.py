"""The replicas that can take a request, as a policy sees them.

Each value is an array with one entry per replica, so that a policy handles a thousand replicas in a few operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from quire.router.policy.replica_columns import PerColumn

# Values of a view that are not a column, but computed or arrays of their own.
_COMPUTED = (
    *("gpu_tokens", "host_tokens", "prefill_s_per_work"),
    *("reported_work", "report_age_s", "head_age_s"),
)
# `seen_s` is left out: all replicas of a view take requests. The values computed from the other three are above.
_STORED = tuple(
    name
    for name in PerColumn._fields
    if name not in ("seen_s", "report_s", "head_s", "queued_tokens")
)
COLUMN_NAMES = (*_COMPUTED, *_STORED)
"""All that a policy may know of each replica."""


class Demand(NamedTuple):
    """Exponential averages of the arriving requests (`router/fleet/demand.py`).

    Attributes
    ----------
    arrivals_per_s
        Requests that arrive at one replica.
    prefill_share
        Fraction of a replica's time that prefill takes, [0, 1).
    mean_prefill_s, mean_square_prefill_s2
        Mean of one request's prefill seconds, and of their square.
    output_tokens
        Mean output length of a request.
    decode_s_per_kv_token
        Seconds by which one more KV token of the decoding requests lengthens a step.
    """

    arrivals_per_s: float = 0.0
    prefill_share: float = 0.0
    mean_prefill_s: float = 0.0
    mean_square_prefill_s2: float = 0.0
    output_tokens: float = 200.0
    decode_s_per_kv_token: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerPrefixes:
    """What each replica could pull from a replica of another node.

    Attributes
    ----------
    tokens
        [n] float64, prompt tokens that the peer holds beyond what the replica holds itself.
    rows
        [n] int64, the peer's row.
    s_per_token
        Seconds to copy a token's KV to another node, by the pulls so far.
    """

    tokens: np.ndarray
    rows: np.ndarray
    s_per_token: float


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The replicas that only compute prompts, and hand the streams over (policy `disaggregated`).

    Attributes
    ----------
    is_prefill
        [n] bool.
    s_per_token
        [n] float64, seconds to copy a token's KV to a replica that decodes; 0 within a node.
    """

    is_prefill: np.ndarray
    s_per_token: np.ndarray


@dataclass(slots=True)
class FleetView:
    """The replicas that can take a request, one row each, and the averages that a policy may use.

    *Work* is the unit of prefill cost: prefill tokens, weighted by their attention to the tokens before them. The token
    at position c is 1 + c / `attention_context_tokens` of work (`prefill_work`).

    Attributes
    ----------
    replicas
        [n] names.
    columns
        The values of the replicas (`PerColumn`), [n] float64 each, contiguous.
    gpu_tokens
        [n] float64, prompt tokens that the replica holds, or will hold, on its device.
    host_tokens
        [n] float64, further prompt tokens that the replica holds in its host memory.
    prefill_s_per_work
        [n] float64, measured speeds, moved towards the prior as they age (`router/fleet/prefill_speeds.py`);
        0: not yet known.
    now_s
        Time of the view; ages are relative to it.
    work_per_token
        Mean work of a queued token.
    prior_s_per_work
        Median of the known speeds; 0: none is known.
    longest_prefix
        Routing hash of the longest prefix of this prompt that any replica holds.
    followers
        Number of recent requests with that prefix.
    session_row
        Row of the replica that served the session's last request; -1: none.
    peers
        What the replicas could pull from other nodes; None: they can't.
    prefill
        The replicas that only compute prompts; None: there are none.
    adapter_s
        [n] float64, seconds until the request's adapter is on the device (`router/fleet/adapter_costs.py`); None: it
        has none.
    """

    replicas: Sequence[str]
    columns: PerColumn[np.ndarray]
    gpu_tokens: np.ndarray
    host_tokens: np.ndarray
    prefill_s_per_work: np.ndarray
    now_s: float = 0.0
    work_per_token: float = 1.0
    prior_s_per_work: float = 0.0
    demand: Demand = field(default_factory=Demand)
    attention_context_tokens: float = 30_000.0
    longest_prefix: int | None = None
    followers: float = 0.0
    session_row: int = -1
    peers: PeerPrefixes | None = None
    prefill: PrefillRows | None = None
    adapter_s: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.replicas)

    @classmethod
    def of(
        cls, replicas: Sequence[str], named: Mapping[str, np.ndarray], **facts: Any
    ) -> FleetView:
        """Make a view from the values that the method `named` of another view returned, [n] float64 each. `now_s` is 0.

        Raises
        ------
        ValueError
            A name is missing or unknown, an array does not have [n] values, or `session_row` is out of range.
        """
        if named.keys() != set(COLUMN_NAMES):
            raise ValueError(f"columns must be {sorted(COLUMN_NAMES)}, got {sorted(named)}")
        n = len(replicas)
        named = {name: np.array(values, np.float64) for name, values in named.items()}
        for name, values in named.items():
            if values.shape != (n,):
                raise ValueError(f"{name} must have shape [{n}], got {list(values.shape)}")
        if not -1 <= facts.get("session_row", -1) < n:
            raise ValueError(f"session_row must be from -1 to {n - 1}, got {facts['session_row']}")
        columns = PerColumn(
            seen_s=np.zeros(n),
            report_s=0.0 - named["report_age_s"],
            head_s=0.0 - named["head_age_s"],
            queued_tokens=named["reported_work"],
            **{name: named[name] for name in _STORED},
        )
        own = named["gpu_tokens"], named["host_tokens"], named["prefill_s_per_work"]
        return cls(replicas, columns, *own, **facts)

    def only(self, row: int) -> FleetView:
        """Return a view of one replica; the values that concern the whole fleet stay the same."""
        one, is_session = slice(row, row + 1), self.session_row == row
        return replace(
            self,
            replicas=self.replicas[one],
            columns=PerColumn(*(values[one] for values in self.columns)),
            gpu_tokens=self.gpu_tokens[one].copy(),
            host_tokens=self.host_tokens[one].copy(),
            prefill_s_per_work=self.prefill_s_per_work[one],
            session_row=0 if is_session else -1,
            peers=self.peers
            and replace(self.peers, tokens=self.peers.tokens[one], rows=self.peers.rows[one]),
            prefill=self.prefill
            and PrefillRows(self.prefill.is_prefill[one], self.prefill.s_per_token[one]),
            adapter_s=None if self.adapter_s is None else self.adapter_s[one],
        )

    def named(self) -> dict[str, np.ndarray]:
        """Return copies of all values of the replicas by name, [n] float64 each."""
        values = {name: getattr(self, name) for name in _COMPUTED}
        values |= {name: getattr(self.columns, name) for name in _STORED}
        return {name: np.array(value, np.float64) for name, value in values.items()}

    @property
    def report_age_s(self) -> np.ndarray:
        """Age of the last report; inf: never."""
        return self.now_s - self.columns.report_s

    @property
    def head_age_s(self) -> np.ndarray:
        """Seconds for which our oldest request without a first token has been the oldest."""
        return self.now_s - self.columns.head_s

    @property
    def reported_work(self) -> np.ndarray:
        """Prefill work queued at the replica, by its last report."""
        return self.columns.queued_tokens * self.work_per_token


Tokens = TypeVar("Tokens", float, np.ndarray)


def prefill_work(num_tokens: Tokens, context: Tokens, attention_context_tokens: float) -> Tokens:
    """Return the work of prefilling tokens after a context: the integral of 1 + c / A over their positions c."""
    return num_tokens * (1.0 + (context + num_tokens * 0.5) * (1.0 / attention_context_tokens))

"""Computes the terms of the cost, each for all replicas at once. `router/policy/cost.py` derives their formulas.

A decision runs about forty numpy operations on arrays with one number per replica. Even with a thousand replicas, half
of their time is call overhead. So a term that is 0 on every replica, such as a copy from host memory, is not computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.router.policy.fleet_view import FleetView, PeerPrefixes, PrefillRows, prefill_work

# Seconds of a pull besides its bytes: the call, the first answer, the adoption of what has come.
PULL_OVERHEAD_S = 0.005
# Seconds of a hand-over besides its bytes: the stream's first tokens share steps with other prompts, then it pauses.
HANDOVER_S = 0.1
# Largest fraction of the oldest request's prefill that may count as done. The prefill has not ended, however long the
# request has been the oldest, because its first token has not arrived.
_HEAD_DONE = 0.9


@dataclass(slots=True, kw_only=True)
class Prices:
    """Factors of the terms that are the same on every replica. `router/policy/cost.py` defines the symbols.

    Attributes
    ----------
    prompt_tokens
        T, the tokens of the prompt.
    max_decay_s
        Upper bound of the time by which a reported queue may have shrunk since the report.
    interference
        eta, the weight of the wait of requests in flight.
    later
        kappa lambda / (1 - rho), the factor of Q; 0: no arrivals.
    later_per_window_s
        1 / w0, the inverse of Q's window; 0: no arrivals.
    decode_s_per_token
        delta m b: seconds that each KV token adds to all steps of an output of mean length, times the weight.
    reuse_s
        Mean time between two uses of a block.
    eviction, memory
        Weights of E and M.
    output_s_per_token
        m b, without the weight.
    copies_s
        Weight times the number of followers times Wq: V times k (k + 1), where k replicas hold the prefix.
    """

    prompt_tokens: int
    max_decay_s: float
    interference: float
    later: float
    later_per_window_s: float
    decode_s_per_token: float
    reuse_s: float
    eviction: float
    memory: float
    output_s_per_token: float
    copies_s: float


class Terms(NamedTuple):
    """The terms, [n] float64 seconds each; None: 0 on every replica. The cost is their sum."""

    wait_s: np.ndarray
    prefill_s: np.ndarray
    host_copy_s: np.ndarray | None
    interference_s: np.ndarray
    later_s: np.ndarray | None
    decode_s: np.ndarray | None
    eviction_s: np.ndarray | None
    memory_s: np.ndarray | None
    copy_value_s: np.ndarray | None
    pull_s: np.ndarray | None
    handover_s: np.ndarray | None
    adapter_s: np.ndarray | None

    def total_s(self) -> np.ndarray:
        """Return the sum of all terms, [n] float64."""
        total: np.ndarray = self.wait_s + self.prefill_s
        for term in self[2:]:
            if term is not None:
                total += term
        return total

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Map rows ([m] integers) to their terms ([m, terms] float64)."""
        zeros = np.zeros(len(rows))
        return np.array([zeros if term is None else term.take(rows) for term in self]).T


def terms_of(fleet: FleetView, s_per_work: np.ndarray, prices: Prices) -> Terms:
    """Compute the terms of a request on each replica.

    Parameters
    ----------
    fleet
        The replicas, at least one.
    s_per_work
        [n] float64, seconds of a unit of prefill work.
    """
    host_copy = None
    cached = fleet.gpu_tokens
    if largest(fleet.host_tokens) > 0:
        cached = cached + fleet.host_tokens
        host_copy = fleet.host_tokens * fleet.columns.host_copy_s_per_token
    missing = prices.prompt_tokens - cached
    prefill = prefill_work(missing, cached, fleet.attention_context_tokens)
    prefill *= s_per_work
    pull = None
    if fleet.peers is not None:
        prefill, pull = _pull(fleet, fleet.peers, prices.prompt_tokens, cached, prefill, s_per_work)
    wait = _wait(fleet, s_per_work, prices)
    interference = prices.interference * prefill
    interference *= fleet.columns.num_requests
    decode = _decode(fleet, prices) if prices.decode_s_per_token else None
    handover = None
    if fleet.prefill is not None and not fleet.prefill.is_prefill.all():
        handover = _handover(fleet, fleet.prefill, prices.prompt_tokens, cached)
        is_prefill = fleet.prefill.is_prefill
        # The requests there wait for their own prefill, or leave.
        interference[is_prefill] = 0.0
        if decode is not None:
            decode[is_prefill] = decode[~is_prefill].min()
    return Terms(
        wait_s=wait,
        prefill_s=prefill,
        host_copy_s=host_copy,
        interference_s=interference,
        later_s=_later(wait, prefill, prices) if prices.later else None,
        decode_s=decode,
        eviction_s=_eviction(fleet, missing, s_per_work, prices),
        memory_s=_memory(fleet, missing, prices),
        copy_value_s=_copy_value(cached, prices),
        pull_s=pull,
        handover_s=handover,
        adapter_s=fleet.adapter_s,
    )


def _wait(fleet: FleetView, s_per_work: np.ndarray, prices: Prices) -> np.ndarray:
    """W: prefill still queued, by the report or by our own requests without a first token; the larger counts."""
    reported = fleet.reported_work * s_per_work
    reported -= np.minimum(fleet.report_age_s, prices.max_decay_s)
    np.maximum(reported, 0.0, out=reported)
    reported += fleet.columns.booked_work * s_per_work
    # Replicas prefill prompts one after the other, mostly in order. So only the oldest request's prefill can be partly
    # done.
    head_done = fleet.columns.head_work * s_per_work
    head_done *= _HEAD_DONE
    np.minimum(head_done, fleet.head_age_s, out=head_done)
    ours = fleet.columns.unanswered_work * s_per_work
    ours -= head_done
    wait: np.ndarray = np.maximum(reported, ours, out=ours)
    return wait


def _pull(
    fleet: FleetView,
    peers: PeerPrefixes,
    prompt_tokens: int,
    cached: np.ndarray,
    prefill: np.ndarray,
    s_per_work: np.ndarray,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return P and the copies from other nodes, on replicas where these take less time than the prefill they save."""
    if largest(peers.tokens) <= 0:
        return prefill, None
    held = cached + peers.tokens
    rest = prefill_work(prompt_tokens - held, held, fleet.attention_context_tokens)
    rest *= s_per_work
    pull = peers.tokens * (peers.s_per_token + fleet.columns.host_copy_s_per_token)
    pull += PULL_OVERHEAD_S
    pays = (peers.tokens > 0) & (rest + pull < prefill)
    return np.where(pays, rest, prefill), np.where(pays, pull, 0.0)


def _handover(
    fleet: FleetView, prefill: PrefillRows, prompt_tokens: int, cached: np.ndarray
) -> np.ndarray:
    """S: the stream's hand-over, and the copy of the tokens that no replica that decodes holds."""
    missing = prompt_tokens - largest(cached[~prefill.is_prefill])
    copy_s = prefill.s_per_token + fleet.columns.host_copy_s_per_token
    return np.where(prefill.is_prefill, HANDOVER_S + missing * copy_s, 0.0)


def _later(wait: np.ndarray, prefill: np.ndarray, prices: Prices) -> np.ndarray:
    """Q: delay of later arrivals; `window` is W + P."""
    window = wait + prefill
    bounded: np.ndarray = window * prices.later_per_window_s
    bounded += 1.0
    np.divide(window, bounded, out=bounded)
    bounded *= prefill
    bounded *= prices.later
    return bounded


def _decode(fleet: FleetView, prices: Prices) -> np.ndarray:
    """delta D: this request's steps read the others' KV, and theirs read its own."""
    read: np.ndarray = fleet.columns.num_requests * (0.5 * prices.prompt_tokens)
    read += fleet.columns.mean_kv_tokens
    read *= prices.decode_s_per_token
    return read


def _eviction(
    fleet: FleetView, missing: np.ndarray, s_per_work: np.ndarray, prices: Prices
) -> np.ndarray | None:
    """E: prefill lost with the evicted blocks, weighted by the chance that they would have been used again."""
    age_s = fleet.columns.cache_age_s
    if age_s[age_s.argmin()] == math.inf:
        return None
    reuse = age_s * (-1.0 / prices.reuse_s)
    np.exp(reuse, out=reuse)
    reuse *= missing * s_per_work
    reuse *= prices.eviction
    return reuse


def _memory(fleet: FleetView, missing: np.ndarray, prices: Prices) -> np.ndarray | None:
    """M: wait for the missing KV memory, which running requests free evenly over the time of one output."""
    short = missing - fleet.columns.free_tokens
    if largest(short) <= 0:
        return None
    np.maximum(short, 0.0, out=short)
    output_s = prices.output_s_per_token * fleet.columns.kv_tokens
    wait: np.ndarray = prices.memory * short / np.maximum(fleet.columns.used_tokens, 1.0) * output_s
    return wait


def _copy_value(cached: np.ndarray, prices: Prices) -> np.ndarray | None:
    """-V: the gain of one more copy, on replicas that hold less than the longest prefix that any replica holds."""
    longest = largest(cached)
    if longest <= 0 or prices.copies_s <= 0:
        return None
    k = np.count_nonzero(cached == longest)
    value: np.ndarray = (cached - longest) * (prices.copies_s / (k * (k + 1)) / longest)
    return value


def largest(values: np.ndarray) -> float:
    """Return the maximum of [n > 0] values. `argmax` takes a quarter of the time of `max`."""
    return float(values[values.argmax()])

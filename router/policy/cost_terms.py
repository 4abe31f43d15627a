"""The terms of the cost, for all replicas at once: `router/policy/cost.py` says what they are.

Twice, with the same bits: in C (`native/cost.c`), and in numpy for an installation without a compiler. What an
operation of numpy on a thousand numbers takes is mostly its start, so that its forty take several times as long.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.router import compiled_router
from quire.router.policy.columns import REPORT_S
from quire.router.policy.fleet_view import FleetView, prefill_work
from quire.router.policy.policy import MAX_RANKED

TERMS = (
    "wait_s",
    "prefill_s",
    "host_copy_s",
    "interference_s",
    "later_s",
    "decode_s",
    "eviction_s",
    "memory_s",
    "copy_value_s",
)

_NEEDS_REUSE = -1


class _Fleet(ctypes.Structure):
    """`struct fleet` of `native/cost.c`."""

    _fields_ = [
        ("columns", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("gpu", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        ("speed", ctypes.c_void_p),
        ("reuse", ctypes.c_void_p),
    ]


class _Found(ctypes.Structure):
    """`struct found`."""

    _fields_ = [
        ("copies", ctypes.c_double * 2),
        ("oldest_report_s", ctypes.c_double),
        ("terms", ctypes.c_double * len(TERMS) * MAX_RANKED),
        ("rows", ctypes.c_int32 * MAX_RANKED),
    ]


class Prices(NamedTuple):
    """What a cost is made of beside the columns: `struct prices` of `native/cost.c`.

    Attributes
    ----------
    per_context
        1 / the context at which a token is two of work.
    max_decay_s, head_done
        A reported queue has shrunk by at most so much, and the oldest unanswered request is done to this part.
    eta
        Weight of the interference.
    later, per_window
        kappa lambda / (1 - rho), and 1 / w0; 0: nobody comes.
    decode_s
        Seconds of all steps of a mean output for each token of KV that they read, weighted.
    eviction, memory
        Weights.
    output_s
        Seconds of a mean output for each token of KV.
    copies_s
        What all followers save if k (k + 1) is 1.
    """

    now_s: float
    prompt_tokens: float
    work_per_token: float
    per_context: float
    max_decay_s: float
    head_done: float
    eta: float
    later: float
    per_window: float
    decode_s: float
    eviction: float
    memory: float
    output_s: float
    copies_s: float


_PRICES = struct.Struct(f"{len(Prices._fields)}d")


class Priced(NamedTuple):
    """What a request costs.

    Attributes
    ----------
    wait_s, cost_s
        [n] float64: the first term; and the sum of all, less what a session makes its row cheaper by.
    oldest_report_s
        The time of the one that is longest ago.
    ranked
        The rows that cost least, cheapest first, and [ranked, TERMS] float64 seconds; None: not known, or chance has to
        decide on the first.
    terms
        Of some rows, [m] int32: [m, TERMS] float64 seconds. To be asked before the next request is priced.
    """

    wait_s: np.ndarray
    cost_s: np.ndarray
    oldest_report_s: float
    ranked: tuple[list[int], np.ndarray] | None
    terms: Callable[[np.ndarray], np.ndarray]


class Pricer:
    """Prices one request after the other.

    It keeps where the arrays of the last fleet lie: the next mostly has the same.
    """

    def __init__(self) -> None:
        self._fleet, self._found = _Fleet(), _Found()
        self._fleet_address = ctypes.addressof(self._fleet)
        self._found_address = ctypes.addressof(self._found)
        self._terms = np.frombuffer(self._found.terms).reshape(MAX_RANKED, -1)
        self._rows = memoryview(self._found.rows).cast("B").cast("i")
        self._some_evict = False  # as of the last request
        self._kept: tuple[FleetView, np.ndarray | None] | None = None
        self._columns: np.ndarray | None = None
        self._speed: np.ndarray | None = None

    def price(
        self,
        fleet: FleetView,
        speed: np.ndarray,
        prices: Prices,
        reuse_s: float,
        stickiness: float,
        tie_s: float,
    ) -> Priced:
        """Price a request on each replica.

        Parameters
        ----------
        fleet
            Not empty.
        speed
            [n] float64, seconds of a unit of work.
        reuse_s
            Typical time between two uses of a block.
        stickiness
            By this part of its prefill the session's row is cheaper.
        tie_s
            Costs that differ by no more are equal.
        """
        library = compiled_router.load()
        if library is None:
            return _by_numpy(fleet, speed, prices, reuse_s, stickiness)
        n, found = len(fleet), self._found
        reuse = _reuse(fleet, reuse_s) if self._some_evict else None
        self._point_to(fleet, speed, reuse)
        scalars = _PRICES.pack(*prices)
        numbers = np.empty((2, n))
        wait, cost = numbers[0], numbers[1]  # in a third of the time of `wait, cost = numbers`
        first = compiled_router.address(numbers)
        arguments = (
            *(self._fleet_address, n, scalars, fleet.session_row, stickiness, tie_s),
            *(first, first + 8 * n, self._found_address),
        )
        said = library.quire_price(*arguments)
        if said == _NEEDS_REUSE:
            reuse = _reuse(fleet, reuse_s)
            self._fleet.reuse = compiled_router.address(reuse)
            said = library.quire_price(*arguments)
        self._some_evict = reuse is not None
        self._kept = fleet, reuse  # `terms` has their addresses

        def terms(rows: np.ndarray) -> np.ndarray:
            values = np.empty((len(rows), len(TERMS)))
            where = (compiled_router.address(rows), len(rows), compiled_router.address(values))
            library.quire_terms(self._fleet_address, scalars, self._found_address, *where)
            return values

        ranked = None
        if said <= MAX_RANKED:  # no tie
            ranked = self._rows[:said].tolist(), self._terms[:said].copy()
        return Priced(wait, cost, found.oldest_report_s, ranked, terms)

    def _point_to(self, fleet: FleetView, speed: np.ndarray, reuse: np.ndarray | None) -> None:
        there, columns, address = self._fleet, fleet.columns, compiled_router.address
        if columns is not self._columns:
            self._columns = columns
            there.columns = address(columns[0])
            there.stride = columns.strides[0] // columns.itemsize
        if speed is not self._speed:
            self._speed = speed
            there.speed = address(speed)
        there.gpu = address(fleet.held)
        there.host = there.gpu + fleet.held.strides[0]
        there.reuse = None if reuse is None else address(reuse)


def _by_numpy(
    fleet: FleetView, speed: np.ndarray, prices: Prices, reuse_s: float, stickiness: float
) -> Priced:
    reuse = _reuse(fleet, reuse_s)
    nothing = np.zeros(len(fleet))  # what a term is that no replica has; it is not added
    host_copy, cached = nothing, fleet.gpu_tokens
    if largest(fleet.host_tokens) > 0:
        cached = cached + fleet.host_tokens
        host_copy = fleet.host_tokens * fleet.host_copy_s_per_token
    missing = prices.prompt_tokens - cached
    prefill = prefill_work(missing, cached, fleet.attention_context_tokens)
    prefill *= speed
    wait = _wait(fleet, speed, prices)
    cost = wait + prefill
    interference = prices.eta * prefill
    interference *= fleet.num_requests
    others = (
        host_copy,
        interference,
        _later(cost, prefill, prices) if prices.later else nothing,
        _decode(fleet, prices) if prices.decode_s else nothing,
        nothing if reuse is None else reuse * (missing * speed) * prices.eviction,
        _memory(fleet, missing, prices, nothing),
        _copy_value(cached, prices, nothing),
    )
    for term in others:
        if term is not nothing:
            cost += term
    if fleet.session_row >= 0:
        cost[fleet.session_row] -= stickiness * prefill[fleet.session_row]

    def terms(rows: np.ndarray) -> np.ndarray:
        return np.stack([term.take(rows) for term in (wait, prefill, *others)], axis=1)

    reports_s = fleet.columns[REPORT_S]
    return Priced(wait, cost, float(reports_s[reports_s.argmin()]), None, terms)


def _reuse(fleet: FleetView, reuse_s: float) -> np.ndarray | None:
    """[n] the chance that what goes were used again; None: no cache is full."""
    age_s = fleet.cache_age_s
    if age_s[age_s.argmin()] == math.inf:
        return None
    reuse = age_s * (-1.0 / reuse_s)
    return np.exp(reuse, out=reuse)


def _wait(fleet: FleetView, speed: np.ndarray, prices: Prices) -> np.ndarray:
    """W: what is still queued, by the report and by our own unanswered requests."""
    reported = fleet.reported_work * speed
    reported -= np.minimum(fleet.report_age_s, prices.max_decay_s)
    np.maximum(reported, 0.0, out=reported)
    reported += fleet.booked_work * speed
    # One prompt after the other is prefilled, mostly in their order: only the oldest can be partly done.
    head_done = fleet.head_work * speed
    head_done *= prices.head_done
    np.minimum(head_done, fleet.head_age_s, out=head_done)
    ours = fleet.unanswered_work * speed
    ours -= head_done
    return np.maximum(reported, ours, out=ours)


def _later(window: np.ndarray, prefill: np.ndarray, prices: Prices) -> np.ndarray:
    """Q: delay of those who arrive later, behind a window of W + P."""
    bounded = window * prices.per_window
    bounded += 1.0
    np.divide(window, bounded, out=bounded)
    bounded *= prefill
    bounded *= prices.later
    return bounded


def _decode(fleet: FleetView, prices: Prices) -> np.ndarray:
    """delta D: this request's steps read the others' KV, and theirs read its own."""
    read = fleet.num_requests * (0.5 * prices.prompt_tokens)
    read += fleet.mean_kv_tokens
    read *= prices.decode_s
    return read


def _memory(
    fleet: FleetView, missing: np.ndarray, prices: Prices, nothing: np.ndarray
) -> np.ndarray:
    """M: running requests give their memory back over the time of one output."""
    short = missing - fleet.free_tokens
    if largest(short) <= 0:
        return nothing
    np.maximum(short, 0.0, out=short)
    output_s = prices.output_s * fleet.kv_tokens
    return prices.memory * short / np.maximum(fleet.used_tokens, 1.0) * output_s


def _copy_value(cached: np.ndarray, prices: Prices, nothing: np.ndarray) -> np.ndarray:
    """-V: replicas that do not hold the longest prefix of it that anybody holds."""
    longest = largest(cached)
    if longest <= 0 or prices.copies_s <= 0:
        return nothing
    k = np.count_nonzero(cached == longest)
    return (cached - longest) * (prices.copies_s / (k * (k + 1)) / longest)


def largest(values: np.ndarray) -> float:
    """Its maximum, not empty: a third of the time of `max`, which sets up a reduction."""
    return float(values[values.argmax()])

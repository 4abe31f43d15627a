"""The terms of the cost, for all replicas at once: `router/cost.py` says what they are.

Twice, with the same bits: in C (`native/cost.c`), and in numpy for an installation without a compiler. What an
operation of numpy on a thousand numbers takes is mostly its start, so that its forty take several times as long.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.router import native_library
from quire.router.fleet import Fleet, prefill_work

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


_NUM_COPIES = 2  # numbers of `struct copies`
_FLEET = struct.Struct("PnPPPP")


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
        [n] float64: the first term, and the sum of all.
    terms
        Of some rows, [m] int32: [m, TERMS] float64 seconds.
    """

    wait_s: np.ndarray
    cost_s: np.ndarray
    terms: Callable[[np.ndarray], np.ndarray]


def price(fleet: Fleet, speed: np.ndarray, reuse: np.ndarray | None, prices: Prices) -> Priced:
    """Price a request on each replica.

    Parameters
    ----------
    fleet
        Not empty.
    speed
        [n] float64, seconds of a unit of work.
    reuse
        [n] float64, the chance that what it evicts were used again; None: nobody evicts.
    """
    library = native_library.load()
    if library is None:
        return _by_numpy(fleet, speed, reuse, prices)
    return _by_library(library, fleet, speed, reuse, prices)


def _by_library(
    library: ctypes.PyDLL, fleet: Fleet, speed: np.ndarray, reuse: np.ndarray | None, prices: Prices
) -> Priced:
    n, columns, address = len(fleet), fleet.columns, native_library.address
    known = _FLEET.pack(
        address(columns[0]),
        columns.strides[0] // columns.itemsize,
        address(fleet.gpu_tokens),
        address(fleet.host_tokens),
        address(speed),
        0 if reuse is None else address(reuse),
    )
    scalars = _PRICES.pack(*prices)
    found = np.empty(2 * n + _NUM_COPIES)
    wait_address = address(found)
    cost_address, copies_address = wait_address + 8 * n, wait_address + 16 * n
    library.quire_cost(known, n, scalars, wait_address, cost_address, copies_address)

    def terms(rows: np.ndarray) -> np.ndarray:
        values = np.empty((len(rows), len(TERMS)))
        num, kept = len(rows), (fleet, speed, reuse, found)  # `known` has their addresses
        library.quire_terms(known, scalars, copies_address, address(rows), num, address(values))
        del kept
        return values

    return Priced(found[:n], found[n : 2 * n], terms)


def _by_numpy(fleet: Fleet, speed: np.ndarray, reuse: np.ndarray | None, prices: Prices) -> Priced:
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

    def terms(rows: np.ndarray) -> np.ndarray:
        return np.stack([term.take(rows) for term in (wait, prefill, *others)], axis=1)

    return Priced(wait, cost, terms)


def _wait(fleet: Fleet, speed: np.ndarray, prices: Prices) -> np.ndarray:
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


def _decode(fleet: Fleet, prices: Prices) -> np.ndarray:
    """delta D: this request's steps read the others' KV, and theirs read its own."""
    read = fleet.num_requests * (0.5 * prices.prompt_tokens)
    read += fleet.mean_kv_tokens
    read *= prices.decode_s
    return read


def _memory(fleet: Fleet, missing: np.ndarray, prices: Prices, nothing: np.ndarray) -> np.ndarray:
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

"""Fleet views for the policies' tests, from a mapping of values for each replica."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from quire.router.policy.fleet_view import FleetView

_IDLE = {
    "gpu_tokens": 0.0,
    "host_tokens": 0.0,
    "report_age_s": 0.0,
    "reported_work": 0.0,
    "booked_work": 0.0,
    "unanswered_work": 0.0,
    "head_work": 0.0,
    "head_age_s": 0.0,
    "num_requests": 0.0,
    "kv_tokens": 0.0,
    "mean_kv_tokens": 0.0,
    "prefill_s_per_work": 1e-4,
    "host_copy_s_per_token": 1e-5,
    "cache_age_s": math.inf,
    "free_tokens": math.inf,
    "used_tokens": 0.0,
    "num_waiting": 0.0,
    "num_places": math.inf,
}


def idle(**columns):
    """Return the values of an idle replica, with these columns changed."""
    assert set(columns) <= set(_IDLE), columns
    return _IDLE | columns


def fleet_of(rows, num_prompt_tokens=1000, **facts):
    columns = {name: np.array([row[name] for row in rows], float) for name in _IDLE}
    # The last prompt token is always computed, as in `ReplicaTable`.
    columns["gpu_tokens"] = np.minimum(columns["gpu_tokens"], num_prompt_tokens - 1)
    columns["host_tokens"] = np.minimum(
        columns["host_tokens"], num_prompt_tokens - 1 - columns["gpu_tokens"]
    )
    speeds = columns["prefill_s_per_work"][columns["prefill_s_per_work"] > 0]
    median = float(np.median(speeds)) if len(speeds) else 0.0
    facts = {"attention_context_tokens": 1e9, "prior_s_per_work": median} | facts
    return FleetView.of([str(i) for i in range(len(rows))], columns, **facts)


_TOKENS = st.floats(0, 1e5)
_HELD = st.integers(0, 100_000).map(float)  # whole prompt tokens
_SECONDS = st.floats(0, 100)
COLUMNS = {
    "gpu_tokens": _HELD,
    "host_tokens": _HELD,
    "report_age_s": st.one_of(_SECONDS, st.just(math.inf)),
    "reported_work": _TOKENS,
    "booked_work": _TOKENS,
    "unanswered_work": _TOKENS,
    "head_work": _TOKENS,
    "head_age_s": _SECONDS,
    "num_requests": st.floats(0, 500),
    "kv_tokens": st.floats(0, 1e6),
    "mean_kv_tokens": st.floats(0, 1e6),
    "prefill_s_per_work": st.one_of(st.just(0.0), st.floats(1e-6, 1e-2)),
    "host_copy_s_per_token": st.floats(0, 1e-3),
    "cache_age_s": st.one_of(_SECONDS, st.just(math.inf)),
    "free_tokens": st.one_of(_TOKENS, st.just(math.inf)),
    "used_tokens": _TOKENS,
    "num_waiting": _TOKENS,
    "num_places": st.one_of(st.floats(-500, 500), st.just(math.inf)),
}
ROWS = st.fixed_dictionaries(COLUMNS)
FLEETS = st.lists(ROWS, max_size=20)

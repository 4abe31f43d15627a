"""The keys that the query tokens of a ragged batch see, as index arithmetic."""

from __future__ import annotations

import numpy as np


def query_rows(cu_q: np.ndarray, kv_len: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of every query token.

    Parameters
    ----------
    cu_q
        [rows + 1] int, row i has the query tokens [cu_q[i], cu_q[i + 1]).
    kv_len
        [rows] int, tokens in the cache, this step's included; the queries are the last ones.

    Returns
    -------
    Rows and positions, [tokens] int64 each.
    """
    q_len = np.diff(cu_q)
    row = np.repeat(np.arange(len(q_len)), q_len)
    first = kv_len - q_len - cu_q[:-1]
    return row, np.arange(cu_q[-1]) + np.repeat(first, q_len)


def first_key(position: np.ndarray, window: int | None, chunk: int | None) -> np.ndarray:
    """Position of the first key that a query at `position` sees; the result has the shape of `position`."""
    first = np.zeros_like(position)
    if window is not None:
        first = np.maximum(position - window + 1, 0)
    if chunk is not None:
        first = np.maximum(first, position // chunk * chunk)
    return first

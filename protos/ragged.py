"""Rows of different lengths in one flat array: row i has the values [cu[i], cu[i + 1]). `cu` None: one value each.

`cu` is [n + 1] int32 and starts with 0. Most steps give every row one token; they need no `cu`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np


def cumulated(counts: Sequence[int] | np.ndarray) -> np.ndarray | None:
    """`cu` of rows with these numbers of values; None if each has one."""
    num_values = np.asarray(counts, np.int32)
    if (num_values == 1).all():
        return None
    cu = np.zeros(len(num_values) + 1, np.int32)
    np.cumsum(num_values, out=cu[1:])
    return cu


def counts(num_rows: int, cu: np.ndarray | None) -> np.ndarray:
    """[num_rows] int32, number of values of each row."""
    return np.ones(num_rows, np.int32) if cu is None else np.diff(cu)


def offsets(counts: np.ndarray) -> np.ndarray:
    """[N] integers, index of each value in its row, for rows of so many values."""
    ends = np.cumsum(counts)
    index: np.ndarray = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return index


def fits(num_rows: int, num_values: int, cu: np.ndarray | None) -> bool:
    """Whether `cu` describes so many rows and values."""
    if cu is None:
        return num_rows == num_values
    if len(cu) != num_rows + 1 or cu[0] != 0 or cu[-1] != num_values:
        return False
    return bool((np.diff(cu) >= 0).all())


def select(
    values: np.ndarray, cu: np.ndarray | None, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """The values and `cu` of some rows, [num_rows] bool."""
    if cu is None:
        return values[rows], None
    num_values = np.diff(cu)
    return values[np.repeat(rows, num_values)], cumulated(num_values[rows])


def lists(values: np.ndarray, cu: np.ndarray | None) -> list[list[Any]]:
    """The values of each row as Python lists."""
    if cu is None:
        columns: list[list[Any]] = values[:, None].tolist()
        return columns
    flat = values.tolist()
    return [flat[begin:end] for begin, end in itertools.pairwise(cu.tolist())]

"""The tuning benchmark's choice of candidates."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from quire.kernels import tuning
from tests.perf.gpu.kernels import gpu_tiles


def row(**candidates):
    """A row; each candidate is (microseconds, difference from the current results), or None if it failed."""
    found = {
        name: {"error": "out of shared memory"} if x is None else {"us": x[0], "off": x[1]}
        for name, x in candidates.items()
    }
    return {"us": found["today"]["us"], "candidates": found}


def test_the_best_candidate_is_the_best_on_average_and_right_everywhere():
    rows = [
        row(
            today=(100, 0),
            even=(80, 0.01),
            once=(40, 0),
            wrong=(1, 0.5),
            nan=(1, math.nan),
            big=None,
        ),
        row(today=(10, 0), even=(8, 0), once=(21, 0), wrong=(9, 0), nan=(9, 0), big=(1, 0)),
    ]
    best, gain = gpu_tiles.best_overall(rows)
    assert best == "even" and gain == pytest.approx(1.25)
    assert gpu_tiles.best_overall([row(today=(5, 0), slow=(6, 0))]) == ("today", 1.0)


def test_an_entry_reads_like_one_of_the_table():
    config = tuning.prefill_config("sm_90", 128, torch.bfloat16)
    line = gpu_tiles.entry("sm_90", 128, config)
    assert line in Path(tuning.__file__).read_text()


@pytest.mark.parametrize("changes", [gpu_tiles.PREFILL, gpu_tiles.DECODE])
def test_candidates_change_fields_that_the_configuration_has(changes):
    of_arch = tuning.prefill_config if changes is gpu_tiles.PREFILL else tuning.decode_config
    today = of_arch("sm_90", 128, torch.bfloat16)
    configs = gpu_tiles.with_changes(today, changes)
    assert configs.pop(gpu_tiles.TODAY) == today
    assert configs and len(set(configs.values())) == len(configs)
    assert today not in configs.values()

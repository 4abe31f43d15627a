"""Counter-based noise: the exact numbers, and tests of their independence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.sampling.noise import gumbel, noise_keys, uniform
from tests.kernels import reference

torch.set_num_threads(1)
DRAWS = 100_000


def keys_of(seed, choice, position) -> np.ndarray:
    """Keys of one row or of several rows."""
    seed, choice, position = np.atleast_1d(*np.broadcast_arrays(seed, choice, position))
    return noise_keys(seed.astype(np.uint64), choice, position)


@given(key=st.integers(0, 2**64 - 1), token_id=st.integers(0, 300))
def test_uniform_equals_the_integer_reference(key, token_id):
    u = uniform(np.array([key], np.uint64), 301)[0, token_id].item()
    assert u == reference.uniform_noise(token_id, key & 0xFFFFFFFF, key >> 32)
    assert 0.0 < u < 1.0


def test_large_token_ids_equal_the_integer_reference():
    key = int(keys_of(2**64 - 1, 3, 10**6)[0])
    u = uniform(np.array([key], np.uint64), 200_000)[0]
    for token_id in (65_535, 131_071, 151_936, 199_999):
        assert u[token_id].item() == reference.uniform_noise(token_id, key & 0xFFFFFFFF, key >> 32)


def test_gumbel_is_finite_at_both_ends_of_the_uniform():
    ends = torch.tensor([0.5, 2**23 - 0.5]) * 2.0**-23
    assert ends[0] > 0 and ends[1] < 1
    assert torch.isfinite(-torch.log(-torch.log(ends))).all()
    assert torch.isfinite(gumbel(keys_of(0, 0, np.arange(64)), 4096)).all()


def test_a_row_does_not_depend_on_the_other_rows_nor_on_the_vocabulary():
    keys = keys_of(5, 0, np.arange(40))
    together = gumbel(keys, 5000)
    for row in (0, 17, 39):
        assert torch.equal(gumbel(keys[row : row + 1], 5000)[0], together[row])
        assert torch.equal(gumbel(keys[row : row + 1], 3001)[0], together[row, :3001])


def test_keys_differ_for_every_seed_choice_and_position():
    grid = np.meshgrid(np.arange(40), np.arange(40), np.arange(40))
    keys = keys_of(*(axis.reshape(-1) for axis in grid))
    assert len(np.unique(keys)) == 40**3
    assert keys_of(2**63, 0, 0)[0] != keys_of(0, 0, 0)[0]


def chi_squared_z(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chi-squared statistic as standard deviations from its mean (Wilson-Hilferty)."""
    freedom = len(expected) - 1
    ratio = ((observed - expected) ** 2 / expected).sum() / freedom
    spread = 2 / (9 * freedom)
    return (ratio ** (1 / 3) - (1 - spread)) / spread**0.5


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_uniform_is_uniform_along_each_part_of_the_key(axis):
    columns = dict(seed=7, choice=0, position=0) | {axis: np.arange(DRAWS // 50)}
    u = uniform(keys_of(**columns), 50).numpy().reshape(-1)
    observed = np.histogram(u, bins=256, range=(0, 1))[0]
    assert abs(chi_squared_z(observed, np.full(256, len(u) / 256))) < 4


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_gumbel_argmax_draws_from_the_softmax(axis):
    torch.manual_seed(0)
    logits = torch.randn(40) * 1.5
    columns = dict(seed=2**63 + 11, choice=0, position=0) | {axis: np.arange(DRAWS)}
    tokens = (logits + gumbel(keys_of(**columns), 40)).argmax(-1).numpy()
    observed = np.bincount(tokens, minlength=40)
    assert abs(chi_squared_z(observed, torch.softmax(logits, 0).numpy() * DRAWS)) < 4


@pytest.mark.parametrize("step", [dict(seed=1), dict(choice=1), dict(position=1), dict(seed=2**32)])
def test_neighbouring_keys_are_uncorrelated(step):
    base = dict(seed=np.arange(500) * 7, choice=0, position=np.arange(500))
    other = {name: base[name] + step.get(name, 0) for name in base}
    a, b = (uniform(keys_of(**columns), 200).numpy().reshape(-1) for columns in (base, other))
    # The correlation of n independent pairs has a standard deviation of n^-1/2.
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / len(a) ** 0.5
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 4 / len(a) ** 0.5

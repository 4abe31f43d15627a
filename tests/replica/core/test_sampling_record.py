"""The arrays that follow from `SamplingParams`: every parameter with a column reaches its record and the kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quire.kernels.sampling import sampling_tile
from quire.protos.errors import InvalidRequest
from quire.protos.field_checks import Range
from quire.protos.sampling_params import Column, SamplingParams, annotated
from quire.replica.core.sampling_checks import check_params
from quire.replica.core.sampling_record import LIMITS, RECORD, limits_of, record_of, records

COLUMNS = annotated(SamplingParams, Column)
BOUNDS = annotated(SamplingParams, Range)


def inside(name: str) -> float:
    """A value of a parameter inside its bounds that is not its default and has no rounding error in float32."""
    return 3 if BOUNDS[name].is_integer else 0.25


def test_the_kernels_read_the_words_that_a_record_begins_with():
    assert LIMITS.names == sampling_tile.LIMITS
    assert [LIMITS.fields[name][1] for name in LIMITS.names] == [0, 4, 8, 12]
    assert RECORD.names[: len(LIMITS.names)] == LIMITS.names


@pytest.mark.parametrize("name", COLUMNS)
def test_a_parameter_reaches_its_column_and_no_other(name):
    params = SamplingParams(**{name: inside(name)})
    found, default = records(2), records(1)[0]
    found[1] = record_of(params)
    assert found[0] == default
    assert {other for other in RECORD.names if found[1][other] != default[other]} == {name}
    assert found[1][name] == inside(name)
    if COLUMNS[name].on_device:
        word = np.array(inside(name), COLUMNS[name].dtype).view(np.int32)
        assert limits_of(found)[1][LIMITS.names.index(name)] == word


@pytest.mark.parametrize("name", BOUNDS)
def test_every_number_is_checked(name):
    bounds = BOUNDS[name]
    params = SamplingParams(max_tokens=4)
    check_params(dataclasses.replace(params, **{name: inside(name)}), 100, [2])
    for wrong in (bounds.low - 1, "1", 2**70):
        if wrong == 2**70 and bounds.high is None:
            continue
        with pytest.raises(InvalidRequest, match=f"{name} must be"):
            check_params(dataclasses.replace(params, **{name: wrong}), 100, [2])
    if getattr(params, name) is not None:
        with pytest.raises(InvalidRequest, match=f"{name} must be .*, got None"):
            check_params(dataclasses.replace(params, **{name: None}), 100, [2])

"""A plot without data is not drawn, and a sentence gives the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cluster.bench.load.cache_watch import CacheSample
from quire.cluster.bench.load.load_generator import Record, Run
from quire.cluster.bench.results import plots
from quire.cluster.bench.results.measures import Slo, summarise

pytest.importorskip("matplotlib")

ANSWERED = Record(0.0, 0.0, (0.5, 0.75, 1.0), (1, 1, 1), 100, 40)
IN_ONE_PIECE = Record(0.0, 0.0, (0.5,), (3,), 100, 0)
FAILED = Record(0.0, 0.0, error="status 500")
WATCHED = [CacheSample(at_s, 8, 1, 1, 10) for at_s in (10.0, 10.5)]


def row(*records: Record) -> dict:
    return {"load": "1/s", **summarise(Run(list(records), 1.0), Slo())}


def frames(path: Path) -> int:
    """Number of panels of a figure: each is 7 inches wide at 110 dpi."""
    width = int.from_bytes(path.read_bytes()[16:20], "big")
    assert width % 770 == 0
    return width // 770


def test_a_run_with_all_data_has_all_frames(tmp_path):
    rows = [row(ANSWERED)]
    latency, goodput, cache = (tmp_path / f"{name}.png" for name in ("latency", "goodput", "cache"))
    assert plots.throughput_and_latency(rows, latency) == []
    assert plots.goodput(rows, "in time", goodput) == []
    assert plots.cache(WATCHED, Run([ANSWERED], 1.0), 10.0, cache) == []
    assert [frames(path) for path in (latency, goodput, cache)] == [3, 1, 2]


def test_a_cache_that_was_not_watched_has_no_frame(tmp_path):
    path = tmp_path / "cache.png"
    (sentence,) = plots.cache([], Run([ANSWERED], 1.0), 10.0, path)
    assert frames(path) == 1
    assert sentence == (
        "cache.png: blocks over time not drawn: the cache was not watched; give --watch HOST:PORT of Quire's gRPC"
    )


@pytest.mark.parametrize("record", [IN_ONE_PIECE, Record(0.0, 0.0, (0.5, 0.5), (1, 1), 9, 0)])
def test_answers_without_time_between_pieces_have_no_frame_for_it(tmp_path, record):
    path = tmp_path / "latency.png"
    (sentence,) = plots.throughput_and_latency([row(record)], path)
    assert frames(path) == 2
    assert sentence.startswith("latency.png: time between pieces not drawn: every answer came")


def test_a_run_without_answers_has_no_file_and_leaves_no_old_one(tmp_path):
    rows, path = [row(FAILED)], tmp_path / "x.png"
    for draw, num_parts in (
        (lambda: plots.throughput_and_latency(rows, path), 3),
        (lambda: plots.goodput(rows, "in time", path), 1),
        (lambda: plots.cache([], Run([FAILED], 1.0), 0.0, path), 2),
        (lambda: plots.comparison([], path), 1),
    ):
        path.write_bytes(b"of an earlier run")
        assert len(draw()) == num_parts
        assert not path.exists()


def test_of_several_loads_those_with_data_are_drawn(tmp_path):
    rows = [row(ANSWERED), {**row(FAILED), "load": "2/s"}]
    assert plots.throughput_and_latency(rows, tmp_path / "x.png") == []
    assert plots.goodput(rows, "in time", tmp_path / "y.png") == []

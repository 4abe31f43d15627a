"""Workloads are reproducible and differ between repetitions; invalid ones are refused by name."""

from __future__ import annotations

import gzip
import json
import statistics

import pytest

from quire.cluster.bench.load.workloads import (
    FIRST_TOKEN_ID,
    WORKLOADS,
    Lengths,
    PrefixMix,
    TraceScale,
    Workload,
    closed,
    poisson,
    read_trace,
    sessions,
)

NOTHING_SHARED = PrefixMix()


def test_prompts_are_the_same_again_and_new_in_every_repetition():
    workload = WORKLOADS["W4"]
    prompts = workload.prompts(0, 32_000)
    assert prompts == workload.prompts(0, 32_000)
    assert [len(p) for p in prompts] == [800] * 32
    assert len({tuple(p[:768]) for p in prompts}) == 1
    assert len({tuple(p[768:]) for p in prompts}) == 32
    other = workload.prompts(1, 32_000)
    assert prompts[0][:32] != other[0][:32]
    assert all(FIRST_TOKEN_ID <= t < 400 for p in workload.prompts(0, 400) for t in p)


def test_a_workload_can_be_written_down():
    assert Workload.parse("W5") is WORKLOADS["W5"]
    assert Workload.parse("32x768+32->16") == Workload("32x768+32->16", 32, 768, 32, 16)
    assert Workload.parse("1x128->128").shared_tokens == 0
    for text in ("W9", "3x->1", "0x1->1", "x", "1x1+->1"):
        with pytest.raises(ValueError, match=r"workload: must be one of W1, .* got"):
            Workload.parse(text)


def test_poisson_gaps_are_exponential():
    requests = poisson(50.0, 100.0, Lengths(), NOTHING_SHARED, 400)
    times = [r.at_s for r in requests]
    assert times == sorted(times) and times[-1] < 100
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = statistics.fmean(gaps)
    # 5000 gaps: the mean has a standard error of 1.4%, the deviation equals the mean.
    assert mean == pytest.approx(0.02, rel=0.06)
    assert statistics.pstdev(gaps) == pytest.approx(mean, rel=0.1)
    assert poisson(50.0, 100.0, Lengths(), NOTHING_SHARED, 400) == requests
    assert poisson(50.0, 100.0, Lengths(), NOTHING_SHARED, 400, seed=1) != requests


def test_prefixes_are_shared_by_rank():
    requests = closed(3000, Lengths((4, 4), (1, 8)), PrefixMix(3, 10), 400)
    counts: dict[tuple[int, ...], int] = {}
    for request in requests:
        assert len(request.prompt_ids) == 14 and 1 <= request.output_tokens <= 8
        counts[request.prompt_ids[:10]] = counts.get(request.prompt_ids[:10], 0) + 1
    shares = sorted((n / 3000 for n in counts.values()), reverse=True)
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.04)


def test_a_session_shares_its_prefix_once_and_then_thinks():
    talks = sessions(200, 3, 10.0, 0.5, Lengths((4, 4)), PrefixMix(1, 6), 400)
    assert all([len(t.prompt_ids) for t in turns] == [10, 4, 4] for turns in talks)
    assert [turns[0].at_s for turns in talks] == sorted(turns[0].at_s for turns in talks)
    pauses = [t.at_s for turns in talks for t in turns[1:]]
    assert statistics.fmean(pauses) == pytest.approx(0.5, rel=0.2)
    assert {t.session for t in talks[7]} == {"session-7"}


def test_a_trace_is_replayed_at_its_speed_and_shares_what_was_shared(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"at_s": 9.0, "prompt_tokens": 5, "output_tokens": 2},
        {"timestamp": 5000, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 7000, "input_length": 700, "output_length": 3, "hash_ids": [1, 3]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    first, second, third = read_trace(path, 400, speed=2.0)
    assert [r.at_s for r in (first, second, third)] == [0.0, 1.0, 2.0]
    assert [len(r.prompt_ids) for r in (first, second, third)] == [600, 700, 5]
    assert first.prompt_ids[:512] == second.prompt_ids[:512]
    assert first.prompt_ids[512:] != second.prompt_ids[512:600]
    assert len(read_trace(path, 400, limit=2)) == 2


def test_a_trace_in_small_shares_the_same_part_of_its_prompts(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 30, "hash_ids": [1, 2]},
        {"timestamp": 1, "input_length": 1300, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 2, "input_length": 5120, "output_length": 3, "hash_ids": list(range(10))},
        {"timestamp": 3, "input_length": 2, "output_length": 3, "hash_ids": [4]},
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    scale = TraceScale(block_tokens=64, output_share=0.1, max_tokens=200)
    requests = read_trace(path, 400, scale=scale)
    assert [(len(r.prompt_ids), r.output_tokens) for r in requests] == [(128, 3), (162, 1), (1, 1)]
    assert requests[0].prompt_ids == requests[1].prompt_ids[:128]
    assert len(read_trace(path, 400, limit=2, scale=TraceScale(64))) == 2
    assert len(read_trace(path, 400)) == 4
    with pytest.raises(ValueError, match="block_tokens: must be from 1 to 512, got 513"):
        TraceScale(513)
    with pytest.raises(ValueError, match="output_share: must be above 0 and at most 1, got 0"):
        TraceScale(output_share=0.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 1: KeyError"),
        ('{"at_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "lengths >= 1 wanted"),
        ('{"at_s": 0, "prompt_tokens": 513, "output_tokens": 1, "hash_ids": [1]}', "hash_ids"),
        ("", "no requests"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_trace(path, 400)


def test_numbers_out_of_their_bounds_are_named():
    with pytest.raises(ValueError, match="rate_per_s: must be > 0, got 0"):
        poisson(0, 1, Lengths(), NOTHING_SHARED, 400)
    with pytest.raises(ValueError, match="prompt_tokens: must be LOW-HIGH"):
        Lengths((5, 4))
    with pytest.raises(ValueError, match="vocab_size: must be > 300, got 300"):
        closed(1, Lengths(), NOTHING_SHARED, 300)

"""The autoscaling policy: as many replicas as the targets ask for, and no swinging."""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given
from ray.serve.config import AutoscalingPolicy

from quire.cluster import app
from quire.cluster.autoscaling import ScaleOnEngineLoad
from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.config_problems import ConfigError

TARGETS = dict(target_queued_prefill_s=2.0, target_kv_in_use=0.8, target_requests=10.0)


def context(current: int, **metrics: list[float]) -> SimpleNamespace:
    """Metrics by name, one value for each replica that reports."""
    by_replica = {name: dict(enumerate(values)) for name, values in metrics.items()}
    return SimpleNamespace(
        current_num_replicas=current, target_num_replicas=current, aggregated_metrics=by_replica
    )


def wanted(current: int, **metrics: list[float]) -> int:
    return ScaleOnEngineLoad(**TARGETS)(context(current, **metrics))[0]


@pytest.mark.parametrize(
    ("current", "metrics", "replicas"),
    [
        (2, {"queued_prefill_s": [3.0, 3.0]}, 3),
        (2, {"queued_prefill_s": [1.0, 2.0], "kv_in_use": [0.9, 0.9]}, 3),
        (2, {"num_requests": [25, 5], "kv_in_use": [0.1, 0.1]}, 3),
        (2, {"queued_prefill_s": [0.0, 0.0], "kv_in_use": [0.0, 0.0]}, 1),
        (4, {"num_requests": [10, 10, 5, 0]}, 4),
        (4, {"num_requests": [10, 6, 0, 0]}, 2),
        (1, {"queued_prefill_s": [100.0]}, 2),
        (4, {"queued_prefill_s": [100.0] * 4}, 8),
    ],
)
def test_the_most_pressing_target_decides(current, metrics, replicas):
    assert wanted(current, **metrics) == replicas


def test_no_more_are_asked_for_before_the_last_ones_are_there():
    starting = context(4, queued_prefill_s=[50.0, 50.0])
    starting.current_num_replicas = 2
    assert ScaleOnEngineLoad(**TARGETS)(starting)[0] == 4


@pytest.mark.parametrize("metrics", [None, {}, {"ongoing_requests": {0: 5.0}}])
def test_without_reports_nothing_changes(metrics):
    silent = SimpleNamespace(
        current_num_replicas=3, target_num_replicas=3, aggregated_metrics=metrics
    )
    assert ScaleOnEngineLoad(**TARGETS)(silent) == (3, {})


@given(
    current=st.integers(1, 50),
    requests=st.lists(st.floats(0, 1000), min_size=1, max_size=50),
    kv=st.lists(st.floats(0, 1), min_size=1, max_size=50),
)
def test_a_decision_that_was_carried_out_is_not_taken_back(current, requests, kv):
    """With the same load spread over the new number: it grows until it fits, and then it stays."""
    for _ in range(12):
        new = wanted(current, num_requests=requests, kv_in_use=kv)
        assert 1 <= new <= max(2 * current, current + 1)
        if new == current:
            break
        shrinks, current = new < current, new
        if shrinks:
            assert wanted(current, num_requests=requests, kv_in_use=kv) <= current
    load = max(sum(requests) / 10, sum(kv) / 0.8)
    assert current >= load - 1e-6


def test_more_load_never_wants_fewer():
    for current in (1, 4, 16):
        counts = [wanted(current, num_requests=[n / 4]) for n in range(2000)]
        assert counts == sorted(counts)


def test_serve_ships_the_policy_by_value():
    policy = AutoscalingPolicy(
        policy_function="quire.cluster.autoscaling:ScaleOnEngineLoad", policy_kwargs=TARGETS
    )
    assert policy.get_policy()(**TARGETS)(context(2, num_requests=[30, 0]))[0] == 3


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (dict.fromkeys(TARGETS), "at least one target"),
        (TARGETS | {"target_kv_in_use": 0}, "kv_in_use must be above 0, got 0"),
    ],
)
def test_targets_are_checked(targets, message):
    with pytest.raises(ValueError, match=message):
        ScaleOnEngineLoad(**targets)


def test_the_arguments_become_serves_autoscaling_configuration():
    config = AppConfig.from_args(
        {"replicas": 2, "autoscaling": {"max_replicas": 8, "target_requests": 5.0}}
    )
    options = app._num_replicas(config)
    assert set(options) == {"autoscaling_config"}, "Serve takes either that or a number"
    scaling = options["autoscaling_config"]
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (1, 2, 8)
    assert scaling.downscale_delay_s == config.autoscaling.downscale_delay_s
    policy = scaling.policy.get_policy()(**scaling.policy.policy_kwargs)
    assert policy(context(2, num_requests=[5, 5.5]))[0] == 3
    assert app._num_replicas(AppConfig.from_args({"replicas": 3})) == {"num_replicas": 3}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_replica": 8}, "autoscaling.max_replica: unknown key; did you mean 'max_replicas'?"),
        ({"min_replicas": 5}, "min_replicas (5) must be at most max_replicas (4)"),
        (
            {"min_replicas": 3},
            "autoscaling.min_replicas (3) to autoscaling.max_replicas (4), got 2",
        ),
        (
            {"target_queued_prefill_s": None, "target_kv_in_use": None},
            "at least one target_* must be given",
        ),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(args, message):
    with pytest.raises(ConfigError) as caught:
        AppConfig.from_args({"replicas": 2, "autoscaling": args})
    assert message in str(caught.value)

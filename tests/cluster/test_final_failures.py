"""A replica that can never start is tried once: on Ray Serve's own state of a deployment."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.serve._private.deployment_state import DeploymentState

from quire.cluster.proxies import ray_proxies
from quire.replica.checkpoint.checkpoint import CheckpointError, DownloadError
from quire.replica.serving.final_errors import CannotStart, final_errors, reason_of


class Status:
    """What Serve shows of a deployment."""

    message = ""

    def update_message(self, message: str) -> Status:
        self.message = message
        return self


@pytest.fixture
def state(monkeypatch) -> DeploymentState:
    """Of a version that nothing has run of: two replicas, Serve's default of three attempts for each."""
    for name in ("_failed_to_start_threshold", "record_replica_startup_failure"):
        monkeypatch.setattr(DeploymentState, name, getattr(DeploymentState, name))
    ray_proxies.end_final_failures()
    state = object.__new__(DeploymentState)
    state._target_state = SimpleNamespace(
        target_num_replicas=2,
        rolling_update=False,
        rolling_update_failed=False,
        info=SimpleNamespace(deployment_config=SimpleNamespace(max_constructor_retry_count=20)),
    )
    state._replica_failure_count, state._replica_failure_message = 0, None
    state._replica_has_started = False
    state._curr_status_info = Status()
    return state


def traceback_of(error: Exception) -> str:
    return (
        f"ray::ServeReplica()\n  File x\nquire.replica.final_errors.{type(error).__name__}: {error}"
    )


def test_a_final_failure_ends_the_attempts_and_its_reason_is_the_message(state):
    with pytest.raises(CannotStart) as caught, final_errors("replica"):
        raise CheckpointError("no folder /models/x")
    state.record_replica_startup_failure(traceback_of(caught.value))
    assert state._replica_startup_failing()
    assert state._replica_failure_count == 1
    message = state._curr_status_info.message
    assert message.endswith("0 more time(s). Error:\nCannotStart: " + str(caught.value))
    assert "no folder /models/x" in message and "on node '" in message


def test_any_other_failure_keeps_serves_attempts(state):
    for count in range(1, 7):
        assert not state._replica_startup_failing()
        state.record_replica_startup_failure("RuntimeError: the node is gone")
        assert state._replica_failure_count == count
    assert state._replica_startup_failing()


def test_a_version_that_has_run_keeps_its_attempts(state):
    state._replica_has_started = True
    state.record_replica_startup_failure(traceback_of(CannotStart("out of memory")))
    assert not state._replica_startup_failing()


def test_a_new_deployment_starts_over(state):
    state.record_replica_startup_failure(traceback_of(CannotStart("no folder")))
    state._replica_failure_count, state._replica_failure_message = 0, None  # as Serve resets it
    state.record_replica_startup_failure("RuntimeError: other")
    assert not state._replica_startup_failing()


def test_a_download_may_succeed_later():
    with pytest.raises(DownloadError), final_errors("replica"):
        raise DownloadError("no route to the hub")


def test_the_reason_is_what_follows_the_last_mark():
    text = "RuntimeError: CannotStart: no\n" + traceback_of(CannotStart("two\nlines")) + "\n"
    assert reason_of(text) == "two\nlines"
    assert reason_of("RuntimeError: no mark") is None

"""How `quire drain-node` waits. `tests/chaos/test_node_drain.py` drains real nodes under streams."""

from __future__ import annotations

import pytest

from quire.cluster.drain_command import POLL_S, DrainError, drain


class Nodes:
    """A node of which the GCS answers what the test says, one answer for each question."""

    def __init__(self, *answers: list[str] | Exception, refusal: Exception | None = None):
        self.answers = list(answers)
        self.refusals = [] if refusal is None else [refusal]
        self.requests: list[str] = []

    def request(self, message: str, deadline_ms: int) -> None:
        if self.refusals:
            raise self.refusals.pop()
        self.requests.append(message)

    def left(self) -> list[str]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def run(nodes: Nodes, deadline_s: float = 60.0) -> tuple[bool, float, list[str]]:
    """The result, the seconds that it took, and what was printed."""
    clock, lines = [100.0], []

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    result = drain(nodes, "the pod ends", deadline_s, lines.append, lambda: clock[0], sleep)
    return result, clock[0] - 100.0, lines


def test_it_waits_until_nothing_is_left() -> None:
    router, replica = "ServeReplica:quire:Router", "ServeReplica:quire:Replica"
    nodes = Nodes([router, replica, replica], [router, replica, replica], [router], [])
    result, seconds, lines = run(nodes)
    assert result
    assert seconds == 3 * POLL_S
    assert nodes.requests == ["the pod ends"]
    # Each state once.
    assert lines == [
        f"0 s: left: 2 {replica}, 1 {router}",
        f"1 s: left: 1 {router}",
        "2 s: nothing is left on the node",
    ]


def test_it_returns_at_the_deadline() -> None:
    result, seconds, lines = run(Nodes(["HAProxyManager"]), deadline_s=30.0)
    assert not result
    assert 30.0 - POLL_S <= seconds <= 30.0
    assert lines[-1].endswith("the deadline has come")


def test_it_asks_again_while_the_gcs_restarts() -> None:
    nodes = Nodes(TimeoutError("no GCS"), ["HAProxyManager"], [], refusal=TimeoutError("no GCS"))
    result, _, lines = run(nodes)
    assert result
    assert nodes.requests == ["the pod ends"]
    assert lines[0] == "0 s: the GCS does not answer: no GCS"


def test_it_does_not_wait_for_a_node_that_is_not_drained() -> None:
    with pytest.raises(DrainError, match="unknown"):
        run(Nodes([], refusal=DrainError("unknown")))

"""On which nodes TLS listeners are kept. `tests/chaos/test_tls_drain.py` drains a real node."""

from __future__ import annotations

from quire.cluster.tls.tls_listeners import kept_nodes


def test_nodes_that_drain_or_are_dead_need_no_listener() -> None:
    nodes = [
        {"NodeID": name, "NodeManagerHostname": f"host-{name}", "Alive": name != "dead"}
        for name in ("a", "b", "dead")
    ]
    assert kept_nodes(nodes, {}) == {"a": "host-a", "b": "host-b"}
    assert kept_nodes(nodes, {"b": 0}) == {"a": "host-a"}

"""The benchmark of a new router's start, at a size that takes a second."""

import json

from tests.perf.router import router_rebuild


def test_a_new_router_learns_all_caches_and_serves_meanwhile(tmp_path, monkeypatch):
    out = tmp_path / "result.json"
    sizes = ["--blocks", "60000", "--replicas", "4", "--rate", "300"]
    monkeypatch.setattr("sys.argv", ["router_rebuild", *sizes, "--out", str(out)])
    assert router_rebuild.main() == 0
    bars = {bar["name"]: bar for bar in json.loads(out.read_text())["bars"]}
    assert bars.keys() == {
        "router/rebuild",
        "router/rebuild_hits_of_full",
        "router/rebuild_late_p99",
    }
    assert bars["router/rebuild"]["details"]["blocks"] >= 60_000
    hits = bars["router/rebuild_hits_of_full"]["details"]
    assert hits["requests"] > 0
    # A full index finds every prompt: each is held somewhere.
    assert hits["hits_afterwards"] > 0.99

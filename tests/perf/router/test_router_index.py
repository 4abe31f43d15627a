"""The benchmark of the router's index, at a size that takes about a second."""

import json

import pytest

from quire.router import compiled_router
from tests.perf.router import router_index


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Path of a small run's result."""
    out = tmp_path_factory.mktemp("router_index") / "result.json"
    arguments = ["router_index", "--blocks", "3000", "--replicas", "5", "--decisions", "20"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [*arguments, "--out", str(out)])
        assert router_index.main() == 0
    return out


def test_it_measures_what_its_bars_name(result):
    written = json.loads(result.read_text())
    sizes = [(row["replicas"], row["blocks"] >= 3000) for row in written["curve"]]
    assert sizes == [(4, True), (5, True)]
    for row in (*written["curve"], written["without_compiler"]):
        parts = sum(row[f"{part}_p50_us"] for part in ("hash", "match", "score"))
        assert row["decision_p50_us"] == pytest.approx(parts, rel=0.5)
        assert row["events_per_s"].keys() == {"1", "4", "16", "64", "256", "4096"}
    ways = {bar["name"].rpartition("/")[0] for bar in written["bars"]}
    compiled = {router_index.COMPILED} if compiled_router.load() is not None else set()
    assert ways == {*compiled, router_index.PLAIN}
    assert all(bar["value"] is not None for bar in written["bars"])


def test_it_draws_a_result(result, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="of the extra `bench`")
    picture = tmp_path / "result.svg"
    monkeypatch.setattr("sys.argv", ["router_index", "--out", str(result), "--plot", str(picture)])
    assert router_index.main() == 0
    assert picture.read_text().count("<svg") == 1

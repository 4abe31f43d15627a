"""The benchmark of the router's index, at a size that takes a second."""

import json

import pytest

from quire.bench import router_index


def test_it_measures_what_its_bars_name_and_draws_it(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="of the extra `bench`")
    out, picture = tmp_path / "result.json", tmp_path / "result.svg"
    arguments = ["router_index", "--blocks", "3000", "--replicas", "5", "--decisions", "20"]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(out)])
    assert router_index.main() == 0
    result = json.loads(out.read_text())
    assert [(row["replicas"], row["blocks"] >= 3000) for row in result["curve"]] == [
        (4, True),
        (5, True),
    ]
    for row in result["curve"]:
        parts = sum(row[f"{part}_p50_us"] for part in ("hash", "match", "score"))
        assert row["decision_p50_us"] == pytest.approx(parts, rel=0.5)
        assert row["events_per_s"].keys() == {"1", "4", "16", "64", "256", "4096"}
    assert all(bar["value"] is not None for bar in result["bars"])
    monkeypatch.setattr("sys.argv", ["router_index", "--out", str(out), "--plot", str(picture)])
    assert router_index.main() == 0
    assert picture.read_text().count("<svg") == 1

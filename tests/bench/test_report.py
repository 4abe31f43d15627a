import json

import pytest

from quire.bench import report
from quire.bench.report import Bar, Spread


def test_a_spread_is_of_what_was_measured():
    values = [5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 6.0, 7.0, 8.0, 10.0, 11.0]
    spread = Spread.of(values)
    assert (spread.min, spread.median, spread.p90, spread.num) == (1.0, 6.0, 10.0, 11)
    with pytest.raises(ValueError, match="no measurements"):
        Spread.of([])


@pytest.mark.parametrize(
    ("value", "at_most", "holds"),
    [(0.1, True, True), (0.11, True, False), (0.1, False, True), (0.09, False, False)],
)
def test_a_bar_holds_up_to_its_goal(value, at_most, holds):
    bar = Bar("a/b", value, "ms", 0.1, at_most)
    assert bar.holds is holds
    assert bar.to_json()["holds"] is holds
    assert bar.to_json()["goal"] == ("<= 0.1" if at_most else ">= 0.1")


def test_what_was_not_measured_neither_holds_nor_fails(tmp_path, capsys):
    bar = Bar("gpu/decode", None, "%", 90, at_most=False)
    assert bar.holds is None
    report.write(tmp_path / "result.json", "make gpu-kernels", [bar])
    row = json.loads((tmp_path / "result.json").read_text())["bars"][0]
    assert row == {
        "name": "gpu/decode",
        "value": None,
        "unit": "%",
        "goal": ">= 90",
        "holds": None,
    }
    assert capsys.readouterr().out.rstrip().endswith("not measured")


def test_bars_need_not_be_printed(tmp_path, capsys):
    report.write(tmp_path / "result.json", "none", [Bar("a", 1, "x", 2)], show=False)
    assert json.loads((tmp_path / "result.json").read_text())["bars"][0]["holds"] is True
    assert capsys.readouterr().out == ""


def test_candidates_take_turns():
    order = []

    def candidate(name):
        def run():
            order.append(name)
            return [float(len(order))]

        return run

    found = report.alternate({"a": candidate("a"), "b": candidate("b")}, 3)
    assert order == ["a", "b"] * 3
    assert found == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}


def test_a_result_names_commit_hardware_and_command_and_no_machine(tmp_path, capsys):
    path = tmp_path / "new" / "result.json"
    bars = [Bar("a/x", 0.123456, "ms", 0.1, details={"min": 0.1}), Bar("a/y", 3, "x", 2, False)]
    report.write(path, "python -m quire.bench.none", bars, method="none")
    text = path.read_text()
    result = json.loads(text)
    assert list(result) == ["commit", "hardware", "command", "load", "method", "bars"]
    assert result["bars"] == [
        {
            "name": "a/x",
            "value": 0.1235,
            "unit": "ms",
            "goal": "<= 0.1",
            "holds": False,
            "details": {"min": 0.1},
        },
        {"name": "a/y", "value": 3.0, "unit": "x", "goal": ">= 2", "holds": True},
    ]
    assert result["hardware"]["cores"] >= 1
    assert result["hardware"]["cpu"]
    assert str(tmp_path) not in text
    assert str(report.ROOT) not in text
    printed = capsys.readouterr().out.splitlines()
    assert "MISSED" in printed[0]
    assert "holds" in printed[1]


def test_the_commit_is_one_of_this_repository_or_unknown():
    name = report.commit().removesuffix("+")
    assert name == "unknown" or (len(name) == 12 and set(name) <= set("0123456789abcdef"))

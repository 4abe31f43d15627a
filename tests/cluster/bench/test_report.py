import json
import subprocess

import pytest

from quire.cluster.bench.results import report
from quire.cluster.bench.results.report import Bar, Spread


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
    report.write(path, "python -m tests.perf none", bars, method="none")
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


def test_the_commit_is_one_of_this_repository_or_unknown(monkeypatch):
    monkeypatch.delenv(report.COMMIT_VARIABLE, raising=False)
    name = report.commit().removesuffix("+")
    assert name == "unknown" or (len(name) == 12 and set(name) <= set("0123456789abcdef"))


def test_a_copy_without_git_has_the_commit_of_the_variable_or_of_its_export(tmp_path, monkeypatch):
    """A parent folder's repository is not the measured one."""
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "other"], check=True)
    copy = tmp_path / "copy"
    copy.mkdir()
    monkeypatch.setattr(report, "ROOT", copy)
    monkeypatch.delenv(report.COMMIT_VARIABLE, raising=False)
    assert report.commit() == "unknown"
    exported = copy / ".git_archival.txt"
    exported.write_text("$Format:%H$\n")  # the content without `git archive`
    assert report.commit() == "unknown"
    exported.write_text("0123456789abcdef" + "0" * 24 + "\n")
    assert report.commit() == "0123456789ab"
    monkeypatch.setenv(report.COMMIT_VARIABLE, "fedcba98765432100+")
    assert report.commit() == "fedcba987654+"
    monkeypatch.setenv(report.COMMIT_VARIABLE, "main")
    with pytest.raises(
        ValueError, match=r"QUIRE_COMMIT: must be 7 to 40 hexadecimal .* got 'main'"
    ):
        report.commit()


def test_git_archive_fills_in_the_commit():
    attributes = (report.ROOT / ".gitattributes").read_text()
    assert ".git_archival.txt export-subst" in attributes
    assert (report.ROOT / ".git_archival.txt").read_text().strip() in (
        "$Format:%H$",
        report.commit(),
    )

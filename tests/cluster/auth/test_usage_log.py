"""The usage log: lines, files, and a disk that fails."""

from __future__ import annotations

import json

from quire.cluster.auth import usage_log
from quire.cluster.auth.usage_log import UsageLog


def lines_of(folder) -> list[int]:
    """Numbers of all lines in all files, the oldest file first."""
    paths = sorted(
        folder.iterdir(),
        key=lambda path: -int("0" + path.suffix.removeprefix(".jsonl").removeprefix(".")),
    )
    return [json.loads(line)["number"] for path in paths for line in path.read_text().splitlines()]


def test_lines_are_written_in_order(tmp_path):
    log = UsageLog(tmp_path / "new", "router-1", max_bytes=1 << 20, num_files=2)
    for number in range(1000):
        log.put(lambda number=number: {"number": number, "tenant": "ü"})
    log.close()
    assert lines_of(tmp_path / "new") == list(range(1000))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["router-1.jsonl"]


def test_files_are_bounded_and_the_oldest_goes(tmp_path):
    log = UsageLog(tmp_path, "r", max_bytes=4096, num_files=3)
    for number in range(2000):
        log.put(lambda number=number: {"number": number})
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.jsonl", "r.jsonl.1", "r.jsonl.2"]
    assert all(path.stat().st_size <= 4096 for path in tmp_path.iterdir())
    found = lines_of(tmp_path)
    assert found == list(range(found[0], 2000)) and len(found) > 400


def test_a_new_start_appends(tmp_path):
    for number in range(2):
        log = UsageLog(tmp_path, "r", max_bytes=4096, num_files=2)
        log.put(lambda number=number: {"number": number})
        log.close()
    assert lines_of(tmp_path) == [0, 1]


def fails() -> None:
    raise OSError("no space")


def test_a_failing_disk_is_logged_once_and_stops_nothing(tmp_path, caplog, monkeypatch):
    log = UsageLog(tmp_path, "r", max_bytes=4096, num_files=2)
    monkeypatch.setattr(log, "_write", fails)
    for number in range(5):
        log.put(lambda number=number: {"number": number})
    log.close()
    assert caplog.text.count("usage log: writing failed") == 1


def test_lines_that_the_disk_is_too_slow_for_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(usage_log, "_MAX_QUEUED", 2)
    monkeypatch.setattr(usage_log, "WRITE_S", 60)
    log = UsageLog(tmp_path, "r", max_bytes=4096, num_files=2)
    for number in range(100):
        log.put(lambda number=number: {"number": number})
    assert log.num_dropped == 98
    log.close()
    assert lines_of(tmp_path) == [0, 1]

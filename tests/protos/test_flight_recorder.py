"""What a process leaves behind tells a crash from a kill, and names the requests of its last step."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quire.protos.flight_recorder import FlightRecorder, read_flight_record

PROGRAM = """
import os, sys, time
from pathlib import Path
import numpy as np
from quire.protos.flight_recorder import FlightRecorder

recorder = FlightRecorder(Path(sys.argv[1]) / "folder" / "replica", 8)
recorder.catch_fatal_signals()
recorder.begin(1, np.array([1, 2, 3]))
recorder.end()
if sys.argv[2] == "in a step":
    recorder.begin(2, np.array([2**40 + 5, 7]))
if sys.argv[3] == "report":
    recorder.report("step 2 hangs")
    os._exit(1)
os.kill(os.getpid(), int(sys.argv[3]))
time.sleep(60)
"""


def last_of(folder: Path, *arguments: object):
    command = [sys.executable, "-c", PROGRAM, str(folder), *map(str, arguments)]
    subprocess.run(command, timeout=60, stderr=subprocess.DEVNULL)
    return read_flight_record(folder / "folder" / "replica")


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_crash_is_reported_with_its_step(tmp_path, number):
    record = last_of(tmp_path, "in a step", int(number))
    assert record.crashed and record.stream_ids == {2**40 + 5, 7}


def test_a_kill_is_no_crash_though_the_step_is_known(tmp_path):
    record = last_of(tmp_path, "in a step", int(signal.SIGKILL))
    assert not record.crashed and record.stream_ids == {2**40 + 5, 7}


def test_a_crash_between_two_steps_is_nobodys(tmp_path):
    record = last_of(tmp_path, "between", int(signal.SIGSEGV))
    assert record.crashed and record.stream_ids == frozenset()


def test_a_process_that_ends_itself_says_why(tmp_path):
    record = last_of(tmp_path, "in a step", "report")
    assert record.report == "step 2 hangs\n" and len(record.stream_ids) == 2


def test_nothing_to_be_read_is_nothing_known(tmp_path):
    assert read_flight_record(tmp_path / "absent") is None
    path = tmp_path / "alive"
    FlightRecorder(path, 4).begin(1, np.array([9]))
    assert read_flight_record(path).stream_ids == {9}
    path.write_bytes(b"")  # as a full disk leaves it
    assert read_flight_record(path).stream_ids == frozenset()

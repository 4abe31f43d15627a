"""Reports of an engine's adapters: what they contain, and that a report is made only after a change."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from adapter_folders import save_adapter

from quire.protos.adapter_ref import AdapterRef, adapter_key
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import AdapterReport
from quire.replica.adapters.adapter_library import AdapterLibrary
from quire.replica.adapters.adapter_reports import AdapterReports
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.core.adapter import AdapterSlots
from quire.replica.core.request import Request
from quire.replica.device.time_counters import MeanTime
from quire.replica.engine import Engine


@pytest.fixture(scope="module")
def refs(tmp_path_factory) -> list[AdapterRef]:
    root = tmp_path_factory.mktemp("adapters")
    folders = [save_adapter(root / str(i), CHECKPOINT, seed=i, size=0.5) for i in range(3)]
    return [AdapterRef.of_folder(folder.name, str(folder)) for folder in folders]


def keys_of(refs: list[AdapterRef]) -> set[int]:
    return {adapter_key(ref.digest) for ref in refs}


def test_a_report_is_made_only_after_a_change(refs):
    slots, load_time = AdapterSlots(2, 4), MeanTime()
    library = AdapterLibrary(lambda folder: time.sleep(1e-3), max_adapters=2)
    reports = AdapterReports(slots, library, load_time)
    assert reports.latest() is None
    seen: list[AdapterReport] = []

    def changes(action: Callable[[], object]) -> AdapterReport:
        action()
        seen.append(reports.latest())
        assert reports.latest() is seen[-1] and seen[-1].seq == len(seen)
        return seen[-1]

    report = changes(lambda: library.get(refs[0]))
    assert (set(report.on_device.tolist()), set(report.on_host.tolist())) == (
        set(),
        keys_of(refs[:1]),
    )
    assert (report.slots, report.slots_in_use, report.load_s) == (2, 0, 0.0)
    assert report.read_s >= 1e-3
    load_time.add(0.5)
    adapter = library.get(refs[0])
    report = changes(lambda: slots.take(adapter, 0))
    assert set(report.on_device.tolist()) == keys_of(refs[:1])
    assert (report.slots_in_use, report.load_s) == (1, 0.5)
    # A second row with the adapter changes nothing.
    slots.take(adapter, 1)
    slots.release(1)
    assert reports.latest() is report
    report = changes(lambda: slots.release(0))
    assert report.slots_in_use == 0 and len(report.on_device) == 1
    changes(lambda: library.get(refs[1]))
    report = changes(lambda: library.get(refs[2]))
    assert set(report.on_host.tolist()) == keys_of(refs[1:]), "the oldest one was forgotten"
    library.forget("f" * 32)
    assert reports.latest() is report
    report = changes(lambda: slots.forget(refs[0].digest))
    assert not len(report.on_device)


def test_an_engine_reports_what_it_reads_loads_and_forgets(refs):
    outputs = []
    options = {"num_blocks": 64, "max_model_len": 256, "num_threads": 1}
    with Engine(max_loaded_adapters=2, on_output=outputs.append, **options) as engine:

        def reported(condition: Callable[[AdapterReport], bool]) -> AdapterReport:
            end_s = time.monotonic() + 20
            while time.monotonic() < end_s:
                reports = [output.adapters for output in outputs if output.adapters is not None]
                if reports and condition(reports[-1]):
                    return reports[-1]
                time.sleep(1e-3)
            raise AssertionError(f"no such report in {reports}")

        adapter = engine.adapter(refs[0])
        report = reported(lambda report: len(report.on_host) == 1)
        assert report.read_s > 0 and not len(report.on_device), "an idle engine reports it"
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        engine.submit(Request("a", [5, 6, 7], params, adapter=adapter))
        report = reported(lambda report: report.seq >= 3 and report.slots_in_use == 0)
        assert set(report.on_device.tolist()) == keys_of(refs[:1])
        assert report.load_s > 0 and report.slots == 2
        # One report for the start of the request, and one for its end.
        assert {output.adapters.seq for output in outputs} == {1, 2, 3}
        engine.forget_adapter(refs[0].digest)
        reported(lambda report: not len(report.on_device) and not len(report.on_host))


def test_an_engine_without_adapters_reports_none():
    outputs = []
    options = {"num_blocks": 64, "max_model_len": 256, "num_threads": 1}
    with Engine(max_loaded_adapters=0, on_output=outputs.append, **options) as engine:
        engine.submit(Request("a", [5, 6, 7], SamplingParams(max_tokens=2)))
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s and not any(
            delta.finish_reason for output in outputs for delta in output.deltas
        ):
            time.sleep(1e-3)
    assert outputs and all(output.adapters is None for output in outputs)

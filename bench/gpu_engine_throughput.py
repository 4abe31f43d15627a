"""Parts of the engine's GPU benchmark: whole workloads beside transformers' continuous batching, in one run.

Both engines get the same prompts. A batch's requests are all there at once; `online` has them come as a Poisson
process, at the rate at which the floor of the same requests as a batch would serve them: neither engine can keep up
with that, and the time to the last token says what it can do when prompts come while others decode. `online, half`
has half of that rate and compares latencies.

What is asked: twice the speed of transformers, or 65% of the floor where that is less; and four times where it has
no fast decode path, that is, where most of its steps gather the whole cache (`varlen`).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from quire.bench import report
from quire.bench.floor import Floor, Rates, floor_of
from quire.bench.gpu_contestants import ContestantProcess, Job, Outcome, Served, settings
from quire.bench.gpu_engine_steps import DECODE_OPTIONS
from quire.bench.gpu_models import LARGE, SMALL, Checkpoint, checkpoint
from quire.bench.gpu_session import (
    NO_TIME,
    Part,
    Point,
    Row,
    Session,
    describe,
    significant,
    worst,
)
from quire.bench.measures import percentile
from quire.bench.workloads import Workload

RATIO, VARLEN_RATIO, PERCENT_OF_FLOOR = 2.0, 4.0, 65.0
TURNS = 2  # the faster one counts
# transformers is stopped when it takes so many times as long: enough is known then.
STOP_RATIO = 8.0
MIN_STOP_S = 20.0
_OWN_SHARE = 0.45  # of a part's time, after which no workload is started on our side
_MIN_LEFT_S = 25.0  # to start transformers with another workload

_BATCHES = (
    Workload("32x128->512", 32, 0, 128, 512),
    Workload("128x128->512", 128, 0, 128, 512),
    Workload("256x128->512", 256, 0, 128, 512),
    Workload("16x8192->128", 16, 0, 8192, 128),
    Workload("128x4096+128->128", 128, 4096, 128, 128),
)
_ONLINE = (
    (Workload("online", 384, 0, 512, 128), 1.0),
    (Workload("online, half", 384, 0, 512, 128), 0.5),
)
# The workload, and the share of the floor's rate at which requests come; None: all at once.
WORKLOADS: dict[str, tuple[Workload, float | None]] = {
    **{w.name: (w, None) for w in _BATCHES},
    **{w.name: (w, share) for w, share in _ONLINE},
}
OPTIONS: dict[str, Any] = DECODE_OPTIONS | dict(max_model_len=8448, max_running_requests=512)
_REHEARSED = {
    "4x16->6": (Workload("4x16->6", 4, 0, 16, 6), None),
    "3x32+16->4": (Workload("3x32+16->4", 3, 32, 16, 4), None),
    "online": (Workload("online", 4, 0, 16, 4), 1.0),
    "online, half": (Workload("online, half", 4, 0, 16, 4), 0.5),
}
_REHEARSED_OPTIONS = OPTIONS | dict(max_model_len=256, max_running_requests=8)


def parts(folder: Path) -> list[Part]:
    """One for each model in that folder: the small one takes the least time."""
    return [
        Throughput(
            part_name(name),
            points,
            lambda session, point: {},
            bars_of(name),
            budget_s=240,
            folder=folder,
            model=name,
        )
        for name in (SMALL, *LARGE)
    ]


def part_name(model: str) -> str:
    return f"throughput-{model}"


def points(rehearsal: bool) -> list[Point]:
    """The workloads."""
    return [{"workload": name} for name in (_REHEARSED if rehearsal else WORKLOADS)]


@dataclass(frozen=True, slots=True)
class Task:
    """A point with what both engines are given."""

    point: Point
    workload: Workload
    share: float | None
    floor: Floor
    at_s: list[float] | None

    def job(self, vocab_size: int, turns: int, setting: dict[str, Any]) -> Job:
        prompts = [self.workload.prompts(turn, vocab_size) for turn in range(turns)]
        return Job(prompts, self.workload.output_tokens, self.at_s, setting)


def task_of(session: Session, model: Checkpoint, point: Point) -> Task:
    """A point's workload, its floor at the machine's measured rates, and when its requests come."""
    workload, share = (_REHEARSED if session.rehearsal else WORKLOADS)[point["workload"]]
    rates = Rates(session.copy_bytes_per_s / 1e9, session.gemm_flops_per_s / 1e9)
    floor = floor_of(workload, model.shape, rates)
    at_s = None
    if share is not None:
        rate_per_s = share * workload.num_requests / floor.total_s
        rng = random.Random(workload.name)
        gaps = (rng.expovariate(rate_per_s) for _ in range(workload.num_requests))
        at_s = list(accumulate(gaps))
    return Task(point, workload, share, floor, at_s)


@dataclass(frozen=True, kw_only=True)
class Throughput(Part):
    """The workloads of one model: first all that there is time for on our side, then the same on the other."""

    folder: Path
    model: str

    def run(self, session: Session, points: list[Point]) -> Iterator[Row]:
        if not points:
            return
        began_s = session.clock()
        end_s = session.end_s(self.budget_s)
        model = checkpoint(self.folder, self.model, session)
        turns = 1 if session.rehearsal else TURNS
        tasks = [task_of(session, model, point) for point in points]
        own: dict[int, Outcome | Exception] = {}
        options = _REHEARSED_OPTIONS if session.rehearsal else OPTIONS
        try:
            with ContestantProcess("quire", model, session.device.type, options) as quire:
                for i, task in enumerate(tasks):
                    if session.clock() - began_s > _OWN_SHARE * (end_s - began_s):
                        break
                    job = task.job(model.vocab_size, turns, {})
                    own[i] = _try(quire, job, end_s - session.clock(), session)
                    if isinstance(own[i], TimeoutError):
                        break
        except (RuntimeError, TimeoutError) as error:  # it could not be loaded
            if session.rehearsal:
                raise
            own[0] = error
        with Peer(session, model, turns, end_s) as peer:
            for i, task in enumerate(tasks):
                outcome = own.get(i)
                if isinstance(outcome, Exception):
                    yield task.point | {"error": describe(outcome)}
                elif outcome is None or end_s - session.clock() < _MIN_LEFT_S:
                    yield task.point | {"skipped": NO_TIME}
                else:
                    yield task.point | peer.row(task, outcome)


class Peer:
    """transformers, which is started again when it had to be stopped."""

    def __init__(self, session: Session, model: Checkpoint, turns: int, end_s: float):
        self._session, self._model, self._turns, self._end_s = session, model, turns, end_s
        self._stack = ExitStack()
        self._process: ContestantProcess | None = None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def row(self, task: Task, own: Outcome) -> Row:
        """A workload's row: our time, and the best of transformers' settings."""
        session = self._session
        best, best_setting, longest_s = None, {}, 0.0
        errors: list[str] = []
        for setting in settings(session.device.type):
            limit_s = max(MIN_STOP_S, STOP_RATIO * self._turns * own.best.seconds)
            limit_s = min(limit_s, self._end_s - session.clock())
            if limit_s <= 0:
                break
            began_s = session.clock()
            try:
                found = self._run(task.job(self._model.vocab_size, self._turns, setting), limit_s)
            except TimeoutError:
                # One turn of several took at least this long.
                longest_s = max(longest_s, (session.clock() - began_s) / self._turns)
                self._stop()
                continue
            except RuntimeError as error:
                if session.rehearsal:
                    raise
                errors.append(describe(error))
                self._stop()
                continue
            if best is None or found.best.seconds < best.best.seconds:
                best, best_setting = found, setting
        row = own_row(task, own.best)
        if best is not None:
            return row | peer_row(task, own.best, best, best_setting)
        if errors:
            return row | {"error": "; ".join(errors)[:300]}
        at_least = longest_s / own.best.seconds
        if at_least < VARLEN_RATIO:
            return {"skipped": NO_TIME}
        # It was too slow for the goal by either path.
        stopped = {"peer_stopped_after_s": significant(longest_s), "ratio": significant(at_least)}
        return row | stopped | {"varlen_ratio": significant(at_least)}

    def _run(self, job: Job, limit_s: float) -> Outcome:
        if self._process is None:
            device = self._session.device.type
            process = ContestantProcess("transformers", self._model, device, {})
            self._process = self._stack.enter_context(process)
        return self._process.run(job, limit_s)

    def _stop(self) -> None:
        self._stack.close()
        self._process = None


def own_row(task: Task, served: Served) -> Row:
    """What is said of our side; the latencies count from when a request came."""
    seconds, tokens = served.seconds, task.workload.num_output_tokens
    row: Row = {
        "seconds": significant(seconds),
        "tokens_per_s": significant(tokens / seconds),
        **_latencies(task, served, ""),
    }
    if task.share is None or task.share >= 1:
        row["floor_s"] = significant(task.floor.total_s)
        row["percent_of_floor"] = significant(100 * task.floor.total_s / seconds)
    return row


def peer_row(task: Task, own: Served, found: Outcome, setting: dict[str, Any]) -> Row:
    """What is said of the other side, and the ratios that the bars are about."""
    served, facts = found.best, found.facts
    fast_percent = 100 * facts["fast_steps"] / max(facts["steps"], 1)
    row: Row = {
        "peer_seconds": significant(served.seconds),
        "peer_tokens_per_s": significant(task.workload.num_output_tokens / served.seconds),
        **_latencies(task, served, "peer_"),
        "peer_attention": facts["attention"],
        "peer_setting": " ".join(f"{name}={value}" for name, value in setting.items()),
        "peer_fast_percent": significant(fast_percent),
    }
    if task.share is not None and task.share < 1:
        mean = statistics.fmean(_waits(task, served.last_s))
        own_mean = statistics.fmean(_waits(task, own.last_s))
        return row | {"latency_ratio": significant(mean / own_mean)}
    ratio = served.seconds / own.seconds
    row["ratio"] = significant(ratio)
    if fast_percent < 50:
        return row | {"varlen_ratio": significant(ratio)}
    percent = 100 * task.floor.total_s / own.seconds
    return row | {"of_goal": significant(max(ratio / RATIO, percent / PERCENT_OF_FLOOR))}


def bars_of(model: str) -> Any:
    """The two bars of a model's part."""

    def bars(rows: list[Row]) -> list[report.Bar]:
        name = f"gpu/engine/{{}}/{model}"
        return [
            worst(name.format("throughput_of_goal"), rows, "of_goal", "x", 1),
            worst(name.format("ratio_to_varlen"), rows, "varlen_ratio", "x", VARLEN_RATIO),
        ]

    return bars


def _latencies(task: Task, served: Served, prefix: str) -> Row:
    first_s, last_s = _waits(task, served.first_s), _waits(task, served.last_s)
    rest = max(task.workload.output_tokens - 1, 1)
    tpot_s = [(last - first) / rest for first, last in zip(first_s, last_s, strict=True)]
    return {
        f"{prefix}{name}_p{percent}_ms": significant(1e3 * percentile(values, percent))
        for name, values in (("ttft", first_s), ("tpot", tpot_s))
        for percent in (50, 99)
    }


def _waits(task: Task, times_s: list[float]) -> list[float]:
    """From when each request came."""
    if task.at_s is None:
        return times_s
    return [time_s - at_s for time_s, at_s in zip(times_s, task.at_s, strict=True)]


def _try(
    process: ContestantProcess, job: Job, timeout_s: float, session: Session
) -> Outcome | Exception:
    """The outcome, or why there is none."""
    try:
        return process.run(job, timeout_s)
    except (RuntimeError, TimeoutError) as error:
        if session.rehearsal:
            raise
        return error

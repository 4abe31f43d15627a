"""Parts of the engine's GPU benchmark: whole workloads against transformers' continuous batching, in one run.

Both engines get the same prompts. The requests of a batch are sent at once. In `online` they arrive as a Poisson
process at the rate of the batch's floor. No engine can keep up with that rate, so the time to the last token measures
the throughput while prompts arrive. `online, half` has half of that rate and compares latencies.

Goals: twice the speed of transformers, or 65% of the floor if that is less; and four times its speed where it has no
fast decode path, because most of its steps then gather the whole cache (`varlen`).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from quire.cluster.bench.engines.floor import Floor, Rates, floor_of
from quire.cluster.bench.load.workloads import Workload
from quire.cluster.bench.results import report
from quire.cluster.bench.results.measures import percentile
from tests.perf.gpu.engine.gpu_contestants import ContestantProcess, Job, Served, fastest, settings
from tests.perf.gpu.engine.gpu_engine_steps import DECODE_OPTIONS
from tests.perf.gpu.engine.gpu_models import LARGE, SMALL, Checkpoint, checkpoint
from tests.perf.gpu.gpu_session import (
    NO_TIME,
    Part,
    Point,
    Row,
    Session,
    describe,
    significant,
    worst,
)

RATIO, VARLEN_RATIO, PERCENT_OF_FLOOR = 2.0, 4.0, 65.0
TURNS = 2  # the faster turn counts
LONG_S = 4.0  # if Quire's first turn takes longer, it is the only one
# transformers is stopped when it takes this many times as long; the ratio is then a lower bound.
STOP_RATIO = 5.0
MIN_STOP_S = 20.0
_OWN_SHARE = 0.45  # share of a part's time, after which no workload starts on Quire
_MIN_LEFT_S = 25.0  # least time to start another workload on transformers

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
# Workload, and its arrival rate relative to the floor's; None: all requests at once.
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
    """One part for each model, the small one first: it takes the least time."""
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
    """The points: one for each workload."""
    return [{"workload": name} for name in (_REHEARSED if rehearsal else WORKLOADS)]


@dataclass(frozen=True, slots=True)
class Task:
    """A point with the input of both engines."""

    point: Point
    workload: Workload
    share: float | None
    floor: Floor
    at_s: list[float] | None

    def job(self, vocab_size: int, turns: int, setting: dict[str, Any]) -> Job:
        prompts = [self.workload.prompts(turn, vocab_size) for turn in range(turns)]
        return Job(prompts, self.workload.output_tokens, self.at_s, setting)


def task_of(session: Session, model: Checkpoint, point: Point) -> Task:
    """A point's workload, its floor at the machine's measured rates, and its arrival times."""
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
    """The workloads of one model: first on Quire as far as the time allows, then the same ones on transformers."""

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
        own: dict[int, list[Served] | Exception] = {}
        options = _REHEARSED_OPTIONS if session.rehearsal else OPTIONS
        try:
            device, left_s = session.device.type, end_s - session.clock()
            with ContestantProcess("quire", model, device, options, left_s) as quire:
                for i, task in enumerate(tasks):
                    if session.clock() - began_s > _OWN_SHARE * (end_s - began_s):
                        break
                    own[i] = _own_turns(
                        quire, task.job(model.vocab_size, turns, {}), session, end_s
                    )
                    if isinstance(own[i], TimeoutError):
                        break
        except (RuntimeError, TimeoutError) as error:  # the engine could not be loaded
            if session.rehearsal:
                raise
            own[0] = error
        with Peer(session, model, end_s) as peer:
            for i, task in enumerate(tasks):
                found = own.get(i)
                if isinstance(found, Exception):
                    yield task.point | {"error": describe(found)}
                elif found is None or end_s - session.clock() < _MIN_LEFT_S:
                    yield task.point | {"skipped": NO_TIME}
                else:
                    yield task.point | peer.row(task, found)


def _own_turns(
    process: ContestantProcess, job: Job, session: Session, end_s: float
) -> list[Served] | Exception:
    """All turns, or the reason why there are none."""
    try:
        process.warm_up(job, end_s - session.clock())
        return [process.turn(end_s - session.clock()) for _ in job.turns]
    except (RuntimeError, TimeoutError) as error:
        if session.rehearsal:
            raise
        return error


class Peer:
    """transformers; it is restarted after it had to be stopped.

    Parameters
    ----------
    end_s
        Deadline on the session's clock.
    """

    def __init__(self, session: Session, model: Checkpoint, end_s: float):
        self._session, self._model, self._end_s = session, model, end_s
        self._stack = ExitStack()
        self._process: ContestantProcess | None = None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def row(self, task: Task, own: list[Served]) -> Row:
        """A workload's row: Quire's time, and the best of transformers' settings with as many turns."""
        # One long turn is enough, and there is no time for more.
        turns = own[:1] if own[0].seconds > LONG_S else own
        served = fastest(turns)
        best, best_setting = None, {}
        stopped_s: list[float] = []  # lower bound of a turn, for each setting that was stopped
        errors: list[str] = []
        for setting in settings(self._session.device.type):
            try:
                found = self._turns(task, len(turns), setting, served.seconds)
            except RuntimeError as error:
                if self._session.rehearsal:
                    raise
                errors.append(describe(error))
                self._stop()
                continue
            if isinstance(found, float):
                stopped_s.append(found)
            elif best is None or found.seconds < best.seconds:
                best, best_setting = found, setting
        row = own_row(task, served)
        if best is not None:
            return row | peer_row(task, served, best, best_setting)
        if not stopped_s:
            return row | {"error": "; ".join(errors)[:300]}
        at_least = min(stopped_s) / served.seconds
        if at_least < VARLEN_RATIO:
            return {"skipped": NO_TIME}
        # Slow enough to decide both goals.
        stopped = {"peer_stopped_after_s": significant(min(stopped_s))}
        return row | stopped | dict.fromkeys(("ratio", "varlen_ratio"), significant(at_least))

    def _turns(
        self, task: Task, count: int, setting: dict[str, Any], own_s: float
    ) -> Served | float:
        """The fastest turn of a setting, or a lower bound of a turn; 0 if no turn began.

        Raises
        ------
        RuntimeError
            transformers could not be loaded, or failed.
        """
        session, done = self._session, []
        began_s: float | None = None
        try:
            process = self._loaded()
            process.warm_up(task.job(self._model.vocab_size, count, setting), self._left_s())
            patience_s = math.inf if session.rehearsal else max(MIN_STOP_S, STOP_RATIO * own_s)
            for _ in range(count):
                began_s = session.clock()
                done.append(process.turn(min(patience_s, self._left_s())))
        except TimeoutError:
            self._stop()
            if not done:
                return 0.0 if began_s is None else session.clock() - began_s
        return fastest(done)

    def _left_s(self) -> float:
        return self._end_s - self._session.clock()

    def _loaded(self) -> ContestantProcess:
        if self._process is None:
            device = self._session.device.type
            process = ContestantProcess("transformers", self._model, device, {}, self._left_s())
            self._process = self._stack.enter_context(process)
        return self._process

    def _stop(self) -> None:
        self._stack.close()
        self._process = None


def own_row(task: Task, served: Served) -> Row:
    """Quire's columns; latencies count from a request's arrival."""
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


def peer_row(task: Task, own: Served, served: Served, setting: dict[str, Any]) -> Row:
    """transformers' columns, and the ratios of the bars."""
    facts = served.facts
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
    """Latencies from each request's arrival."""
    if task.at_s is None:
        return times_s
    return [time_s - at_s for time_s, at_s in zip(times_s, task.at_s, strict=True)]

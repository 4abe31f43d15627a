"""A decode step beside another thread that keeps Python's interpreter busy, as the event loop of a replica does.

The engine's thread gives the interpreter's lock up in each product and copy. To get it back it waits until the other
thread has held it for the switch interval: 5 ms by default, 0.5 ms in a replica. Eight streams of the embedded
model; both intervals, each alone and beside the thread, in alternation.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from quire.cluster.bench.results import report
from quire.protos.sampling_params import SamplingParams
from quire.replica.engine import Engine

# Seconds: Python's, and that of `replica/serving/actor.py`.
INTERVALS_S = {"default": 5e-3, "replica": 5e-4}
NUM_STREAMS, MAX_TOKENS = 8, 100
# Set before the first measurement with alternation: at most half of the default's time, at most three times that alone.
GOALS = {"over_default": 0.5, "over_alone": 3.0}


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """A thread that computes in Python all the time."""
    ends = threading.Event()

    def compute() -> None:
        count = 0
        while not ends.is_set():
            count += 1

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def step_ms(engine: Engine, interval_s: float, is_busy: bool) -> list[float]:
    """Mean time of a step."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    prompts = [[7 + i] * 60 for i in range(NUM_STREAMS)]
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        with busy_thread() if is_busy else contextlib.nullcontext():
            num_steps, began_s = engine.load().num_steps, time.perf_counter()
            engine.generate(prompts, params, progress=False)
            seconds = time.perf_counter() - began_s
        return [1e3 * seconds / (engine.load().num_steps - num_steps)]
    finally:
        sys.setswitchinterval(before_s)


def measure(rounds: int) -> list[report.Bar]:
    """The bars."""
    with Engine(model="embedded", device="cpu", num_threads=1, prefix_caching=False) as engine:
        candidates = {
            f"{name}_{'busy' if is_busy else 'alone'}": functools.partial(
                step_ms, engine, interval_s, is_busy
            )
            for name, interval_s in INTERVALS_S.items()
            for is_busy in (False, True)
        }
        report.alternate(candidates, 1)  # warm-up
        found = report.alternate(candidates, rounds)
    medians = {name: statistics.median(values) for name, values in found.items()}
    details = {
        f"{name}_ms": report.spread_json(report.Spread.of(values)) for name, values in found.items()
    }
    values = {
        "over_default": medians["replica_busy"] / medians["default_busy"],
        "over_alone": medians["replica_busy"] / medians["replica_alone"],
    }
    return [
        report.Bar(f"engine/step_beside_a_thread_{name}", value, "x", GOALS[name], details=details)
        for name, value in values.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "busy_interpreter.json")
    args = parser.parse_args()
    report.write(
        args.out,
        f"python -m tests.perf busy_interpreter --rounds {args.rounds}",
        measure(args.rounds),
        method="milliseconds of a step, medians; alternated",
    )


if __name__ == "__main__":
    main()

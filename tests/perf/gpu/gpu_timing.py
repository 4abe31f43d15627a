"""Timing of kernels on a GPU: cold caches, no launch overhead, alternating candidates.

A candidate is a list of calls with separate operands, like the layers of a model. Together they take long enough to be
timed, and no call finds its operands in the L2 cache. They are captured in one CUDA graph, because a Triton launch
takes the host longer than a small kernel runs. Each replay is timed by a pair of events::

    [ flush | E | call 0 | call 1 | ... | E | flush | E | ...        time of a call = (E - E) / number of calls

The flush reads a buffer four times the size of the L2 cache. It does not write: dirty lines would be written back
during the measurement. On the CPU (a rehearsal) each call is made once and timed by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from quire.cluster.bench.results import report

Call = Callable[[], object]

ROUNDS = 3
TURN_MS = 6.0  # replays of one candidate in one round
MAX_REPLAYS = 40  # per turn
MIN_REPLAYS = 3
FLUSH_L2 = 4  # size of the flushed buffer, in sizes of the L2 cache
DEFAULT_L2_BYTES = 64 << 20


class Timer:
    """Times candidates against each other on one device.

    Parameters
    ----------
    device
        A CUDA device, or the CPU for a rehearsal.
    """

    def __init__(self, device: torch.device):
        self._device = device
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            size = FLUSH_L2 * getattr(properties, "L2_cache_size", DEFAULT_L2_BYTES)
            self._flushed = torch.zeros(size // 4, dtype=torch.int32, device=device)
            self._flush_result = torch.zeros((), dtype=torch.int32, device=device)

    def compare(self, candidates: Mapping[str, Sequence[Call]]) -> dict[str, report.Spread]:
        """Milliseconds per call of each candidate; candidates alternate.

        Raises
        ------
        Exception
            See `capture`; then nothing is measured.
        """
        turns = {name: self._turn(calls) for name, calls in candidates.items()}
        rounds = ROUNDS if self._device.type == "cuda" else 1
        found = report.alternate(turns, rounds)
        return {name: report.Spread.of(times) for name, times in found.items()}

    def one(self, calls: Sequence[Call]) -> report.Spread:
        """`compare` for a single candidate."""
        return self.compare({"": calls})[""]

    def capture(self, calls: Sequence[Call]) -> Call:
        """Capture one replay of all calls, after calling each once to compile its kernels.

        Raises
        ------
        Exception
            A call failed or cannot be captured.
        """
        for call in calls:
            call()
        if self._device.type != "cuda":
            return lambda: None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def _turn(self, calls: Sequence[Call]) -> Callable[[], list[float]]:
        if self._device.type != "cuda":
            return lambda: [_wall_ms(calls)]
        replay = self.capture(calls)
        once_ms = self._replay_ms(replay, 1)[0]
        replays = min(max(int(TURN_MS / max(once_ms, 1e-3)), MIN_REPLAYS), MAX_REPLAYS)

        def turn() -> list[float]:
            return [ms / len(calls) for ms in self._replay_ms(replay, replays)]

        return turn

    def _replay_ms(self, replay: Call, replays: int) -> list[float]:
        events = []
        for _ in range(replays):
            torch.amax(self._flushed, dim=0, out=self._flush_result)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]


def _wall_ms(calls: Sequence[Call]) -> float:
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) * 1e3 / len(calls)

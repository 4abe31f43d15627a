"""Decoding rows on a device with a given cost per step, to see what a source of drafts saves or costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.speculation.draft_sources import AutoSource
from quire.replica.speculation_options import SpeculationOptions

# Few tokens, so that grams occur again soon.
NUM_IDS = 12
Cost = Callable[[int, int], float]


def cpu_step_s(num_rows: int, num_drafted: int) -> float:
    """Flat for a few tokens, whose step waits for memory; then proportional to the tokens."""
    tokens = num_rows + num_drafted
    return max(0.010 + 0.0004 * tokens, 0.0015 * tokens)


def busy_cpu_step_s(num_rows: int, num_drafted: int) -> float:
    """As measured with a model of 135M parameters on two cores: a drafted token costs nearly as much as a row."""
    return 0.019 + 0.0011 * num_rows + 0.001 * num_drafted


def gpu_step_s(num_rows: int, num_drafted: int) -> float:
    return 0.008 + 2e-6 * (num_rows + num_drafted) + (0.0002 if num_drafted else 0.0)


def text(rng: np.random.Generator, likely: float, count: int, before: np.ndarray) -> np.ndarray:
    """Tokens of which this fraction follow their predecessor by one fixed rule; the others are random."""
    ids, newest = [], int(before[-1])
    for follows, other in zip(
        rng.random(count) < likely, rng.integers(0, NUM_IDS, count), strict=True
    ):
        newest = (5 * newest + 3) % NUM_IDS if follows else int(other)
        ids.append(newest)
    return np.array(ids, np.int32)


class TimedSource(AutoSource):
    """A source whose looks take a given time of a simulated clock."""

    def __init__(self, look_s: float):
        super().__init__(SpeculationOptions(method="auto"), lambda: self.now_s)
        self.now_s = 0.0
        self._one_look_s = look_s

    def _look(self, *args):
        self.now_s += self._one_look_s
        return super()._look(*args)


class SimulatedEngine:
    """Requests that all decode at the same time until their text ends.

    Parameters
    ----------
    cost
        Seconds of a step by its rows and drafted tokens.
    look_s
        Seconds of the host to look up one request.
    noise
        Steps take longer by a random share with this mean.
    most_tokens
        Rows and drafted tokens of a step at most.
    slow
        Other work makes steps take longer by this share, one second of three.
    mixed
        The share of steps that prefill, too: the source is not told of them, and what prefill takes is not counted.
    """

    def __init__(
        self,
        cost: Cost,
        *,
        look_s: float = 1e-5,
        noise: float = 0.0,
        most_tokens: int = 1000,
        slow: float = 0.0,
        mixed: float = 0.0,
        seed: int = 0,
    ):
        self._cost = cost
        self._noise = noise
        self._most_tokens = most_tokens
        self._slow = slow
        self._mixed = mixed
        self._rng = np.random.default_rng(seed)
        self.source = TimedSource(look_s)
        self._num_keys = 0
        self.num_drafted = self.num_accepted = 0

    def run(self, num_rows: int, likely: list[float], count: int) -> float:
        """Decode this many rows, `count` tokens for each phase of `likely`.

        Returns
        -------
        The time without speculation, divided by the time with it.
        """
        texts, requests = [], []
        for _ in range(num_rows):
            prompt = self._rng.integers(0, NUM_IDS, 300).astype(np.int32)
            whole = prompt
            for phase in likely:
                whole = np.concatenate([whole, text(self._rng, phase, count, whole)])
            texts.append(whole)
            params = SamplingParams(max_tokens=len(likely) * count)
            request = Request(self._num_keys, prompt, params)
            self._num_keys += 1
            request.accept(())
            request.append(whole[300:301].tobytes())
            requests.append(request)
        began_s, plain_s = self.source.now_s, 0.0
        while requests:
            plain_s += self._step(requests, texts) * self._cost(len(requests), 0) / len(requests)
            for i in reversed(range(len(requests))):
                if requests[i].num_tokens >= len(texts[i]):
                    self.source.end(requests[i])
                    del requests[i], texts[i]
        speed = (2 + 1 / (1 + self._slow)) / 3 / (1 + self._noise)
        return plain_s / speed / (self.source.now_s - began_s)

    def _step(self, requests: list[Request], texts: list[np.ndarray]) -> int:
        """One step; returns the number of new tokens."""
        room = self._most_tokens - len(requests)
        drafts = self.source.propose(requests, room)
        num_drafted = sum(map(len, drafts))
        assert num_drafted <= room
        is_mixed = self._rng.random() < self._mixed
        is_slow = self.source.now_s % 3 < 1
        duration_s = self._cost(len(requests), num_drafted) * (1 + self._slow * is_slow)
        duration_s *= 1 + self._noise * self._rng.exponential()
        self.source.now_s += duration_s
        num_new = 0
        for request, whole, draft in zip(requests, texts, drafts, strict=True):
            comes = whole[request.num_tokens :]
            assert len(draft) < len(comes) or not len(draft)
            right = draft == comes[: len(draft)]
            num_right = len(draft) if right.all() else int(right.argmin())
            request.append(comes[: num_right + 1].tobytes())
            num_new += min(num_right + 1, len(comes))
            if len(draft):
                self.source.observe(request, len(draft), num_right)
                self.num_drafted += len(draft)
                self.num_accepted += num_right
        if not is_mixed:
            self.source.observe_step(len(requests), num_drafted, duration_s)
        return num_new

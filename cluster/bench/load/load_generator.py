"""Requests sent to a server as users would: at their own times, or each when the one before is answered.

Open loop (`open_loop`, and the starts of `session_loop`): a request is due at its time whatever the server does, and
its latency counts from then, not from when this process got round to sending it. A server that stalls is charged
for everybody who would have come meanwhile; a generator that waits for answers before it sends would hide that
(coordinated omission). How late this process itself was is recorded as `Record.lag_s`, and is small or the run says
nothing.

Closed loop (`closed_loop`): so many users, each with one request at a time. It finds the throughput at a
concurrency; its latencies are those of users who wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.cluster.bench.load.clients import Answer, Client, RequestFailed
from quire.cluster.bench.load.workloads import TimedRequest

_LAG_PERIOD_S = 0.05


@dataclass(frozen=True, slots=True)
class Record:
    """One request; seconds since the start of the run."""

    due_s: float  # when its user sent it
    sent_s: float  # when this process did
    arrivals_s: tuple[float, ...] = ()  # of the pieces of the answer
    tokens: tuple[int, ...] = ()  # in each piece
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    session: str = ""
    turn: int = 0
    replica: str = ""
    error: str = ""  # empty: it was answered
    predicted_tokens: int | None = None  # that the router expected to be cached, if it tells

    @property
    def lag_s(self) -> float:
        """How late it was sent, which is the generator's fault."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """From the time it was due to its first token."""
        return self.arrivals_s[0] - self.due_s

    @property
    def latency_s(self) -> float:
        """From the time it was due to its last token."""
        return self.arrivals_s[-1] - self.due_s

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def gaps_s(self) -> list[float]:
        """Between the pieces: what somebody who reads along notices."""
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first piece; 0 for an answer of one piece."""
        rest = self.num_tokens - self.tokens[0]
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / rest if rest else 0.0


@dataclass(slots=True)
class Run:
    """What one run of a load has seen."""

    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0  # from the start to the last answer
    loop_lags_s: list[float] = field(default_factory=list)  # of the event loop, sampled


Progress = Callable[[Record], object]


def _nothing(record: Record) -> None:
    pass


class _Sender:
    """Sends requests and notes what happened; one for a run."""

    def __init__(self, client: Client, progress: Progress):
        self._client, self._progress = client, progress
        self.run = Run()
        self.began_s = time.perf_counter()

    def now_s(self) -> float:
        """Since the start of the run."""
        return time.perf_counter() - self.began_s

    async def wait_until(self, at_s: float) -> None:
        delay_s = at_s - self.now_s()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def send(
        self, prompt_ids: Sequence[int], request: TimedRequest, due_s: float
    ) -> Answer | None:
        """The answer, or None: an error is a record too."""
        sent_s = self.now_s()
        answer, error = Answer(), ""
        try:
            answer = await self._client.complete(prompt_ids, request.output_tokens, request.session)
            if not answer.tokens:
                error = "an answer without tokens"
        except RequestFailed as failure:
            error = str(failure)
        record = Record(
            due_s,
            sent_s,
            tuple(t - self.began_s for t in answer.arrivals_s),
            tuple(answer.tokens),
            answer.prompt_tokens or len(prompt_ids),
            answer.cached_tokens,
            request.session,
            request.turn,
            answer.replica,
            error,
            answer.predicted_tokens,
        )
        self.run.records.append(record)
        self._progress(record)
        return None if error else answer

    async def finish(self, work: Sequence[asyncio.Future]) -> Run:
        """Wait for all of it, and watch the event loop meanwhile."""
        watch = asyncio.ensure_future(self._watch_loop())
        try:
            await asyncio.gather(*work)
        finally:
            watch.cancel()
        self.run.duration_s = self.now_s()
        return self.run

    async def _watch_loop(self) -> None:
        while True:
            before_s = self.now_s()
            await asyncio.sleep(_LAG_PERIOD_S)
            self.run.loop_lags_s.append(self.now_s() - before_s - _LAG_PERIOD_S)


async def open_loop(
    client: Client, requests: Sequence[TimedRequest], progress: Progress = _nothing
) -> Run:
    """Send each request at its time, however many are not answered yet."""
    sender = _Sender(client, progress)

    async def one(request: TimedRequest) -> None:
        await sender.wait_until(request.at_s)
        await sender.send(request.prompt_ids, request, request.at_s)

    return await sender.finish([asyncio.ensure_future(one(r)) for r in requests])


async def closed_loop(
    client: Client,
    requests: Sequence[TimedRequest],
    concurrency: int,
    progress: Progress = _nothing,
) -> Run:
    """`concurrency` users work off the requests; each is due when its user is free.

    Raises
    ------
    ValueError
        `concurrency` below 1.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency: must be >= 1, got {concurrency}")
    sender = _Sender(client, progress)
    left = iter(requests)

    async def user() -> None:
        for request in left:
            await sender.send(request.prompt_ids, request, sender.now_s())

    return await sender.finish([asyncio.ensure_future(user()) for _ in range(concurrency)])


async def session_loop(
    client: Client, sessions: Sequence[Sequence[TimedRequest]], progress: Progress = _nothing
) -> Run:
    """Conversations: each prompt is everything said so far, the server's answers included, and the new turn.

    A later turn is due when its user has read the last answer and thought. A session ends at its first error.

    Raises
    ------
    ValueError
        The server does not tell token ids, without which there is no history to send.
    """
    sender = _Sender(client, progress)

    async def one(turns: Sequence[TimedRequest]) -> None:
        history: list[int] = []
        due_s = turns[0].at_s
        for request in turns:
            await sender.wait_until(due_s)
            history += request.prompt_ids
            answer = await sender.send(history, request, due_s)
            if answer is None:
                return
            if len(answer.token_ids) != answer.num_tokens:
                raise ValueError(
                    f"sessions need the answers' token ids: the server told {len(answer.token_ids)} of "
                    f"{answer.num_tokens}; a server that can tell them needs return_token_ids"
                )
            history += answer.token_ids
            if request.turn + 1 < len(turns):
                due_s = sender.now_s() + turns[request.turn + 1].at_s

    return await sender.finish([asyncio.ensure_future(one(turns)) for turns in sessions])

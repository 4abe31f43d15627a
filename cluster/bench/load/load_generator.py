"""Load generators: send requests at given times (open loop), or after each answer (closed loop).

Open loop (`open_loop`, and the first turns of `session_loop`): each request has a due time that does not depend on the
server, and its latency counts from that time. A stall of the server therefore delays every request that is due during
it. A generator that waits for answers before it sends would hide the stall (coordinated omission). `Record.lag_s` is
this process' own delay; a run is only valid if it is small.

Closed loop (`closed_loop`): a fixed number of users, each with one request at a time. It measures the throughput at a
concurrency; its latencies do not show how the server behaves under independent arrivals.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.cluster.bench.load.clients import Answer, Client, RequestFailed
from quire.cluster.bench.load.workloads import TimedRequest

_LAG_PERIOD_S = 0.05


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are seconds since the start of the run.

    Attributes
    ----------
    due_s
        When the user sends the request.
    sent_s
        When this process sent the request.
    arrivals_s, tokens
        Arrival time and number of tokens of each piece of the answer.
    cached_tokens
        Prompt tokens found in the cache.
    predicted_tokens
        Prompt tokens that the router expected in the cache; None if the server does not report this number.
    host_cached_tokens
        The part of `cached_tokens` that came from the host tier, if the server reports it.
    error
        Empty if the request was answered.
    """

    due_s: float
    sent_s: float
    arrivals_s: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    session: str = ""
    turn: int = 0
    replica: str = ""
    error: str = ""
    predicted_tokens: int | None = None
    host_cached_tokens: int = 0

    @property
    def lag_s(self) -> float:
        """Delay of the load generator: seconds from the due time until the request was sent."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Time to first token: seconds from the due time to the first token."""
        return self.arrivals_s[0] - self.due_s

    @property
    def latency_s(self) -> float:
        """Seconds from the due time to the last token."""
        return self.arrivals_s[-1] - self.due_s

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive pieces of the answer."""
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first piece; 0 if the answer came in one piece."""
        rest = self.num_tokens - self.tokens[0]
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / rest if rest else 0.0


@dataclass(slots=True)
class Run:
    """Records of one run of a load."""

    records: list[Record] = field(default_factory=list)
    duration_s: float = 0.0  # from the start to the last answer
    loop_lags_s: list[float] = field(default_factory=list)  # sampled delays of the event loop


Progress = Callable[[Record], object]


def _nothing(record: Record) -> None:
    pass


class _Sender:
    """Sends the requests of one run and records the answers."""

    def __init__(
        self, client: Client, progress: Progress, clock: Callable[[], float] = time.perf_counter
    ):
        self._client, self._progress, self._clock = client, progress, clock
        self.run = Run()
        self.began_s = clock()

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return self._clock() - self.began_s

    async def wait_until(self, at_s: float) -> None:
        delay_s = at_s - self.now_s()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def send(
        self, prompt_ids: Sequence[int], request: TimedRequest, due_s: float
    ) -> Answer | None:
        """Send one request and record it. Returns the answer; None if the request failed."""
        sent_s = self.now_s()
        answer, error = Answer(), ""
        try:
            answer = await self._client.complete(
                prompt_ids, request.output_tokens, request.session, request.retain
            )
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
            answer.host_cached_tokens,
        )
        self.run.records.append(record)
        self._progress(record)
        return None if error else answer

    async def finish(self, work: Sequence[asyncio.Future]) -> Run:
        """Wait for all tasks in `work`; sample the event loop's delay until they are done."""
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
    """Send each request at its due time, without waiting for earlier answers."""
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
    """Send the requests from `concurrency` users, each with one request at a time.

    A request is due when a user has received the answer to the previous one.

    Raises
    ------
    ValueError
        `concurrency` is below 1.
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
    client: Client,
    sessions: Sequence[Sequence[TimedRequest]],
    progress: Progress = _nothing,
    until_s: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Run conversations. Each prompt has the earlier turns, the server's answers to them, and the new turn.

    A later turn is due after the last token of the previous answer and the user's pause. A turn 0 after others begins a
    new session. A branch goes on from a copy of the conversation, beside it. A user stops at the first error, and
    before the first turn that is due at `until_s` or later. `clock` is that of the client's arrival times.

    Raises
    ------
    ValueError
        The server does not return token ids, so the history cannot be sent.
    """
    sender = _Sender(client, progress, clock)

    async def one(turns: Sequence[TimedRequest], history: list[int], ended_s: float) -> None:
        branches: list[asyncio.Future[None]] = []
        for request in turns:
            due_s = ended_s + request.at_s
            if due_s >= until_s:
                break
            await sender.wait_until(due_s)
            if request.turn == 0:
                history = []
            history += request.prompt_ids
            answer = await sender.send(history, request, due_s)
            if answer is None:
                break
            if len(answer.token_ids) != answer.num_tokens:
                raise ValueError(
                    f"sessions need the answers' token ids: the server returned {len(answer.token_ids)} of "
                    f"{answer.num_tokens}; OpenAI servers that support it need return_token_ids"
                )
            history += answer.token_ids
            ended_s = sender.now_s()
            if request.branch:
                branch = one(request.branch, history.copy(), ended_s)
                branches.append(asyncio.ensure_future(branch))
        await asyncio.gather(*branches)

    return await sender.finish([asyncio.ensure_future(one(turns, [], 0.0)) for turns in sessions])

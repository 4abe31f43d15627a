"""A `Transport` without Ray: real engines in this process, and a switch that loses streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

from quire.protos.wire import Completion, Frame, Hello, Submit
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.core.request import Request
from quire.replica.engine import Engine
from quire.replica.loop import LoopOutput
from quire.router.fleet.replicas import ReplicaTable
from quire.router.index.prefix_index import PrefixIndex
from quire.router.policy.by_name import make_policy
from quire.router.request.context import ModelFacts
from quire.router.request.params import GenerationDefaults, Limits
from quire.router.request.service import RouterService
from quire.router.text.chat_template import ChatTemplate
from quire.router.text.tokenizer import AsyncTokenizer, TextTokenizer
from quire.router.transport.transport import Attempt, Lost


class EngineTransport:
    """One engine under several names: a stream that is lost on one continues on the next.

    Use within one event loop at a time, after `enter`.
    """

    def __init__(
        self,
        names: tuple[str, ...] = ("r1", "r2", "r3"),
        engine_class: type[Engine] = Engine,
        **options: Any,
    ):
        self.engine = engine_class(
            num_blocks=256, max_model_len=512, on_output=self._on_output, num_threads=1, **options
        )
        self.table = ReplicaTable(PrefixIndex(), lost_after_s=1e9)
        self.names = names
        self.submits: list[Submit] = []
        self.pulls: list[tuple[Submit, str]] = []
        self.lose_after: list[int] = []  # of the next attempts: tokens until the stream is lost
        self._attempts: dict[int, tuple[Attempt, int | None]] = {}
        self._ids = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self) -> None:
        """Deliver to the running loop; all replicas are ready."""
        self._loop = asyncio.get_running_loop()
        self.submits.clear()
        for name in self.names:
            if name not in self.table:
                self.table.add(name, self.engine.epoch, weights=self.engine.hello(name).weights)
                self.table.on_frame(name, Frame(self.engine.epoch), time.monotonic())

    @property
    def hellos(self) -> dict[str, Hello]:
        return {name: self.engine.hello(name) for name in self.names}

    def next_stream_id(self) -> int:
        return next(self._ids)

    async def crashed_with(self, replica: str, stream_id: int) -> bool:
        """The engine lives in this process: it has not."""
        return False

    def submit(self, submit: Submit, route: list[str]) -> Attempt:
        submit = Submit.decode(submit.encode())
        self.submits.append(submit)
        attempt = Attempt(submit.stream_id, route[0], on_cancel=self._cancel)
        budget = self.lose_after.pop(0) if self.lose_after else None
        self._attempts[submit.stream_id] = (attempt, budget)
        self.engine.submit(
            Request(
                submit.stream_id,
                submit.prompt_ids,
                submit.params,
                num_emitted=submit.num_emitted,
                tenant=submit.tenant,
                fork_of=submit.fork_of,
                adapter=None if submit.adapter is None else self.engine.adapter(submit.adapter),
                prediction_ids=submit.prediction_ids,
            )
        )
        return attempt

    async def pull(self, submit: Submit, replica: str) -> bool:
        self.pulls.append((Submit.decode(submit.encode()), replica))
        return True

    async def publish(self, submit: Submit, replica: str) -> bool:
        """All names have one engine: its cache has the blocks."""
        return True

    async def drain(self) -> None:
        """Move all streams to other replicas, as a drain of theirs does."""
        for attempt, _ in list(self._attempts.values()):
            await attempt.move("it drains")

    def _cancel(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.stream_id, None)
        if not attempt.finished:
            self.engine.abort(attempt.stream_id)

    def _on_output(self, output: LoopOutput) -> None:
        deltas = list(output.deltas)
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._deliver, deltas)

    def _deliver(self, deltas: list) -> None:
        frame = Frame.decode(Frame("e", *Frame.pack(deltas)).encode())
        for delta, error in zip(frame.token_deltas(), (d.facts.error for d in deltas), strict=True):
            attempt, budget = self._attempts.get(delta.key, (None, None))
            if attempt is None:
                continue
            attempt.put(delta)
            if error is not None:
                attempt.put(Completion("error", 0, 0, 0, error=error.to_wire()))
            elif budget is not None and delta.index + len(delta.token_ids) >= budget:
                attempt.put(Lost(attempt.replica, "lost on purpose"))
                self.engine.abort(delta.key)


def make_service(
    transport: EngineTransport,
    *,
    tokenizer: TextTokenizer | None = None,
    template: ChatTemplate | None = None,
    has_template: bool = True,
    **facts: Any,
) -> RouterService:
    """The real lifecycle over `transport`; call it in the event loop that will use it.

    Parameters
    ----------
    tokenizer, template
        Instead of the checkpoint's.
    has_template
        False: as for a base model, which has none.
    facts
        Further `ModelFacts`.
    """
    transport.enter()
    return RouterService(
        ModelFacts(
            name="embedded",
            created_s=0,
            defaults=GenerationDefaults(),
            limits=Limits(),
            **facts,
        ),
        router_id="router",
        tokenizer=AsyncTokenizer(tokenizer or TextTokenizer.load(CHECKPOINT)),
        template=(template or ChatTemplate.load(CHECKPOINT, None)) if has_template else None,
        table=transport.table,
        policy=make_policy("slo"),
        transport=transport,
    )

"""Takes a stream's KV along when it leaves a replica that still runs it.

```
 a replica drains ────────────────▶ copy ahead ─▶ the next attempt
 a prefill replica sends the first token ─▶ copy ahead ─▶ the next attempt, on a replica that decodes
```

The replica decodes meanwhile, so the stream's client notices the switch only.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable

import numpy as np

from quire.protos.errors import QuireError
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import PullHint, Submit
from quire.router.fleet.request_bookings import RequestBooking
from quire.router.policy.policy import Ranking
from quire.router.request.answer_text import AnswerText
from quire.router.request.context import RouterContext
from quire.router.transport.transport import Attempt, Lost
from quire.router.types import GenerationRequest

# A stream leaves a replica that drains after this time, though its KV is not copied. `cluster/app.py` leaves more for
# moving.
MAX_AHEAD_S = 30.0
# The second round brings what the stream has added during the first one, so that little is left for its pause. Then the
# target has the blocks on its device, and retains them there for so long at least.
_NUM_ROUNDS, _RETAIN_S = 2, 10.0
# A stream that takes less time to compute leaves at once: a restore ahead takes its turn and two more steps.
_MIN_RESTORED_S = 0.25


class HandOver:
    """The hand-overs of one request.

    Parameters
    ----------
    hashes
        Routing hashes of the prompt.
    rank
        Ranks the replicas for the next attempt.

    Attributes
    ----------
    is_leaving
        The stream has left a prefill replica and has no token of the next one yet.
    """

    def __init__(
        self,
        router: RouterContext,
        request: GenerationRequest,
        answer: AnswerText,
        hashes: np.ndarray,
        rank: Callable[[], Ranking],
    ):
        self.is_leaving = False
        self._router = router
        self._request = request
        self._answer = answer
        self._hashes = hashes
        self._rank = rank
        # A booking where the blocks are copied ahead, until the attempt there begins.
        self._booking: RequestBooking | None = None
        # The replica that has got the blocks ahead, until the attempt there begins, and whether it has got all.
        self._target, self._is_complete = "", False
        # The prefill replicas, while the first attempt is at one and has no token.
        self._prefill: frozenset[str] = frozenset()
        self._leaving: asyncio.Task[None] | None = None

    def on_decision(self, ranking: Ranking, *, is_first: bool) -> None:
        """Take in the decision for the next attempt; `is_first`: there was none before."""
        self._end_booking()
        self._target, self._is_complete = "", False
        if self._prefill:
            self._router.observer.on_prefill("failed")
        self._prefill = _prefill_replicas(ranking) if is_first else frozenset()

    def prefer_target(self, ranking: Ranking) -> Ranking:
        """Put the replica first that has got the blocks. Another one would copy them during the stream's pause.

        It is passed over if another one costs so much less that even computing all blocks there is cheaper: a replica
        may have joined meanwhile, and the one with the blocks may have no room.
        """
        led = ranking.led_by(self._target) if self._target else ranking
        if ranking.terms is not None and led.rows[0] != ranking.rows[0]:
            num_tokens, row = self._answer.num_prompt_tokens, ranking.rows[0]
            compute_s = self._router.table.peers.compute_s(ranking.fleet, row, 0, num_tokens)
            # Not the costs, because those of replicas with late reports are raised.
            more_s = sum(led[0].terms.values()) - sum(ranking[0].terms.values())
            if more_s > compute_s:
                return ranking
        return led

    def follow(self, lead: HandOver) -> None:
        """Take over the lead's decision: this choice is a fork on the same replica."""
        self._prefill = lead._prefill

    def on_first_token(self, attempt: Attempt) -> None:
        """Begin to leave the replica if it only computes prompts."""
        prefill, self._prefill = self._prefill, frozenset()
        if not prefill:
            return
        if attempt.replica not in prefill or attempt.finished:
            # Serve has passed it over, or this was the last token.
            passed_over = attempt.replica not in prefill
            self._router.observer.on_prefill("failed" if passed_over else "stayed")
            return
        # Use an empty context: Serve cancels the calls that were made in a request's context with that request.
        self._leaving = asyncio.get_running_loop().create_task(
            self._leave(attempt), context=contextvars.Context()
        )

    def on_resumed(self, stall_s: float) -> None:
        """Record the first token of a further attempt, `stall_s` after the end of the one before."""
        is_handover, self.is_leaving = self.is_leaving, False
        observer = self._router.observer
        (observer.on_handover if is_handover else observer.on_migration)(stall_s)

    def close(self) -> None:
        """End a hand-over that has not ended."""
        if self._leaving is not None:
            self._leaving.cancel()
        self._end_booking()

    def pull_hint(
        self, left: str, ranking: Ranking, now_s: float, *, is_alive: bool
    ) -> PullHint | None:
        """Where the best replica of a ranking pulls the blocks from that the replica `left` has; None: nowhere.

        A replica that has got them ahead pulls nothing: what the stream has added since then, a block or two, is
        computed in the step that gives the next token, whereas a pull waits for several steps of the replica `left`. If
        the stream goes on elsewhere, they come from that replica: `left` may end as soon as its last stream has left.
        """
        if self._is_complete:
            if ranking[0].replica == self._target:
                return None
            left, is_alive = self._target, True
        num_tokens, peers = self._answer.num_prompt_tokens, self._router.table.peers
        return peers.handover(left, ranking, num_tokens, now_s, is_alive=is_alive)

    async def copy_ahead(self, attempt: Attempt) -> None:
        """Copy the KV of a replica that drains to the one where the request will go on.

        If computing takes less time, nothing is copied. If the replica with the blocks is to be passed over by then,
        for example because the replacement of the one that drains is ready, they are copied once more: the stream
        still decodes meanwhile.
        """
        with contextlib.suppress(QuireError, TimeoutError):
            async with asyncio.timeout(MAX_AHEAD_S):
                for _ in range(2):
                    ranking = self.prefer_target(self._rank())
                    if ranking[0].replica in (attempt.replica, self._target):
                        break
                    self._target, self._is_complete = "", False
                    if not await self._bring(attempt, ranking, drains=True):
                        break
        if not self._is_complete:
            self._end_booking()

    async def _leave(self, attempt: Attempt) -> None:
        """Let the stream go on on a replica that decodes, once its blocks are there."""
        outcome = "stayed"
        try:
            with contextlib.suppress(QuireError, TimeoutError):
                ranking = self._rank()
                has_target = ranking[0].replica != attempt.replica and not _prefill_replicas(
                    ranking
                )
                is_there = has_target and await self._bring(attempt, ranking, drains=False)
                if is_there and not attempt.finished:
                    outcome, self.is_leaving = "moved", True
                    attempt.put(Lost(attempt.replica, "its prompt is computed", planned=True))
        finally:
            self._router.observer.on_prefill(outcome)

    async def _bring(self, attempt: Attempt, ranking: Ranking, *, drains: bool) -> bool:
        """Bring the blocks to the device of the best replica of a ranking; return whether its node has them.

        Parameters
        ----------
        drains
            Whether the replica that runs the request drains, so that the request leaves it in any case.
        """
        router, target = self._router, ranking[0].replica
        is_complete, brought = False, 0
        async with asyncio.timeout(MAX_AHEAD_S):  # A replica may hang.
            for number in range(_NUM_ROUNDS):
                num_tokens, peers = self._answer.num_prompt_tokens, router.table.peers
                compute_s = peers.compute_s(ranking.fleet, ranking.rows[0], 0, num_tokens)
                is_long = compute_s > _MIN_RESTORED_S
                is_restored = is_long and number == _NUM_ROUNDS - 1
                retain_s = _RETAIN_S if is_restored else 0.0
                is_near = peers.share_pool(attempt.replica, target)
                hint = self.pull_hint(attempt.replica, ranking, router.clock(), is_alive=True)
                if hint is None and not (is_near and (is_long or not drains)):
                    return False
                self._book(target, num_tokens)
                if hint is not None:
                    # It waits in the target's line.
                    hint = hint._replace(start=max(hint.start, brought), max_wait_s=MAX_AHEAD_S)
                    is_complete = await router.transport.pull(self._prompt(hint, retain_s), target)
                    brought = hint.end if is_complete else 0
                    continue
                is_published = await router.transport.publish(self._prompt(None), attempt.replica)
                if not (is_published or drains):
                    return False
                if is_restored:
                    prompt = self._prompt(None, retain_s)
                    is_complete = await router.transport.pull(prompt, target)
        self._target, self._is_complete = target, is_complete
        return True

    def _prompt(self, pull: PullHint | None, retain_s: float = 0.0) -> Submit:
        router, request = self._router, self._request
        return Submit(
            router.router_id,
            router.transport.next_stream_id(),
            request.request_id,
            self._answer.prompt_ids(),
            SamplingParams(),
            num_emitted=len(self._answer.token_ids),
            tenant=request.tenant,
            priority=request.priority,
            payer="" if request.bill is None else request.bill.tenant,
            retain_s=retain_s,
            adapter=request.adapter,
            pull=pull,
        )

    def _book(self, replica: str, num_tokens: int) -> None:
        """Let the next decision, and those of other streams that leave the replica, count on the blocks there."""
        self._end_booking()
        table, now_s = self._router.table, self._router.clock()
        self._booking = table.book_cached(replica, self._hashes, num_tokens, now_s)

    def _end_booking(self) -> None:
        booking, self._booking = self._booking, None
        if booking is not None:
            self._router.table.end(booking, self._router.clock())


def _prefill_replicas(ranking: Ranking) -> frozenset[str]:
    """The prefill replicas, if the best replica of a ranking is one."""
    prefill = ranking.fleet.prefill
    if prefill is None or not prefill.is_prefill[ranking.rows[0]]:
        return frozenset()
    rows = prefill.is_prefill.nonzero()[0].tolist()
    return frozenset(ranking.fleet.replicas[row] for row in rows)

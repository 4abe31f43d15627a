"""Sources of drafts: texts that are looked up, with a fixed or a chosen number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from time import perf_counter

import numpy as np

from quire.replica.config import EngineConfig
from quire.replica.core.draft_source import DraftSource, Reserve
from quire.replica.core.request import Request
from quire.replica.speculation import draft_lengths
from quire.replica.speculation.draft_lengths import Acceptance, choose_lengths
from quire.replica.speculation.draft_steps import DraftRunner
from quire.replica.speculation.gram_table import MAX_SIZE
from quire.replica.speculation.model_drafts import ModelSource
from quire.replica.speculation.request_drafts import RequestDrafts
from quire.replica.speculation.step_costs import LossBudget, StepCosts
from quire.replica.speculation.texts import Match, RecentAnswers
from quire.replica.speculation_options import SpeculationOptions

_NO_DRAFT = np.empty(0, np.int32)


def open_draft_source(
    config: EngineConfig, draft_runner: DraftRunner | None = None
) -> DraftSource | None:
    """The source that the options ask for; None: no speculation.

    Parameters
    ----------
    draft_runner
        Runs the draft model; only the method draft_model has one.
    """
    match config.speculation.method:
        case "off":
            return None
        case "draft_model":
            assert draft_runner is not None
            return ModelSource(config, draft_runner)
        case "auto":
            return AutoSource(config.speculation)
        case _:
            return LookupSource(config.speculation)


class LookupSource:
    """Drafts the most tokens that it may for each request whose last tokens are found."""

    def __init__(self, options: SpeculationOptions):
        self._max_tokens = options.max_draft_tokens
        self._of_request: dict[Hashable, RequestDrafts] = {}
        looks_up_answers = options.method != "ngram"
        self._answers = RecentAnswers(options.suffix_index_bytes) if looks_up_answers else None

    def attach(self, reserve: Reserve) -> None:
        """Does nothing: texts need no blocks."""

    def propose(self, requests: Sequence[Request], room: int) -> list[np.ndarray]:
        drafts = []
        for request in requests:
            found = self._drafts_of(request).look(request.token_ids)
            count = self._most(request)
            drafts.append(found.draft(count) if found is not None and count > 0 else _NO_DRAFT)
        return drafts

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass

    def observe_step(self, num_rows: int, num_drafted: int, duration_s: float) -> None:
        pass

    def end(self, request: Request) -> None:
        self._of_request.pop(request.key, None)
        known = max(request.num_prompt_tokens + request.num_emitted, request.num_remembered)
        if self._answers is not None and request.num_tokens > known:
            # With the end of the prompt, so that the same prompt finds the answer's beginning.
            new = request.token_ids[max(0, known - MAX_SIZE) :]
            self._answers.add(request.chain.tenant, new)
            request.num_remembered = request.num_tokens

    def _drafts_of(self, request: Request) -> RequestDrafts:
        drafts = self._of_request.get(request.key)
        if drafts is None:
            drafts = self._of_request[request.key] = RequestDrafts(request, self._answers)
        return drafts

    def _most(self, request: Request) -> int:
        """Most tokens of a draft: one more token follows it in any case."""
        return min(self._max_tokens, request.run_length - request.num_tokens - 1)


class _Record:
    """What `AutoSource` knows about one request."""

    # Looks without enough gain before a request sleeps, and for how many tokens it sleeps at first and at most.
    PATIENCE = 4
    FIRST_SLEEP = 8
    MAX_SLEEP = 128
    _WEIGHT = 0.2

    def __init__(self) -> None:
        self.acceptance = Acceptance(0.0, 0.0, 0.9)
        # The tokens that the last match predicted, its kind, and the request's length then.
        self.expected: list[int] = []
        self.kind = 0
        self.num_tokens = 0
        # Average number of right tokens of a look.
        self.gain = 0.5
        self._patience = self.PATIENCE
        self._sleep = self.FIRST_SLEEP
        # Length at which the request is looked at again.
        self.wakes_at = 0

    def settle(self, tokens: np.ndarray, kinds: list[Acceptance]) -> None:
        """Compare the tokens since the last look with those predicted then, whether or not they were drafted."""
        new = tokens[self.num_tokens :][: len(self.expected)].tolist()
        num_right = 0
        if new:
            while num_right < len(new) and new[num_right] == self.expected[num_right]:
                num_right += 1
            is_wrong = num_right < len(new)
            self.acceptance.observe(num_right, is_wrong)
            kinds[self.kind].observe(num_right, is_wrong)
        self.gain += self._WEIGHT * (num_right - self.gain)

    def expect(self, tokens: np.ndarray, found: Match | None, count: int) -> None:
        """Remember the prediction of this look."""
        self.num_tokens = len(tokens)
        self.expected = [] if found is None else found.draft(count).tolist()
        self.kind = 0 if found is None else found.kind

    def rest(self, least_gain: float) -> None:
        """Sleep if looks do not pay: if they predict less than `least_gain` tokens each."""
        if self.gain >= least_gain:
            self._patience, self._sleep = self.PATIENCE, self.FIRST_SLEEP
            return
        self._patience -= 1
        if self._patience <= 0:
            self.wakes_at = self.num_tokens + self._sleep
            self._patience, self._sleep = self.PATIENCE, min(2 * self._sleep, self.MAX_SLEEP)


class AutoSource(LookupSource):
    """Drafts as many tokens as pay, by measured acceptance and measured step times.

    A prediction that is not drafted is compared with the tokens that come, which costs no step. So acceptance is known
    before anything is drafted, and a text that begins to repeat itself is noticed.

    Parameters
    ----------
    clock
        Seconds, for the host's time.
    """

    # A look pays if it predicts tokens of this multiple of its own time.
    _LOOK_WORTH = 2.0
    # A longer time since the last step, in durations of a step, is a pause.
    _MAX_INTERVAL = 4.0
    _WEIGHT = 0.05

    def __init__(self, options: SpeculationOptions, clock: Callable[[], float] = perf_counter):
        super().__init__(options)
        self._clock = clock
        self._records: dict[Hashable, _Record] = {}
        self._kinds = draft_lengths.kinds()
        self._costs = StepCosts()
        self._budget = LossBudget()
        # Average seconds of a look, seconds per row of a plain step, and seconds that a drafted token adds.
        self._look_s = 0.0
        self._row_s = 0.0
        self._token_s = 0.0
        # Time of the last `observe_step`; calls of `propose` since then, and the seconds that they took.
        self._observed_s = 0.0
        self._num_proposals = 0
        self._proposing_s = 0.0

    def propose(self, requests: Sequence[Request], room: int) -> list[np.ndarray]:
        began_s = self._clock()
        self._num_proposals += 1
        drafts = [_NO_DRAFT] * len(requests)
        if requests and not self._budget.is_resting():
            num_looks = self._draft(requests, room, drafts)
            elapsed_s = self._clock() - began_s
            if num_looks:
                self._look_s += self._WEIGHT * (elapsed_s / num_looks - self._look_s)
            self._budget.spend(elapsed_s)
            self._proposing_s += elapsed_s
        return drafts

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self._budget.spend(num_drafted * self._token_s - num_accepted * self._row_s)

    def observe_step(self, num_rows: int, num_drafted: int, duration_s: float) -> None:
        costs = self._costs
        predicted_s = costs.predicted_extra_s(num_rows, num_drafted)
        costs.observe(num_rows, num_drafted, self._since_last_step(duration_s))
        if num_drafted:
            # What was predicted is paid already. One slow step counts as far as it changes the prediction, because
            # other load on the machine makes steps slow, too.
            self._budget.spend(costs.predicted_extra_s(num_rows, num_drafted) - predicted_s)
        else:
            self._budget.earn(costs.plain_s(num_rows))

    def _since_last_step(self, duration_s: float) -> float:
        """Seconds from the last step to this one without lookups; `duration_s` counts from the step's launch.

        The two differ if steps overlap, or if the device waits for the host. After a pause, or after a step with
        prefill, which is not reported here, only the duration is known.
        """
        now_s = self._clock()
        seconds = now_s - self._observed_s - self._proposing_s
        is_next = self._num_proposals == 1 and seconds <= self._MAX_INTERVAL * duration_s
        self._observed_s, self._num_proposals, self._proposing_s = now_s, 0, 0.0
        return seconds if is_next else duration_s

    def end(self, request: Request) -> None:
        super().end(request)
        self._records.pop(request.key, None)

    def _draft(self, requests: Sequence[Request], room: int, drafts: list[np.ndarray]) -> int:
        """Write the drafts of some requests into `drafts`; returns how many requests were looked at."""
        num_rows, costs = len(requests), self._costs
        if costs.wants_plain(num_rows):
            return 0
        plain_s = costs.plain_s(num_rows)
        fixed, per_token = costs.extra(num_rows)
        self._row_s, self._token_s = plain_s / num_rows, plain_s * per_token
        least_gain = self._LOOK_WORTH * self._look_s / self._row_s
        found: list[tuple[int, Match]] = []
        acceptance, most = [], []
        num_looks = 0
        for i, request in enumerate(requests):
            record = self._records.get(request.key)
            if record is None:
                record = self._records[request.key] = _Record()
            elif request.num_tokens < record.wakes_at:
                continue
            num_looks += 1
            match = self._look(request, record, least_gain)
            longest = self._most(request)
            if match is not None and longest > 0:
                found.append((i, match))
                acceptance.append(record.acceptance.given(self._kinds[match.kind].rate()))
                most.append(min(longest, len(record.expected)))
        if found:
            lengths = choose_lengths(
                num_rows,
                np.array(acceptance),
                np.array(most),
                # The first tokens count as free: they are what tells the cost.
                (fixed, per_token) if costs.knows_extra(num_rows) else (0.0, 0.0),
                min(room, costs.max_drafted(num_rows)),
            ).tolist()
            for (i, match), length in zip(found, lengths, strict=True):
                if length:
                    drafts[i] = match.draft(length)
            if any(lengths):
                # `observe` pays for each token that the step has verified.
                self._budget.spend(fixed * plain_s)
        return num_looks

    def _look(self, request: Request, record: _Record, least_gain: float) -> Match | None:
        tokens = request.token_ids
        record.settle(tokens, self._kinds)
        found = self._drafts_of(request).look(tokens)
        record.expect(tokens, found, self._max_tokens)
        record.rest(least_gain)
        return found

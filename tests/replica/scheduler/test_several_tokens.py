"""Steps that give a row several tokens, because its draft was right: the output is that of one token a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_drafts import OracleDrafts
from small_config import small_config

from quire.protos.errors import InvalidRequest
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import TokenDelta, TokenLogprob
from quire.replica.core.request import Request
from quire.replica.core.step_plan import NO_TOKEN, StepPlan, StepResult
from quire.replica.request_table.rows import RowTable
from quire.replica.scheduler.scheduler import Scheduler

# The device gives output token i of request r the id 100 + 40 * r + i.
FIRST_ID, IDS_OF_REQUEST = 100, 40


class Digits:
    """A grammar that allows `length` tokens and then no more."""

    error = None

    def __init__(self, length: int):
        self.left = length
        self.seen: list[int] = []

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return min(len(token_ids), self.left - 1)

    def ahead(self, token_ids: Sequence[int]) -> None:
        """The device of this test needs no masks."""

    def advance(self, token_id: int) -> bool:
        self.seen.append(token_id)
        self.left -= 1
        return self.left == 0


class Client:
    """What one request's owner gets."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.end: TokenDelta | None = None

    def take(self, delta: TokenDelta) -> None:
        assert self.end is None and delta.index == len(self.token_ids)
        self.token_ids += delta.token_ids
        self.logprobs += [score.logprob for score in delta.facts.logprobs or ()]
        if delta.finish_reason is not None:
            self.end = delta


def result_of(plan: StepPlan, requests: list[Request]) -> StepResult:
    """The sample after each token. Log-probabilities equal the ids."""
    seed = plan.sampling.columns["seed"].astype(np.int64)
    num_prompt = np.array([request.num_prompt_tokens for request in requests])
    ids = FIRST_ID + IDS_OF_REQUEST * seed + plan.sampling.position - num_prompt[seed]
    scores = {i: TokenLogprob(float(ids[i]), [], []) for i, _ in plan.sampling.logprobs}
    return StepResult(ids, 0.01, scores)


def ids_of(r: int, *indices: int) -> tuple[int, ...]:
    return tuple(FIRST_ID + IDS_OF_REQUEST * r + i for i in indices)


def run(
    requests: list[Request], in_flight: int, source: OracleDrafts | None = None, share: float = 0.1
) -> dict[object, Client]:
    scheduler = Scheduler(small_config(), draft_source=source)
    scheduler.book.drafting.LOCKSTEP_SHARE = share
    clients = {request.key: Client() for request in requests}
    for request in requests:
        assert scheduler.add(request) is None
    plans: list[StepPlan] = []
    while True:
        plan = scheduler.plan(0.0) if len(plans) < in_flight else None
        if plan is not None:
            plans.append(plan)
        if plan is not None and len(plans) < in_flight:
            continue
        if not plans:
            if not any(request.is_paused for request in requests):
                scheduler.check_idle()
                return clients
            for request in requests:
                scheduler.grant(request.key, len(clients[request.key].token_ids) + 3)
            continue
        oldest = plans.pop(0)
        for delta in scheduler.commit(oldest, result_of(oldest, requests), 0.0):
            clients[delta.key].take(delta)
        scheduler.check()


def make_requests() -> list[Request]:
    """One for each way to end, and one with credit for three tokens at a time."""
    params = [
        {"max_tokens": 23},
        {"stop_token_ids": ids_of(1, 14)},
        {"stop_token_ids": ids_of(2, 3, 9, 17), "min_tokens": 10},
        {"logprobs": 0, "max_tokens": 17},
        {"logprobs": 0, "stop_token_ids": ids_of(4, 11)},
        {"max_tokens": 19},
        {"ignore_eos": True},
    ]
    requests = [
        Request(
            r,
            list(range(5, 12 + 3 * r)),
            SamplingParams(**{"max_tokens": 40, "seed": r, **fields}),
            credit_tokens=3 if r == 5 else None,
        )
        for r, fields in enumerate(params)
    ]
    requests[6].grammar = Digits(15)
    return requests


def oracle(**options: float) -> OracleDrafts:
    """It knows the ids that would follow after the end of a request, too."""
    outputs = {r: ids_of(r, *range(IDS_OF_REQUEST)) for r in range(7)}
    return OracleDrafts(outputs, 1000, **options)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    longest=st.integers(1, 20),
    wrong=st.sampled_from([0.0, 0.1, 0.5]),
    silent=st.sampled_from([0.0, 0.4]),
    in_flight=st.sampled_from([1, 2]),
    share=st.sampled_from([0.1, 2.0]),
)
def test_the_output_does_not_depend_on_drafts(seed, longest, wrong, silent, in_flight, share):
    expected = run(make_requests(), 1)
    requests = make_requests()
    source = oracle(seed=seed, max_draft_tokens=longest, wrong=wrong, silent=silent)
    found = run(requests, in_flight, source, share)
    lengths = [len(client.token_ids) for client in expected.values()]
    assert lengths == [23, 15, 18, 17, 12, 19, 15]
    for key, client in found.items():
        assert client.token_ids == expected[key].token_ids
        assert client.logprobs == expected[key].logprobs
        assert client.end.finish_reason == expected[key].end.finish_reason
        assert client.end.facts.num_output_tokens == len(client.token_ids)
    assert requests[6].grammar.seen == found[6].token_ids
    assert found[3].logprobs == [float(token) for token in found[3].token_ids]
    facts = [client.end.facts for client in found.values()]
    assert sum(fact.num_drafted or 0 for fact in facts) == source.num_drafted
    assert sum(fact.num_accepted or 0 for fact in facts) == source.num_accepted


def test_a_right_draft_saves_steps():
    """One step for the prompt, and one for each six tokens."""
    source = oracle(wrong=0.0, silent=0.0, max_draft_tokens=5)
    request = Request(0, list(range(5, 12)), SamplingParams(max_tokens=25, seed=0))
    source._propose = lambda request: np.array(  # type: ignore[method-assign]
        ids_of(0, *range(request.num_tokens - 7, request.num_tokens - 2)), np.int32
    )
    assert run([request], 1, source)[0].token_ids == list(ids_of(0, *range(25)))
    assert source.steps == [(1, 5)] * 4
    assert (request.num_drafted, request.num_accepted) == (20, 20)


class Always(OracleDrafts):
    """Proposes these tokens."""

    def __init__(self, *token_ids: int):
        super().__init__({}, 1000)
        self.token_ids = np.array(token_ids, np.int32)

    def _propose(self, request: Request) -> np.ndarray:
        return self.token_ids


def begun(*draft: int, **params: object) -> tuple[Scheduler, Request, Always]:
    source = Always(*draft)
    scheduler = Scheduler(small_config(), draft_source=source)
    request = Request(0, list(range(5, 12)), SamplingParams(**{"max_tokens": 30, **params}))
    scheduler.add(request)
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, StepResult(np.array([50]), 0.01), 0.0)
    return scheduler, request, source


def commit(scheduler: Scheduler, *tokens: int) -> list[TokenDelta]:
    plan = scheduler.plan(0.0)
    return list(scheduler.commit(plan, StepResult(np.array(tokens, np.int64), 0.01), 0.0))


def test_a_row_that_gets_stuck_keeps_the_tokens_before():
    scheduler, _, _ = begun(51, 52, 53)
    (delta,) = commit(scheduler, 51, 52, NO_TOKEN, 53)
    assert (delta.index, delta.token_ids, delta.finish_reason) == (1, [51, 52], "error")
    assert isinstance(delta.facts.error, InvalidRequest)
    assert "at output index 3" in delta.facts.error.message
    scheduler.check_idle()


def test_a_row_that_stops_before_it_gets_stuck_has_stopped():
    scheduler, _, _ = begun(51, 52, stop_token_ids=(52,))
    (delta,) = commit(scheduler, 51, 52, NO_TOKEN)
    assert (delta.token_ids, delta.finish_reason, delta.facts.error) == ([51, 52], "stop", None)
    assert (delta.facts.num_drafted, delta.facts.num_accepted) == (2, 2)


def test_a_sample_after_a_wrong_token_does_not_count_even_if_it_is_stuck():
    scheduler, request, _ = begun(51, 52)
    (delta,) = commit(scheduler, 50, NO_TOKEN, 53)
    assert (delta.index, delta.token_ids, request.num_accepted) == (1, [50], 0)


@pytest.mark.parametrize("tokens", [(51,), (51, 52), (51, 52, 53, 54)])
def test_a_result_of_another_length_fails_the_step(tokens):
    scheduler, _, _ = begun(51, 52)
    (delta,) = commit(scheduler, *tokens)
    assert (delta.finish_reason, delta.facts.error.code) == ("error", "engine_error")
    scheduler.check()


def test_a_draft_ends_at_an_id_out_of_the_vocabulary_and_before_the_last_token():
    scheduler, _, source = begun(51, 52, 1000, 53)
    assert scheduler.plan(0.0).token_ids.tolist()[1:] == [51, 52]
    scheduler, _, source = begun(51, 52, 53, max_tokens=4)
    assert scheduler.plan(0.0).token_ids.tolist()[1:] == [51, 52]
    source.token_ids = source.token_ids[:0]


def test_an_aborted_row_is_forgotten_and_its_draft_is_dropped():
    scheduler, _, source = begun(51, 52)
    plan = scheduler.plan(0.0)
    assert source.live == {0}
    scheduler.abort(0)
    assert not source.live
    assert not list(scheduler.commit(plan, StepResult(np.array([51, 52, 53]), 0.01), 0.0))
    scheduler.check_idle()


def test_a_recurrent_model_gets_no_drafts():
    source = Always(51, 52)
    scheduler = Scheduler(small_config(has_states=True), draft_source=source)
    scheduler.add(Request(0, list(range(5, 12)), SamplingParams(max_tokens=30)))
    scheduler.commit(scheduler.plan(0.0), StepResult(np.array([50]), 0.01), 0.0)
    assert scheduler.plan(0.0).num_tokens == 1


def test_the_cache_has_the_blocks_of_accepted_tokens_only():
    """The prompt and the first token fill one block of eight; the draft would fill two more."""
    draft = tuple(range(51, 71))
    scheduler, request, _ = begun(*draft)
    scheduler.plan(0.0)
    assert len(scheduler.memory.prefix) == 0
    scheduler, request, _ = begun(*draft)
    commit(scheduler, *draft[:9], *[7] * 12)  # the first nine are right
    assert request.num_tokens == 7 + 1 + 10
    assert len(scheduler.memory.prefix) == 2
    assert int(scheduler.rows.num_computed[request.row]) == request.num_tokens - 1
    scheduler.check()


@given(st.lists(st.lists(st.integers(0, 20), min_size=2, max_size=2), max_size=12))
def test_tokens_that_are_recorded_together_are_those_recorded_one_by_one(counts):
    tables, requests = [], []
    for _ in range(2):
        table = RowTable(2, 64, 8, 1000)
        own = [Request(i, [5] * (6 + 5 * i), SamplingParams(max_tokens=400)) for i in range(2)]
        for request in own:
            request.accept(())
            table.claim(request, [[0]], 0)
        tables.append(table)
        requests.append(own)
    together, single = tables
    rows = np.array([request.row for request in requests[0]])
    ids = iter(range(10, 1000))
    for of_step in counts:
        tokens = [[next(ids) for _ in range(count)] for count in of_step]
        flat = np.array([token for of_row in tokens for token in of_row], np.int32)
        cu = np.cumsum([0, *of_step]).astype(np.int32)
        length = together.record(rows, flat, cu)
        for row in rows[length % 8 == 0].tolist():
            together.flush(row)  # as the plan of the step that computes the block's last token
        for row, of_row in zip(rows, tokens, strict=True):
            for token in of_row:
                single.record(np.array([row]), np.array([token], np.int32))
                if single.length[row] % 8 == 0:
                    single.flush(row)
        assert length.tolist() == single.length[rows].tolist()
        for row in rows.tolist():
            assert together.newest_output(row, 30) == single.newest_output(row, 30)
    for row, one, other in zip(rows.tolist(), *requests, strict=True):
        together.flush(row)
        single.flush(row)
        assert one.token_ids.tolist() == other.token_ids.tolist()

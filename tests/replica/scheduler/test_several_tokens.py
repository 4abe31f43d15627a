"""Results that give a row none or several tokens: the output is that of one token a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_config import small_config

from quire.protos import ragged
from quire.protos.errors import InvalidRequest
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import TokenDelta, TokenLogprob
from quire.replica.core.request import Request
from quire.replica.core.step_plan import NO_TOKEN, StepPlan, StepResult
from quire.replica.request_table.rows import RowTable
from quire.replica.scheduler.scheduler import Scheduler

# The device gives output token i of request r the id 100 + 40 * r + i.
FIRST_ID, IDS_OF_REQUEST = 100, 40
COUNTS = st.lists(st.integers(0, 20), max_size=30)


class Digits:
    """A grammar that allows `length` tokens and then no more."""

    error = None

    def __init__(self, length: int):
        self.left = length
        self.seen: list[int] = []

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


def result_of(plan: StepPlan, requests: list[Request], counts: list[int]) -> StepResult:
    """The next tokens of each row: so many for the first rows, then one each. Log-probabilities equal the ids."""
    tokens = []
    for i, (seed, position) in enumerate(
        zip(plan.sampling.columns["seed"].tolist(), plan.sampling.position.tolist(), strict=True)
    ):
        index = position - requests[seed].num_prompt_tokens
        begin = FIRST_ID + IDS_OF_REQUEST * seed + index
        count = counts[i] if i < len(counts) else 1
        tokens.append(list(range(begin, begin + count)))
    flat = np.array([token for of_row in tokens for token in of_row], np.int64)
    asked = {i for i, _ in plan.sampling.logprobs}
    row_of = np.repeat(np.arange(len(tokens)), [len(of_row) for of_row in tokens])
    scores = {
        at: TokenLogprob(float(flat[at]), [], [])
        for at in range(len(flat))
        if int(row_of[at]) in asked
    }
    return StepResult(flat, 0.01, scores, cu=ragged.cumulated([len(t) for t in tokens]))


def run(requests: list[Request], draws: list[list[int]], in_flight: int) -> dict[object, Client]:
    """Run the requests. Each step takes the next draw; when they are used up, each row gets one token."""
    scheduler = Scheduler(small_config())
    clients = {request.key: Client() for request in requests}
    for request in requests:
        assert scheduler.add(request) is None
    plans: list[StepPlan] = []
    draws = list(draws)
    while True:
        plan = scheduler.plan(0.0) if len(plans) < in_flight else None
        if plan is not None:
            plans.append(plan)
        if plan is not None and len(plans) < in_flight:
            continue
        if not plans:
            if not any(request.is_paused for request in requests):
                return clients
            for request in requests:
                scheduler.grant(request.key, len(clients[request.key].token_ids) + 3)
            continue
        counts = draws.pop(0) if draws else []
        oldest = plans.pop(0)
        for delta in scheduler.commit(oldest, result_of(oldest, requests, counts), 0.0):
            clients[delta.key].take(delta)
        scheduler.check()


def make_requests() -> list[Request]:
    """One for each way to end, and one with credit for three tokens at a time."""

    def ids(r: int, *indices: int) -> tuple[int, ...]:
        return tuple(FIRST_ID + IDS_OF_REQUEST * r + i for i in indices)

    params = [
        {"max_tokens": 23},
        {"stop_token_ids": ids(1, 14)},
        {"stop_token_ids": ids(2, 3, 9, 17), "min_tokens": 10},
        {"logprobs": 0, "max_tokens": 17},
        {"logprobs": 0, "stop_token_ids": ids(4, 11)},
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


@settings(max_examples=60, deadline=None)
@given(draws=st.lists(COUNTS, max_size=25), in_flight=st.sampled_from([1, 2]))
def test_the_output_does_not_depend_on_how_many_tokens_a_step_gives(draws, in_flight):
    expected = run(make_requests(), [], 1)
    requests = make_requests()
    found = run(requests, draws, in_flight)
    lengths = [len(client.token_ids) for client in expected.values()]
    assert lengths == [23, 15, 18, 17, 12, 19, 15]
    for key, client in found.items():
        assert client.token_ids == expected[key].token_ids
        assert client.logprobs == expected[key].logprobs
        assert client.end.finish_reason == expected[key].end.finish_reason
        assert client.end.facts.num_output_tokens == len(client.token_ids)
    assert requests[6].grammar.seen == found[6].token_ids
    assert found[3].logprobs == [float(token) for token in found[3].token_ids]


def begun(**params: object) -> tuple[Scheduler, Request]:
    scheduler = Scheduler(small_config())
    request = Request(0, list(range(5, 12)), SamplingParams(**{"max_tokens": 30, **params}))
    scheduler.add(request)
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, StepResult(np.array([50]), 0.01), 0.0)
    return scheduler, request


def commit(scheduler: Scheduler, *tokens: int) -> list[TokenDelta]:
    plan = scheduler.plan(0.0)
    cu = np.array([0, len(tokens)], np.int32)
    return list(scheduler.commit(plan, StepResult(np.array(tokens, np.int64), 0.01, cu=cu), 0.0))


def test_a_row_that_gets_stuck_keeps_the_tokens_before():
    scheduler, _ = begun()
    (delta,) = commit(scheduler, 51, 52, NO_TOKEN, 53)
    assert (delta.index, delta.token_ids, delta.finish_reason) == (1, [51, 52], "error")
    assert isinstance(delta.facts.error, InvalidRequest)
    assert "at output index 3" in delta.facts.error.message
    scheduler.check_idle()


def test_a_row_that_stops_before_it_gets_stuck_has_stopped():
    scheduler, _ = begun(stop_token_ids=(52,))
    (delta,) = commit(scheduler, 51, 52, NO_TOKEN)
    assert (delta.token_ids, delta.finish_reason, delta.facts.error) == ([51, 52], "stop", None)


def test_a_row_without_a_token_gets_no_delta_and_goes_on():
    scheduler, request = begun()
    assert commit(scheduler) == []
    (delta,) = commit(scheduler, 51)
    assert (delta.index, delta.token_ids, request.num_tokens) == (1, [51], 8)


@pytest.mark.parametrize("cu", [[0], [0, 1], [0, 1, 2], [1, 2], [0, 3]])
def test_a_result_whose_bounds_do_not_fit_fails_the_step(cu):
    scheduler, _ = begun()
    plan = scheduler.plan(0.0)
    result = StepResult(np.array([51, 52]), 0.01, cu=np.array(cu, np.int32))
    (delta,) = scheduler.commit(plan, result, 0.0)
    assert (delta.finish_reason, delta.facts.error.code) == ("error", "engine_error")
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


def test_a_row_whose_credit_cuts_its_tokens_computes_the_one_that_is_left():
    """The device still knows the last of the tokens that it gave, so its memory must not be used."""
    scheduler = Scheduler(small_config())
    request = Request(0, list(range(5, 12)), SamplingParams(max_tokens=30), credit_tokens=2)
    scheduler.add(request)
    scheduler.commit(scheduler.plan(0.0), StepResult(np.array([50]), 0.01), 0.0)
    (delta,) = commit(scheduler, 51, 52, 53)
    assert (delta.token_ids, request.is_paused) == ([51], True)
    scheduler.grant(0, 4)
    plan = scheduler.plan(0.0)
    assert (plan.num_decode_rows, plan.token_ids[-1]) == (0, 51)

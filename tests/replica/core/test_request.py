import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos.errors import ContextLengthExceeded, InvalidRequest
from quire.protos.sampling_params import SamplingParams
from quire.protos.wire import TokenRecord
from quire.replica.config import EngineConfig
from quire.replica.core.delta_batch import DeltaBatch
from quire.replica.core.request import (
    ALLOWED_TRANSITIONS,
    FinishReason,
    Phase,
    Request,
    validate,
)
from tests.protos.sampling_bound_cases import (
    ACCEPTED,
    PRIORITIES_ACCEPTED,
    PRIORITIES_REFUSED,
    REFUSED,
    VOCAB_SIZE,
    as_field,
)

CONFIG = EngineConfig(
    model_name="m",
    revision="r",
    device="cpu",
    dtype="float32",
    vocab_size=100,
    eos_token_ids=(3,),
    max_model_len=64,
    block_size=8,
    num_blocks=16,
    max_batch_tokens=32,
    max_running_requests=4,
    max_waiting_requests=4,
    safety_margin=0.2,
    scheduler="fifo",
    max_prefill_ms=None,
    resume_margin=0.0,
    prefix_caching=True,
    deterministic=True,
    num_threads=1,
)
SMALL_CACHE = dataclasses.replace(CONFIG, num_blocks=4)  # 32 tokens


def make(prompt=(1, 2, 3), num_emitted=0, num_expected_cached=0, **params):
    return Request(
        "key",
        prompt,
        SamplingParams(**params),
        num_emitted=num_emitted,
        num_expected_cached=num_expected_cached,
    )


def refusal(request, config=CONFIG):
    with pytest.raises(InvalidRequest) as caught:
        validate(request, config)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt must have at least 1 token, got 0"),
        ([1, 100], "prompt must be token ids in [0, 100), got 100"),
        ([1, -1], "prompt must be token ids in [0, 100), got -1"),
        ([2**40], f"prompt must be token ids in [0, 100), got {2**40}"),
        ([2**70], "prompt must be integers, got object"),
        ([1.0, 2.0], "prompt must be integers, got float64"),
        ([True], "prompt must be integers, got bool"),
        (["a"], "prompt must be integers, got <U1"),
        ([[1, 2]], "prompt must be a flat list of token ids, got 2 dimensions"),
        (5, "prompt must be a flat list of token ids, got 0 dimensions"),
    ],
)
def test_a_bad_prompt_is_refused_with_the_bound_and_the_value(prompt, message):
    error = refusal(make(prompt))
    assert error.message == message
    assert error.field == "prompt"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "num_expected_cached must be an integer in [0, 2147483647], got -1"),
        (0.5, "num_expected_cached must be an integer in [0, 2147483647], got 0.5"),
    ],
)
def test_an_expectation_that_is_none_is_refused(value, message):
    assert refusal(make([1, 2], num_expected_cached=value)).message == message


def test_a_ragged_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="prompt must be a flat list"):
        make([[1], [1, 2]])


WIDE = dataclasses.replace(CONFIG, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_values_at_the_bounds_of_the_router_are_accepted(name, value):
    validate(make(**as_field(name, value)), WIDE)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_the_router_refuses_is_refused_by_field_with_bound_and_value(name, value):
    error = refusal(make(**as_field(name, value)), WIDE)
    assert error.field == name
    assert name in error.message
    assert "got" in error.message or "not valid Unicode" in error.message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens must be an integer >= 1, got 0"),
        ("min_tokens", 17, "min_tokens must be <= max_tokens, which is 16, got 17"),
        ("temperature", math.inf, "temperature must be a number in [0, 100], got inf"),
        ("top_p", 0.0, "top_p must be a number in (0, 1], got 0.0"),
        ("top_k", -1, f"top_k must be an integer in [0, {2**31 - 1}], got -1"),  # a client's "off"
        ("seed", -1, f"seed must be an integer in [0, {2**64 - 1}], got -1"),
        ("choice", -1, f"choice must be an integer in [0, {2**31 - 1}], got -1"),
        ("repetition_penalty", 0, "repetition_penalty must be a number in (0, 100], got 0"),
        (
            "bad_words",
            ((1,),) * 257,
            "bad_words must have at most 256 token sequences, got 257",
        ),
        ("stop_token_ids", (1,) * 129, "stop_token_ids must have at most 128 ids, got 129"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_bound(field, value, message):
    assert refusal(make(**{field: value})).message == message


@pytest.mark.parametrize("priority", PRIORITIES_REFUSED)
def test_a_priority_out_of_bounds_is_refused(priority):
    request = Request("key", [1, 2, 3], SamplingParams(), priority=priority)
    assert refusal(request).field == "priority"


@pytest.mark.parametrize("priority", PRIORITIES_ACCEPTED)
def test_a_priority_within_bounds_is_accepted(priority):
    validate(Request("key", [1, 2, 3], SamplingParams(), priority=priority), CONFIG)


def test_masking_the_whole_vocabulary_is_refused():
    everything = tuple(range(100))
    assert refusal(make(stop_token_ids=everything, min_tokens=1)).field == "min_tokens"
    validate(make(stop_token_ids=everything), CONFIG)
    validate(make(stop_token_ids=everything[:3], ignore_eos=True, min_tokens=1), CONFIG)


def test_constraints_that_leave_no_first_token_are_refused():
    validate(make(allowed_token_ids=(5, 6), bad_words=((5,), (6, 6))), CONFIG)
    words = dict(allowed_token_ids=(5, 6), bad_words=((5,), (6,)))
    assert refusal(make(**words)).field == "allowed_token_ids"
    ending = dict(allowed_token_ids=(5, 6), stop_token_ids=(5, 6))
    validate(make(**ending), CONFIG)
    assert refusal(make(**ending, min_tokens=1)).field == "allowed_token_ids"
    assert refusal(make(bad_words=((1,), ()))).field == "bad_words[1]"
    assert refusal(make(logit_bias=((1, 101.0),))).field == "logit_bias[0]"


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("cache_salt", {"tenant": "\ud800"}),
        ("cache_salt", {"tenant": 5}),
        ("deadline_s", {"deadline_s": float("nan")}),
        ("deadline_s", {"deadline_s": "soon"}),
        ("priority", {"priority": 0.5}),
        ("num_emitted", {"num_emitted": -1}),
        ("num_emitted", {"num_emitted": 3}),
    ],
)
def test_a_bad_label_is_refused_by_name(field, arguments):
    assert refusal(Request("key", [1, 2, 3], SamplingParams(), **arguments)).field == field


def test_tokens_already_emitted_leave_something_to_do():
    validate(make([1] * 9, num_emitted=4, max_tokens=5), CONFIG)
    error = refusal(make([1] * 9, num_emitted=5, max_tokens=5))
    assert (error.field, error.message) == (
        "num_emitted",
        "num_emitted must be an integer in [0, 4], got 5",
    )


@given(st.integers(1, 80), st.integers(1, 80), st.sampled_from([CONFIG, SMALL_CACHE]))
def test_a_request_is_taken_exactly_if_it_fits_model_and_cache(length, max_tokens, config):
    request = make([1] * length, max_tokens=max_tokens)
    limit = min(config.max_model_len, config.max_cache_tokens)
    if length + max_tokens <= limit:
        validate(request, config)
        return
    error = refusal(request, config)
    assert isinstance(error, ContextLengthExceeded)
    assert error.field == ("prompt" if length > limit - 1 else "max_tokens")
    assert str(length if error.field == "prompt" else max_tokens) in error.message
    assert str(limit) in error.message


def test_the_bound_that_is_named_is_the_one_that_was_broken():
    assert "max_model_len" in refusal(make([1] * 64)).message
    assert "num_blocks * block_size" in refusal(make([1] * 32), SMALL_CACHE).message
    error = refusal(make([1] * 20, max_tokens=13), SMALL_CACHE)
    assert error.message.endswith("the bound is 12")


def test_what_an_earlier_attempt_emitted_is_not_counted_twice():
    validate(make([1] * 60, num_emitted=10, max_tokens=14), CONFIG)
    assert refusal(make([1] * 60, num_emitted=10, max_tokens=15)).field == "max_tokens"


def test_phases_follow_the_table():
    assert set(ALLOWED_TRANSITIONS) == set(Phase)
    for before in Phase:
        for after in Phase:
            request = make()
            request.phase = before
            if after in ALLOWED_TRANSITIONS[before]:
                request.enter(after)
                assert request.phase is after
            else:
                with pytest.raises(ValueError, match="cannot go from"):
                    request.enter(after)
                assert request.phase is before


def test_every_phase_can_end_and_the_end_is_final():
    assert not ALLOWED_TRANSITIONS[Phase.FINISHED]
    for phase in set(Phase) - {Phase.FINISHED}:
        assert Phase.FINISHED in ALLOWED_TRANSITIONS[phase]


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), max_size=20), st.booleans())
def test_appended_tokens_follow_the_prompt(chunks, read):
    given_ids = np.array([5, 6, 7], np.int64)
    request = make(given_ids, max_tokens=200)
    request.accept(CONFIG.eos_token_ids)
    given_ids[:] = 0
    expected = [5, 6, 7]
    for chunk in chunks:
        request.append(np.array(chunk, np.int32).tobytes())
        expected += chunk
        if read:
            assert request.token_ids.tolist() == expected
        assert request.num_tokens == len(expected)
    assert request.token_ids.tolist() == expected
    assert request.token_ids.dtype == np.int32


def test_eos_is_a_stop_id_unless_ignored():
    request = make(stop_token_ids=(8,))
    request.accept((3, 4))
    assert request.stop_ids == {3, 4, 8}
    request = make(stop_token_ids=(8,), ignore_eos=True)
    request.accept((3, 4))
    assert request.stop_ids == {8}


def test_a_delta_carries_times_and_counts():
    request = make([1] * 9, num_emitted=4, max_tokens=8)
    request.arrival_s, request.first_scheduled_s, request.first_token_s = 10.0, 12.5, 13.0
    delta = request.delta(4, [7], FinishReason.STOP)
    assert (delta.facts.queue_s, delta.facts.prefill_s) == (2.5, 0.5)
    assert (delta.facts.num_prompt_tokens, delta.facts.num_output_tokens) == (5, 5)
    assert delta.finish_reason == "stop"
    request.arrival_s = request.first_token_s = None
    assert (request.delta(4, []).facts.queue_s, request.delta(4, []).facts.prefill_s) == (0.0, 0.0)


def test_a_batch_of_deltas_reads_like_a_list():
    keys = np.empty(3, dtype=object)
    keys[:] = ["a", ("b", 1), "c"]
    whole = make().delta(9, [4], FinishReason.LENGTH)
    tokens = TokenRecord(
        np.array([11, 12, 13]),
        np.array([0, 5, 9], np.int32),
        np.array([7, 8, 3, 4]),
        np.array([0, 1, 3, 4], np.int32),
    )
    batch = DeltaBatch([whole], tokens, keys, np.array([1, 2, 1], np.int32))
    assert (len(batch), len(batch.tokens)) == (4, 3)
    first, *rest = batch
    assert first is whole
    told = [(delta.key, delta.index, delta.token_ids) for delta in rest]
    assert told == [("a", 0, [7]), (("b", 1), 5, [8, 3]), ("c", 9, [4])]
    assert all(type(delta.index) is int for delta in batch)
    fewer = batch.only(np.array([True, False, True]))
    assert list(fewer) == [first, rest[0], rest[2]]
    assert (fewer.sources.tolist(), fewer.tokens.stream_ids.tolist()) == ([1, 1], [11, 13])
    assert list(DeltaBatch([whole])) == [whole]

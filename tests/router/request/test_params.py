"""Bounds of every request field, at the limit and one beyond."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest

from quire.protos.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from quire.protos.sampling_params import SamplingParams
from quire.router.request.params import GenerationDefaults, Limits, check, resolve
from quire.router.types import GenerationRequest
from tests.protos.sampling_bound_cases import (
    ACCEPTED,
    NO_INTEGERS,
    PRIORITIES_ACCEPTED,
    PRIORITIES_REFUSED,
    REFUSED,
    VOCAB_SIZE,
    as_field,
)

MAX_MODEL_LEN, NUM_PROMPT_TOKENS = 128, 28
ROOM = MAX_MODEL_LEN - NUM_PROMPT_TOKENS


def request(**fields):
    fields = {"request_id": "r", "prompt": "hi"} | fields
    if fields.get("messages") is not None and "prompt" in fields and fields["prompt"] == "hi":
        fields["prompt"] = None
    return GenerationRequest(**fields)


def resolved(defaults=None, num_prompt_tokens=NUM_PROMPT_TOKENS, **fields):
    asked = request(**fields)
    check(asked)
    return resolve(
        asked,
        defaults or GenerationDefaults(),
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
    )


# What only the router checks, or accepts.
ACCEPTED_HERE = [
    ("max_tokens", ROOM),
    ("min_tokens", ROOM),
    ("top_k", -1),
    ("bad_words", ("é" * 32,) * 128),
    ("n", 32),
    ("seed", -(2**63)),
    ("stop", ("x",) * 16),
    ("stop", ("é" * 128,)),
    *(("priority", value) for value in PRIORITIES_ACCEPTED),
    ("tenant", "x" * 256),
    ("deadline_s", 0.001),
    ("deadline_s", math.inf),
    ("prompt", (0, VOCAB_SIZE - 1)),
    ("prompt", ""),
    ("add_special_tokens", False),
]
REFUSED_HERE = [
    *(("min_tokens", value) for value in [ROOM + 1, 2**31, 2**63]),
    *(("logit_bias", value) for value in [None, {1: 1}]),
    *(("allowed_token_ids", value) for value in [None, 5, [5]]),
    *(("n", value) for value in [0, -1, 33, None, *NO_INTEGERS]),
    *(("bad_words", value) for value in [("x",) * 129, None, "x", ["x"]]),
    *(("bad_words[0]", value) for value in ["", " ", "é" * 32 + "x", None, 1, "\ud800"]),
    *(("priority", value) for value in PRIORITIES_REFUSED),
    *(("stop", value) for value in [("x",) * 17, None, "x", ["x"]]),
    *(("stop[0]", value) for value in ["", "é" * 128 + "x", None, 1, b"x", "\ud800"]),
    *(("stop_token_ids", value) for value in [None, 5, [5]]),
    *(("tenant", value) for value in ["x" * 257, None, 5, "\ud800"]),
    *(("session", value) for value in ["é" * 129, None, 5]),
    *(("ignore_eos", value) for value in [1, 0, None, "true"]),
    *(("skip_special_tokens", value) for value in [1, None]),
    *(("include_stop_str_in_output", value) for value in [1, None]),
    *(("echo", value) for value in ["no", None]),
    *(("deadline_s", value) for value in [math.nan, "1", True]),
    *(("add_special_tokens", value) for value in [1, "no"]),
    *(("add_generation_prompt", value) for value in [1, True, False]),  # a prompt has no template
    *(("continue_final_message", value) for value in [1, None, True]),
    *(("chat_template_kwargs", value) for value in [{}, {"a": 1}]),
    *(("prompt", value) for value in [(), None, 5, [1], b"x", "\ud800"]),
    *(("prompt[0]", value) for value in [-1, VOCAB_SIZE, 2**31, 2**63, None, *NO_INTEGERS]),
    *(("messages", value) for value in [(), [{"role": "user"}], "hi"]),
]
ALL_REFUSED = [*REFUSED, *REFUSED_HERE]


@pytest.mark.parametrize(("name", "value"), [*ACCEPTED, *ACCEPTED_HERE])
def test_values_at_the_limit_are_accepted(name, value):
    params = resolved(**{name: value})
    assert SamplingParams.from_wire(params.to_wire()) == params


@pytest.mark.parametrize(("name", "value"), ALL_REFUSED)
def test_values_beyond_are_refused_by_field_with_bound_and_value(name, value):
    with pytest.raises(InvalidRequest) as caught:
        resolved(**as_field(name, value))
    assert caught.value.field == name
    message = caught.value.message
    assert name in message and ("got" in message or "not valid Unicode" in message)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, value in ALL_REFUSED if "[0]" not in name]
)
def test_most_of_it_is_refused_before_tokenising(name, value):
    if (name, value) in [("min_tokens", ROOM + 1), ("min_tokens", 2**31), ("min_tokens", 2**63)]:
        check(request(**{name: value}))  # depends on max_tokens
    else:
        with pytest.raises(InvalidRequest):
            check(request(**{name: value}))


@pytest.mark.parametrize("value", [ROOM + 1, 2**31, 2**63])
def test_max_tokens_beyond_the_room_names_all_three_numbers(value):
    with pytest.raises(ContextLengthExceeded) as caught:
        resolved(max_tokens=value)
    assert caught.value.field == "max_tokens"
    for number in (value, ROOM, NUM_PROMPT_TOKENS, MAX_MODEL_LEN):
        assert str(number) in caught.value.message


@pytest.mark.parametrize("num_prompt_tokens", [1, NUM_PROMPT_TOKENS, MAX_MODEL_LEN - 1])
@pytest.mark.parametrize("value", [1, ROOM, ROOM + 1, 32000, 2**63])
def test_max_tokens_fits_to_the_model_where_the_request_says_so(value, num_prompt_tokens):
    found = resolved(max_tokens=value, num_prompt_tokens=num_prompt_tokens, fit_to_model=True)
    assert found.max_tokens == min(value, MAX_MODEL_LEN - num_prompt_tokens)


def test_the_prompt_leaves_room_for_a_token():
    assert resolved(num_prompt_tokens=MAX_MODEL_LEN - 1).max_tokens == 1
    with pytest.raises(ContextLengthExceeded, match="prompt has 128 tokens; at most 127") as caught:
        resolved(num_prompt_tokens=MAX_MODEL_LEN)
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest, match="at least 1 token, got 0"):
        resolved(num_prompt_tokens=0)


def test_a_long_list_of_ids_is_refused_by_its_length_before_its_items_are_read():
    with pytest.raises(ContextLengthExceeded):
        resolved(prompt=("x",) * 1000, num_prompt_tokens=1000)


def test_prompt_or_messages_and_not_both():
    user = ({"role": "user", "content": "hi"},)
    assert resolved(messages=user, prompt=None).max_tokens == ROOM
    with pytest.raises(InvalidRequest, match=r"exactly one.*got both"):
        check(GenerationRequest(request_id="r", prompt="x", messages=user))
    with pytest.raises(InvalidRequest, match=r"exactly one.*got neither"):
        check(GenerationRequest(request_id="r"))


def test_missing_values_come_from_the_defaults():
    assert resolved(seed=1) == SamplingParams(max_tokens=ROOM, seed=1)
    defaults = GenerationDefaults({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, max_tokens=16)
    params = resolved(defaults, seed=1)
    assert params == SamplingParams(16, temperature=0.6, top_p=0.9, top_k=20, seed=1)
    assert resolved(defaults, num_prompt_tokens=MAX_MODEL_LEN - 5).max_tokens == 5
    given = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "max_tokens": 7}
    params = resolved(defaults, **given)
    assert {name: getattr(params, name) for name in given} == given


def test_values_are_brought_to_the_engines_form():
    params = resolved(
        top_k=-1, temperature=1e-6, stop_token_ids=(5, 3, 5), ignore_eos=True, min_tokens=2, seed=-1
    )
    assert (params.top_k, params.temperature, params.stop_token_ids) == (0, 0.0, (5, 3))
    assert (params.ignore_eos, params.min_tokens, params.seed) == (True, 2, 2**64 - 1)
    assert type(resolved(temperature=1).temperature) is float


def test_min_tokens_is_bounded_by_max_tokens():
    assert resolved(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(
        InvalidRequest, match=r"min_tokens must be <= max_tokens, which is 5.*got 6"
    ):
        resolved(min_tokens=6, max_tokens=5)


def test_a_drawn_seed_is_unpredictable_and_can_be_sent_back(monkeypatch):
    seeds = set()
    for _ in range(50):
        random.seed(0)  # no generator of this process decides
        seeds.add(resolved().seed)
    assert len(seeds) == 50
    for seed in seeds:
        assert 0 <= seed < 2**63 and resolved(seed=seed).seed == seed
    asked = []
    monkeypatch.setattr("secrets.randbits", lambda bits: asked.append(bits) or 5)
    assert (resolved().seed, asked) == (5, [63])


@pytest.mark.parametrize("deadline_s", [0, -1.5, -math.inf])
def test_a_deadline_that_has_passed_is_its_own_error(deadline_s):
    with pytest.raises(DeadlineExceeded):
        resolved(deadline_s=deadline_s)


def test_limits_are_the_servers_choice():
    limits = Limits(max_stop_strings=1, max_choices=2)
    check(request(stop=("a",), n=2), limits)
    with pytest.raises(InvalidRequest, match=r"n must be an integer in \[1, 2\], got 3"):
        check(request(n=3), limits)
    with pytest.raises(InvalidRequest, match="stop must have at most 1 strings, got 2"):
        check(request(stop=("a", "b")), limits)


def test_special_tokens_among_the_stop_strings_count_as_stop_token_ids():
    asked = request(stop_token_ids=tuple(range(120)))
    model = dict(num_prompt_tokens=1, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)
    params = resolve(asked, GenerationDefaults(), special_stop_ids=range(112, 128), **model)
    assert params.stop_token_ids == tuple(range(128))
    with pytest.raises(InvalidRequest, match=r"at most 128 ids, special tokens .*, got 129"):
        resolve(asked, GenerationDefaults(), special_stop_ids=range(120, 129), **model)


def test_defaults_come_from_the_checkpoint(tmp_path):
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_k": 50, "top_p": None, "eos_token_id": 2}))
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults(
        {"temperature": 0.6, "top_k": 50}
    )
    numbers = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    path.write_text(json.dumps({**numbers, "repetition_penalty": 1.1, "max_length": 20}))
    assert GenerationDefaults.load(tmp_path) == GenerationDefaults(
        {**numbers, "repetition_penalty": 1.1}
    )
    for name, value in (
        *(("top_p", 1.5), ("temperature", "hot"), ("top_k", 2.5), ("top_k", True)),
        *(("repetition_penalty", 0), ("min_p", [0.1]), ("temperature", float("nan"))),
    ):
        path.write_text(json.dumps({name: value}))
        with pytest.raises(ValueError, match=f"generation_config.json.*{name}.* got|not JSON.*NaN"):
            GenerationDefaults.load(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="expected an object"):
        GenerationDefaults.load(tmp_path)


def test_a_list_of_prompts_has_a_bound_with_all_its_choices():
    check(request(prompt=None, prompts=("hi",) * 256))
    check(request(prompt=None, prompts=("hi", (1, 2)) * 4, n=32))
    for fields, got in (({"n": 1}, 257), ({"n": 2}, 129), ({"n": 32}, 9)):
        with pytest.raises(InvalidRequest, match=f"at most {256 // fields['n']} prompts") as caught:
            check(request(prompt=None, prompts=("hi",) * got, **fields))
        assert caught.value.field == "prompt" and f"got {got}" in caught.value.message
    for fields in ({"prompt": "hi", "prompts": ("hi",)}, {"prompts": ["hi"], "prompt": None}):
        with pytest.raises(InvalidRequest):
            check(request(**fields))


def test_log_probabilities_have_a_bound_with_all_tokens_and_choices():
    bound = 4 << 20
    for fields in ({"n": 8}, {"n": 2, "prompt": None, "prompts": ("hi",) * 4}):
        fields |= {"logprobs": 7}
        check(request(max_tokens=bound // 64, **fields))
        check(request(max_tokens=2**20, fit_to_model=True, **fields))
        with pytest.raises(InvalidRequest, match=f"<= {bound}, got {bound + 64}") as caught:
            check(request(max_tokens=bound // 64 + 1, **fields))
        assert caught.value.field == "logprobs"
    check(request(max_tokens=2**30, n=32))
    # Without max_tokens an answer ends where its log-probabilities become too many.
    asked = request(max_tokens=None, n=32, logprobs=20)
    long = {"num_prompt_tokens": 10, "max_model_len": 1 << 20, "vocab_size": VOCAB_SIZE}
    assert resolve(asked, GenerationDefaults(), **long).max_tokens == bound // (32 * 21)
    without = request(max_tokens=None, n=32)
    assert resolve(without, GenerationDefaults(), **long).max_tokens == (1 << 20) - 10


def test_max_tokens_0_is_for_prompts_that_are_echoed():
    check(request(max_tokens=0, echo=True))
    with pytest.raises(InvalidRequest, match="or 0 together with echo, got 0"):
        check(request(max_tokens=0))
    with pytest.raises(InvalidRequest, match="max_tokens"):
        check(request(max_tokens=False, echo=True))


def test_every_field_of_a_request_is_checked_or_known_to_be_free():
    """A new field must be given a bound, or be added to the free ones here."""
    free = {"request_id", "model", "resume_from"}  # an event id: `resume.check`
    free |= {"prompts", "prediction"}  # tests of their own
    free |= {"adapter"}  # the router's own entry, which the model's name has chosen
    free |= {"trace_headers"}  # tests/router/trace/test_trace_context.py: no value is refused
    free |= {
        "fit_to_model",
        "retain",
        "bill",
    }  # no client's fields: APIs and the keys' door set them
    # tests/router/chat/test_tool_checks.py
    free |= {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"}
    tested = {name.partition("[")[0] for name, _ in ALL_REFUSED}
    assert {field.name for field in dataclasses.fields(GenerationRequest)} == free | tested

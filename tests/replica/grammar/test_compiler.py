"""Grammar states: masks, replay, limits; and their life in an engine."""

from __future__ import annotations

import dataclasses
import json
import queue
import threading

import numpy as np
import pytest
import torch

from quire.protos.errors import EngineError, InvalidRequest, QuireError, UnsupportedField
from quire.protos.sampling_params import Grammar, SamplingParams
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.core.request import Request
from quire.replica.core.sampling_record import records
from quire.replica.core.step_plan import NO_TOKEN, SamplingBatch
from quire.replica.engine import Engine
from quire.replica.grammar.compiler import GrammarCompiler
from quire.replica.sampling.sampler import sample

VOCAB = 1024
EOS = (0, 2)
YES = Grammar("choice", json.dumps(["yes", "yesterday", "no"]), "structured_outputs.choice")


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(CHECKPOINT / "tokenizer.json", VOCAB, EOS)
    yield compiler
    compiler.close()


def compiled(compiler, grammar, emitted_ids):
    """The state after `emitted_ids`, as a request gets it."""
    told: queue.Queue = queue.Queue()
    compiler.submit(grammar, emitted_ids, told.put)
    outcome = told.get(timeout=30)
    if isinstance(outcome, QuireError):
        raise outcome
    return outcome


def allowed(state) -> set[int]:
    packed = state.mask()
    assert packed.shape == (VOCAB // 32,) and packed.dtype == np.int32
    return {i for i in range(VOCAB) if packed[i // 32] >> (i % 32) & 1}


def walk(state, rng) -> list[int]:
    """A random way through the grammar."""
    ids = []
    while True:
        ids.append(int(rng.choice(sorted(allowed(state)))))
        if state.advance(ids[-1]):
            return ids


def test_every_way_through_a_grammar_is_one_of_its_texts(compiler):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    texts = set()
    for seed in range(40):
        ids = walk(compiled(compiler, YES, []), np.random.default_rng(seed))
        texts.add(tokenizer.decode([i for i in ids if i not in EOS]))
    assert texts == {"yes", "yesterday", "no"}


def test_a_replayed_state_is_the_state(compiler):
    schema = Grammar("json_schema", '{"type": "object"}', "f")
    ids = walk(compiled(compiler, schema, []), np.random.default_rng(3))
    state = compiled(compiler, schema, [])
    for n in range(len(ids)):
        assert allowed(compiled(compiler, schema, ids[:n])) == allowed(state)
        state.advance(ids[n])
    with pytest.raises(InvalidRequest, match="already generated do not match"):
        compiled(compiler, schema, [*ids, 500])


def test_the_mask_is_what_the_sampler_allows(compiler):
    states = [compiled(compiler, YES, []), compiled(compiler, YES, [])]
    ids = allowed(states[0])
    for temperature in (0.0, 1.0):
        batch = SamplingBatch(
            token_index=np.arange(400, dtype=np.int32),
            columns=records(400, temperature=temperature, seed=np.arange(400)),
            position=np.ones(400, np.int64),
            grammars=tuple((i, states[i % 2]) for i in range(0, 400, 2)),
        )
        tokens = sample(torch.randn(400, VOCAB), batch).tolist()
        assert set(tokens[::2]) == ids
        assert not set(tokens[1::2]) <= ids


def test_a_failed_matcher_allows_nothing(compiler):
    state = compiled(compiler, YES, [])
    assert not state.advance(500)
    assert state.error and not allowed(state)
    batch = SamplingBatch(
        np.zeros(1, np.int32),
        records(1, temperature=0.0),
        np.zeros(1, np.int64),
        grammars=((0, state),),
    )
    assert sample(torch.zeros(1, VOCAB), batch).tolist() == [NO_TOKEN]


def test_a_checkpoint_without_a_tokenizer_serves_no_grammar(tmp_path):
    with pytest.raises(UnsupportedField, match=r"no tokenizer.json"):
        compiled(GrammarCompiler(tmp_path / "tokenizer.json", VOCAB, EOS), YES, [])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedField, match="cannot be used"):
        compiled(GrammarCompiler(tmp_path / "tokenizer.json", VOCAB, EOS), YES, [])


@pytest.fixture(scope="module")
def engine():
    outputs: queue.Queue = queue.Queue()
    with Engine(
        num_blocks=64,
        max_model_len=512,
        num_threads=1,
        on_output=lambda output: [outputs.put(delta) for delta in output.deltas],
    ) as engine:
        engine.outputs = outputs
        yield engine
        engine.check()


def submit(engine, key, grammar=YES, **params) -> None:
    engine.submit(Request(key, [5, 6, 7], SamplingParams(max_tokens=60, grammar=grammar, **params)))


def last(engine, key):
    while True:
        delta = engine.outputs.get(timeout=20)
        if delta.key == key and delta.finish_reason is not None:
            return delta


def test_a_complete_output_ends_as_a_stop(engine):
    for seed in range(5):
        submit(engine, ("a", seed), seed=seed)
        assert last(engine, ("a", seed)).finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_fork_goes_its_own_way_through_the_grammar(engine, temperature):
    """As many choices of one prompt, and each as if it had been asked for alone."""
    names = [("fork", temperature, choice) for choice in range(4)]
    params = SamplingParams(max_tokens=60, grammar=YES, temperature=temperature, seed=3)

    def ask(choice, key, fork_of=None):
        of_choice = dataclasses.replace(params, choice=choice)
        engine.submit(Request(key, [5, 6, 7], of_choice, fork_of=fork_of))

    alone = []
    for choice in range(4):
        ask(choice, ("alone", choice))
        alone.append(outputs_of(engine, [("alone", choice)])["alone", choice])
    for choice, name in enumerate(names):
        ask(choice, name, names[0] if choice else None)
    together = outputs_of(engine, names)
    assert [together[name] for name in names] == alone
    if temperature:
        assert len(set(map(tuple, alone))) > 1


def outputs_of(engine, keys) -> dict:
    """The token ids of requests, once all of them have ended as they should."""
    tokens = {key: [] for key in keys}
    left = set(keys)
    while left:
        delta = engine.outputs.get(timeout=20)
        if delta.key in tokens:
            tokens[delta.key] += delta.token_ids
            if delta.finish_reason is not None:
                assert delta.finish_reason == "stop", delta
                left.discard(delta.key)
    return tokens


def test_an_abort_while_it_is_compiled_is_the_end(engine, monkeypatch):
    gate = threading.Event()
    checker = engine._grammars._quick.checker
    real = checker.check
    monkeypatch.setattr(checker, "check", lambda *a: gate.wait(10) and real(*a))
    unknown = Grammar("choice", '["an", "abort"]', "f")
    submit(engine, "slow", unknown)
    with pytest.raises(InvalidRequest, match="in use"):
        submit(engine, "slow", unknown)
    engine.abort("slow")
    assert last(engine, "slow").finish_reason == "abort"
    gate.set()
    submit(engine, "slow")
    assert last(engine, "slow").finish_reason == "stop"
    assert engine.load().num_running == engine.load().num_waiting == 0


def test_what_contradicts_a_grammar_is_refused_by_name(engine):
    for params, field in (
        (dict(ignore_eos=True), "ignore_eos"),
        (dict(min_tokens=1), "min_tokens"),
        (dict(grammar=Grammar("odd", "", "f")), "f"),
        (dict(grammar=Grammar("regex", "a" * 65537, "f")), "f"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            submit(engine, "x", **params)
        assert caught.value.field == field


def test_constraints_that_exclude_each_other_end_the_request_alone(engine):
    submit(engine, "corner", allowed_token_ids=(900,))
    error = last(engine, "corner").facts.error
    assert error.code == "invalid_request" and YES.field in error.message


def test_a_grammar_that_exceeds_its_limits_while_it_is_served_ends_its_own_request_by_name(engine):
    """Too many ways to read what follows 200 letters: more than the check's walks see."""
    rules = [f'd{i}: d{i + 1} | "[" d{i + 1} "]"' for i in range(1100)]
    late = "\n".join(["start: /[ab]{200}/ d0", *rules, 'd1100: "c"'])
    neighbour = Grammar("regex", "[a-z]{400,}", "f")
    engine.submit(
        Request(
            "late", [5], SamplingParams(max_tokens=400, grammar=Grammar("lark", late, "f.late"))
        )
    )
    engine.submit(Request("neighbour", [5], SamplingParams(max_tokens=400, grammar=neighbour)))
    ends = {}
    while len(ends) < 2:
        delta = engine.outputs.get(timeout=20)
        if delta.finish_reason is not None:
            ends[delta.key] = delta
    assert ends["neighbour"].finish_reason in ("stop", "length")
    assert ends["late"].facts.num_output_tokens > 20
    error = ends["late"].facts.error
    assert error.code == "invalid_request" and error.field == "f.late"
    assert "failed at output index" in error.message


def test_a_mask_that_takes_too_much_is_given_up(compiler):
    """The third mask after 200 letters would build 30,000 states and take 0.1 s, more with each token."""
    from tokenizers import Tokenizer

    letters = [chr(97 + i) for i in range(26)]
    words = (f"[{letters[i % 26]}{letters[i // 26]}].{{{60 + i}}}x{i}" for i in range(300))
    grammar = Grammar("regex", f"[ab]{{200}}.*({'|'.join(words)}).*", "f")
    a = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).token_to_id("a")
    state = compiled(compiler, grammar, [a] * 200)
    for _ in range(4):
        if not allowed(state):
            break
        assert not state.advance(a + 1)
    assert "too many expressions" in state.error


def test_the_lexer_states_of_a_long_output_do_not_end_it(compiler):
    """About 250 new states a token: 30,000 are used up after 120 tokens."""
    state = compiled(compiler, Grammar("regex", ".*(a.{30}b|b.{40}c|c.{50}d|e.{35}f).*", "f"), [])
    rng = np.random.default_rng(0)
    lexers = set()
    for _ in range(300):
        ids = sorted(allowed(state) - set(EOS))
        assert ids, state.error
        lexers.add(state._lexer_number)
        state.advance(int(rng.choice(ids)))
    assert len(lexers) > 1, "the limit was never reached"


@pytest.mark.parametrize(
    ("white_space", "texts"),
    [
        ("none", ['{"a":[1,2]}']),
        ("one_space", ['{"a":[1,2]}', '{"a": [1, 2]}']),
        ("any", ['{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a":\n\n  [ 1,  2 ]\n}']),
    ],
)
def test_json_has_as_much_white_space_as_is_configured(white_space, texts):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    compiler = GrammarCompiler(CHECKPOINT / "tokenizer.json", VOCAB, EOS, white_space)
    array = {"type": "array", "items": {"type": "integer"}}
    schema = json.dumps({"type": "object", "properties": {"a": array}, "required": ["a"]})
    taken = []
    for text in ['{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a":\n\n  [ 1,  2 ]\n}']:
        try:
            compiled(compiler, Grammar("json_schema", schema, "f"), tokenizer.encode(text).ids)
        except InvalidRequest:
            continue
        taken.append(text)
    compiler.close()
    assert taken == texts


def test_a_small_model_writes_json_and_not_white_space(engine):
    """24 of 24 answers were cut off in white space."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}}
    grammar = Grammar("json_schema", json.dumps(schema | {"additionalProperties": False}), "f")
    for seed in range(6):
        submit(engine, ("json", seed), grammar, seed=seed)
        assert last(engine, ("json", seed)).finish_reason == "stop"


def test_a_scheduler_takes_no_grammar_that_is_not_compiled(engine):
    request = Request("raw", [5], SamplingParams(grammar=YES))
    delta = engine.call(lambda scheduler: scheduler.add(request)).result()
    assert isinstance(delta.facts.error, EngineError)


def test_params_cross_the_wire():
    params = SamplingParams(grammar=YES, logit_bias=((1, 2.0),), bad_words=((1, 2),))
    import msgpack

    values = msgpack.unpackb(msgpack.packb(params.to_wire()))
    assert SamplingParams.from_wire(values) == params
    assert dataclasses.replace(params, grammar=None) != params

"""Grammar states: masks, replay, limits; and their life in an engine."""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
import time

import numpy as np
import pytest
import torch

from quire.protos.errors import EngineError, InvalidRequest, Overloaded, UnsupportedField
from quire.protos.wire import Grammar, SamplingParams
from quire.replica import grammar as module
from quire.replica.embedded import CHECKPOINT
from quire.replica.engine import Engine
from quire.replica.grammar import GrammarCompiler
from quire.replica.plan import NO_TOKEN, SamplingBatch
from quire.replica.request import Request
from quire.replica.sampler import sample

VOCAB = 1024
EOS = (0, 2)
YES = Grammar("choice", json.dumps(["yes", "yesterday", "no"]), "structured_outputs.choice")


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(CHECKPOINT / "tokenizer.json", VOCAB, EOS)
    yield compiler
    compiler.close()


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
        ids = walk(compiler.compile(YES, []), np.random.default_rng(seed))
        texts.add(tokenizer.decode([i for i in ids if i not in EOS]))
    assert texts == {"yes", "yesterday", "no"}


def test_a_replayed_state_is_the_state(compiler):
    schema = Grammar("json_schema", '{"type": "object"}', "f")
    ids = walk(compiler.compile(schema, []), np.random.default_rng(3))
    state = compiler.compile(schema, [])
    for n in range(len(ids)):
        assert allowed(compiler.compile(schema, ids[:n])) == allowed(state)
        state.advance(ids[n])
    with pytest.raises(InvalidRequest, match="already generated do not match"):
        compiler.compile(schema, [*ids, 500])


def test_the_mask_is_what_the_sampler_allows(compiler):
    states = [compiler.compile(YES, []), compiler.compile(YES, [])]
    ids = allowed(states[0])
    for temperature in (0.0, 1.0):
        column = np.full(400, temperature, np.float32)
        batch = SamplingBatch(
            token_index=np.arange(400, dtype=np.int32),
            temperature=column,
            top_k=np.zeros(400, np.int32),
            top_p=np.ones(400, np.float32),
            seed=np.arange(400, dtype=np.uint64),
            choice=np.zeros(400, np.int32),
            position=np.ones(400, np.int64),
            grammars=tuple((i, states[i % 2]) for i in range(0, 400, 2)),
        )
        tokens = sample(torch.randn(400, VOCAB), batch).tolist()
        assert set(tokens[::2]) == ids
        assert not set(tokens[1::2]) <= ids


def test_a_failed_matcher_allows_nothing(compiler):
    state = compiler.compile(YES, [])
    assert not state.advance(500)
    assert state.error and not allowed(state)
    batch = SamplingBatch(
        *(np.zeros(1, t) for t in (np.int32, np.float32, np.int32)),
        np.ones(1, np.float32),
        *(np.zeros(1, t) for t in (np.uint64, np.int32, np.int64)),
        grammars=((0, state),),
    )
    assert sample(torch.zeros(1, VOCAB), batch).tolist() == [NO_TOKEN]


def test_a_checkpoint_without_a_tokenizer_serves_no_grammar(tmp_path):
    with pytest.raises(UnsupportedField, match=r"no tokenizer.json"):
        GrammarCompiler(tmp_path / "tokenizer.json", VOCAB, EOS).compile(YES, [])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedField, match="cannot be used"):
        GrammarCompiler(tmp_path / "tokenizer.json", VOCAB, EOS).compile(YES, [])


def test_a_slow_grammar_is_given_up_and_many_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_COMPILE_S", 0.05)
    compiler = GrammarCompiler(CHECKPOINT / "tokenizer.json", VOCAB, EOS)
    gate = threading.Event()
    real = compiler.compile

    def compute(*args):
        while not gate.is_set():
            sum(range(10_000))
        return real(*args)

    monkeypatch.setattr(compiler, "compile", compute)
    told: queue.Queue = queue.Queue()
    for _ in range(module.MAX_PENDING):
        compiler.submit(YES, [], told.put)
    with pytest.raises(Overloaded, match=str(module.MAX_PENDING)):
        compiler.submit(YES, [], told.put)
    outcome = told.get(timeout=60)
    assert "longer than 0.05 s" in outcome.message and outcome.field == YES.field
    gate.set()
    compiler._pool.shutdown(wait=True)
    others = [told.get_nowait() for _ in range(module.MAX_PENDING - 1)]
    assert all(allowed(state) for state in others), "they had only waited"
    assert told.empty(), "told once"


@pytest.mark.parametrize("emitted", [0, 2], ids=["fresh", "moved"])
def test_waiting_is_not_compiling_and_what_has_begun_has_no_bound(monkeypatch, emitted):
    """On a busy machine the thread does not run; elsewhere the same grammar was compiled in time."""
    monkeypatch.setattr(module, "MAX_COMPILE_S", 0.05)
    compiler = GrammarCompiler(CHECKPOINT / "tokenizer.json", VOCAB, EOS)
    ids = walk(compiler.compile(YES, []), np.random.default_rng(1))[:emitted]
    real = compiler.compile

    def compile_slowly(*args):
        if emitted:
            end_s = time.thread_time() + 0.2
            while time.thread_time() < end_s:
                pass
        else:
            time.sleep(0.3)
        return real(*args)

    monkeypatch.setattr(compiler, "compile", compile_slowly)
    told: queue.Queue = queue.Queue()
    compiler.submit(YES, ids, told.put)
    assert allowed(told.get(timeout=60)) == allowed(real(YES, ids))
    compiler.close()


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
    real = engine._grammars.compile
    monkeypatch.setattr(engine._grammars, "compile", lambda *a: gate.wait(10) and real(*a))
    submit(engine, "slow")
    with pytest.raises(InvalidRequest, match="in use"):
        submit(engine, "slow")
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
    error = last(engine, "corner").error
    assert error.code == "invalid_request" and YES.field in error.message


def test_a_scheduler_takes_no_grammar_that_is_not_compiled(engine):
    request = Request("raw", [5], SamplingParams(grammar=YES))
    delta = engine.call(lambda scheduler: scheduler.add(request)).result()
    assert isinstance(delta.error, EngineError)


def test_params_cross_the_wire():
    params = SamplingParams(grammar=YES, logit_bias=((1, 2.0),), bad_words=((1, 2),))
    import msgpack

    values = msgpack.unpackb(msgpack.packb(params.to_wire()))
    assert SamplingParams.from_wire(values) == params
    assert dataclasses.replace(params, grammar=None) != params

"""What the sources draft for real requests, and what they forget."""

from __future__ import annotations

import numpy as np
import pytest

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.speculation.draft_sources import AutoSource, LookupSource
from quire.replica.speculation_options import SpeculationOptions

CODE = list(range(1000, 1040))


def decoding(key, prompt, output, *, tenant: str = "", max_tokens: int = 100) -> Request:
    request = Request(key, prompt, SamplingParams(max_tokens=max_tokens), tenant=tenant)
    request.accept(())
    request.append(np.array(output, np.int32).tobytes())
    return request


def drafts(source: LookupSource, *requests: Request) -> list[list[int]]:
    return [draft.tolist() for draft in source.propose(requests, 1000)]


def test_ngram_drafts_what_followed_in_the_same_request():
    source = LookupSource(SpeculationOptions(method="ngram", max_draft_tokens=4))
    copying = decoding(0, CODE, CODE[:5])
    other = decoding(1, CODE, [7])
    assert drafts(source, copying, other) == [CODE[5:9], []]
    copying.append(np.array(CODE[5:9], np.int32).tobytes())
    assert drafts(source, other, copying) == [[], CODE[9:13]]


@pytest.mark.parametrize(("max_tokens", "length"), [(6, 0), (7, 1), (8, 2), (100, 4)])
def test_no_draft_goes_beyond_the_last_token(max_tokens: int, length: int):
    """The step gives one token more than it drafts."""
    source = LookupSource(SpeculationOptions(method="ngram", max_draft_tokens=4))
    assert drafts(source, decoding(0, CODE, CODE[:5], max_tokens=max_tokens)) == [
        CODE[5 : 5 + length]
    ]


def test_a_request_without_credit_gets_no_draft_beyond_it():
    source = LookupSource(SpeculationOptions(method="ngram"))
    request = decoding(0, CODE, CODE[:5])
    request.credit_end = 7
    assert drafts(source, request) == [CODE[5:6]]


def test_suffix_drafts_from_answers_to_the_same_tenant():
    source = LookupSource(SpeculationOptions(method="suffix", max_draft_tokens=3))
    source.end(decoding(0, [1, 2, 3], CODE, tenant="a"))
    same, other = (decoding(i, [9], CODE[:10], tenant=t) for i, t in ((1, "a"), (2, "b")))
    assert drafts(source, same, other) == [CODE[10:13], []]


def test_the_same_prompt_finds_the_beginning_of_its_last_answer():
    source = LookupSource(SpeculationOptions(method="suffix", max_draft_tokens=3))
    prompt = list(range(30))
    source.end(decoding(0, prompt, CODE))
    assert drafts(source, decoding(1, prompt, CODE[:1])) == [CODE[1:4]]


def test_a_preempted_request_is_remembered_once():
    source = LookupSource(SpeculationOptions(method="suffix"))
    request = decoding(0, [1], CODE[:20])
    source.end(request)
    source.end(request)
    request.append(np.array(CODE[20:], np.int32).tobytes())
    source.end(request)
    tokens = source._answers.of("").newest().tolist()
    assert tokens == [1, *CODE[:20], *CODE[12:]]


def test_a_prompt_alone_is_no_answer():
    source = LookupSource(SpeculationOptions(method="suffix"))
    source.end(decoding(0, CODE, []))
    assert drafts(source, decoding(1, [9], CODE[:10])) == [[]]


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto"])
def test_a_prediction_is_drafted_by_every_method(method):
    options = SpeculationOptions(method=method, max_draft_tokens=4)
    source = AutoSource(options) if method == "auto" else LookupSource(options)
    for _ in range(3):
        source.observe_step(1, 0, 0.05)
    request = decoding(0, [1, 2, 3], CODE[:1])
    request.prediction_ids = np.array(CODE, np.int32)
    drafted = []
    for end in range(1, 20):
        (draft,) = drafts(source, request)
        assert draft == CODE[end : end + len(draft)]
        drafted.append(len(draft))
        source.observe_step(1, len(draft), 0.05)
        request.append(np.array(CODE[end : end + 1], np.int32).tobytes())
    assert drafted[-1] == 4


def test_auto_drafts_nothing_before_it_has_measured_a_plain_step():
    source = AutoSource(SpeculationOptions(method="auto"))
    assert drafts(source, decoding(0, CODE, CODE[:9])) == [[]]


@pytest.mark.parametrize("method", ["suffix", "auto"])
def test_an_ended_request_is_forgotten(method):
    options = SpeculationOptions(method=method)
    source = AutoSource(options) if method == "auto" else LookupSource(options)
    for _ in range(3):
        source.observe_step(4, 0, 0.05)
    requests = [decoding(i, CODE, CODE[:5]) for i in range(4)]
    source.propose(requests, 1000)
    for request in requests:
        source.end(request)
    held = [value for value in vars(source).values() if isinstance(value, dict)]
    assert held
    assert not any(held)

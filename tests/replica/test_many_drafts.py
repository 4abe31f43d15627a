"""Drafts change no token and no bit of a log-probability of thousands of requests: `make drafts`.

Hypothesis draws the requests from the whole parameter space, in batches that a tight cache cannot hold: they are
prefilled in chunks, preempted, offloaded and restored, share prefixes, and fork.
"""

from __future__ import annotations

import math
import os

import pytest
from device_harness import prompt, tight
from fake_device import FakeDevice
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle_drafts import OracleDrafts
from test_awaited_tokens import Stairs

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.device.cpu_device import CpuDevice
from quire.replica.request_table.drafting import Drafting

NUM_REQUESTS = int(os.environ.get("QUIRE_NUM_DRAFTED_REQUESTS", "10000"))
BATCH = 12
IDS = st.integers(3, 170)
FIELDS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 30), "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.3])},
    optional={
        "top_k": st.integers(1, 20),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.sampled_from([0.02, 0.2]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.3, 1.5]),
        "logit_bias": st.just(((5, 3.0), (9, -4.0))),
        "allowed_token_ids": st.just(tuple(range(3, 43))),
        "bad_words": st.just(tuple((a, b) for a in range(3, 15) for b in range(3, 43, 2))),
        "min_tokens": st.integers(0, 5),
        "stop_token_ids": st.lists(IDS, min_size=1, max_size=40, unique=True).map(tuple),
        "logprobs": st.integers(0, 3),
    },
)
REQUEST = st.fixed_dictionaries(
    {
        "fields": FIELDS,
        "trunk": st.booleans(),
        "length": st.integers(1, 40),
        "prompt_seed": st.integers(0, 9),
        "grammar": st.sampled_from([0, 0, 0, 0, 4, 9]),
        "fork": st.sampled_from([False, False, False, True]),
    }
)
TRUNK = prompt(18, 99)


def requests_of(drawn: list[dict]) -> list[Request]:
    made: list[Request] = []
    for i, own in enumerate(drawn):
        ids = (TRUNK if own["trunk"] else []) + prompt(own["length"], own["prompt_seed"])
        parent = None
        if own["fork"] and made:
            parent = made[-1]
            ids = parent.token_ids[: parent.num_prompt_tokens].tolist()
        fields = dict(own["fields"])
        fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
        if own["grammar"]:
            # With other limits it could allow nothing.
            kept = ("max_tokens", "temperature", "logprobs", "presence_penalty")
            fields = {name: fields[name] for name in kept if name in fields}
        params = SamplingParams(**fields, seed=i, ignore_eos=True)
        fork_of = None if parent is None else parent.key
        made.append(Request(i, ids, params, fork_of=fork_of))
        if own["grammar"]:
            made[-1].grammar = Stairs(own["grammar"])
    return made


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_drafts_change_nothing_of_many_requests(harness, monkeypatch):
    model, total = harness("llama"), {"requests": 0, "drafted": 0, "accepted": 0, "preempted": 0}

    @settings(
        max_examples=math.ceil(NUM_REQUESTS / BATCH),
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(
        drawn=st.lists(REQUEST, min_size=BATCH, max_size=BATCH),
        seed=st.integers(0, 999),
        wrong=st.sampled_from([0.0, 0.1, 0.4]),
        silent=st.sampled_from([0.0, 0.3]),
        plans_ahead=st.booleans(),
        is_fake=st.booleans(),
        share=st.sampled_from([0.1, 2.0]),
    )
    def check(drawn, seed, wrong, silent, plans_ahead, is_fake, share):
        monkeypatch.setattr(Drafting, "LOCKSTEP_SHARE", share)
        config = tight(model.spec)
        expected = model.serve(config, CpuDevice(), requests_of(drawn), plans_ahead=False)
        outputs = {key: own[0] for key, own in expected.items()}
        source = OracleDrafts(outputs, model.spec.vocab_size, seed=seed, wrong=wrong, silent=silent)
        device = FakeDevice(seed) if is_fake else CpuDevice()
        requests = requests_of(drawn)
        counts: list[int] = []

        def note(loop, delta) -> None:
            counts.append(loop._scheduler.book.counters.num_preemptions)

        told = model.serve(
            config, device, requests, plans_ahead=plans_ahead, draft_source=source, on_delta=note
        )
        assert told == expected
        total["requests"] += len(requests)
        total["drafted"] += source.num_drafted
        total["accepted"] += source.num_accepted
        total["preempted"] += max(counts)

    check()
    print(total)
    assert total["requests"] >= min(NUM_REQUESTS, 10 * BATCH) / 2
    assert 0 < total["accepted"] < total["drafted"]

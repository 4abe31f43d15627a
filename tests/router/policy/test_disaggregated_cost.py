"""Policy `disaggregated`: which requests go to a prefill replica."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from routing_fleets import fleet_of, idle

from quire.router.policy.by_name import make_policy
from quire.router.policy.cost_terms import HANDOVER_S
from quire.router.policy.fleet_view import Demand, PrefillRows
from quire.router.policy.policy import RouteRequest

PREFILL, FIRST, SECOND = range(3)


def fleet(num_tokens=10_000, *, s_per_token=0.0, prefill=None, busy=8, **decode):
    """A prefill replica, and two with some streams each; 0.1 ms for a token."""
    both = idle(num_requests=busy, **decode)
    view = fleet_of([prefill or idle(), both, both], num_tokens)
    return replace(view, prefill=PrefillRows(np.arange(3) == PREFILL, np.full(3, s_per_token)))


def ranked(view, num_tokens=10_000, **facts):
    request = RouteRequest(num_tokens, **facts)
    return make_policy("disaggregated").choose(request, view, 0.0, random.Random(0))


def test_a_long_prompt_that_would_delay_streams_goes_to_a_prefill_replica():
    best, *others = ranked(fleet())
    assert best.replica == str(PREFILL)
    copy_s = 10_000 * fleet().columns.host_copy_s_per_token[PREFILL]
    assert best.terms["handover_s"] == pytest.approx(HANDOVER_S + copy_s)
    assert [score.terms["handover_s"] for score in others] == [0.0, 0.0]
    # It need not decode there, so it counts as where it will.
    demand = Demand(1.0, 0.1, 0.1, 0.01, 200.0, 1e-7)
    terms = [score.terms["decode_s"] for score in ranked(replace(fleet(), demand=demand))]
    assert len(set(terms)) == 1 and terms[0] > 0


@pytest.mark.parametrize(
    ("num_tokens", "view"),
    [
        (100, fleet(100)),
        (10_000, fleet(gpu_tokens=9_900)),
        (10_000, fleet(busy=0)),
        (10_000, fleet(s_per_token=1e-3)),
        (10_000, fleet(prefill=idle(reported_work=100_000))),
    ],
    ids=["short", "hit", "no streams", "slow copy", "long queue"],
)
def test_other_prompts_stay_with_the_replicas_that_decode(num_tokens, view):
    assert ranked(view, num_tokens)[0].replica in (str(FIRST), str(SECOND))


def test_a_request_that_goes_on_avoids_prefill_replicas_unless_there_is_no_other():
    ranking = ranked(fleet(busy=1000), is_continued=True)
    assert ranking[0].replica != str(PREFILL) and ranking.names()[-1] == str(PREFILL)
    for continued in (False, True):
        alone = ranked(fleet().only(PREFILL), is_continued=continued)
        assert alone.names() == [str(PREFILL)]
        decode = ranked(fleet().only(FIRST), is_continued=continued)
        assert decode.names() == [str(FIRST)] and decode[0].terms["handover_s"] == 0

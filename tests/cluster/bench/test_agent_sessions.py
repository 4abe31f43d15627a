"""Sessions of agents have the shape that traces of coding agents show, at every scale."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics

import pytest

from quire.cluster.bench.load.agent_sessions import AgentShape, agents
from quire.cluster.bench.load.workloads import FIRST_TOKEN_ID, TimedRequest

SMALL = AgentShape(token_scale=1 / 32, time_scale=1 / 4)


@functools.cache
def agents_turns() -> list[list[TimedRequest]]:
    """Long enough for several sessions of each agent."""
    return agents(40, 1000.0, SMALL, 1000)


def sessions_of(turns: list[TimedRequest]) -> list[list[TimedRequest]]:
    return [list(group) for _, group in itertools.groupby(turns, key=lambda turn: turn.session)]


def whole_sessions() -> list[list[TimedRequest]]:
    """The sessions that begin and end within the run."""
    return [session for turns in agents_turns() for session in sessions_of(turns)[1:-1]]


def contexts(session: list[TimedRequest]) -> list[int]:
    """The prompt lengths of a session's turns."""
    before = [0, *itertools.accumulate(turn.output_tokens for turn in session[:-1])]
    new = itertools.accumulate(len(turn.prompt_ids) for turn in session)
    return [answered + tokens for answered, tokens in zip(before, new, strict=True)]


def test_turns_contexts_and_their_growth_are_those_of_the_shape():
    found = whole_sessions()
    assert len(found) > 80
    assert all([turn.turn for turn in session] == list(range(len(session))) for session in found)
    retained = [[turn.retain for turn in session] for session in found]
    assert all(all(each[:-1]) and not each[-1] for each in retained)
    assert statistics.fmean(map(len, found)) == pytest.approx(33, rel=0.06)
    assert {len(session) for session in found} <= set(range(25, 42))
    lengths = [contexts(session) for session in found]
    assert {each[0] for each in lengths} == {round(10_000 / 32) + round(2_000 / 32)}
    last = [each[-1] for each in lengths]
    assert statistics.fmean(last) == pytest.approx(80_000 / 32, rel=0.01)
    assert min(last) > 0.75 * max(last)


def test_a_turn_reads_131_tokens_for_each_that_it_writes():
    turns = [turn for session in whole_sessions() for turn in session]
    read = sum(sum(contexts(session)) for session in whole_sessions())
    assert read / sum(turn.output_tokens for turn in turns) == pytest.approx(131, rel=0.04)


def test_pauses_are_log_normal_and_scaled():
    pauses = sorted(turn.at_s for turns in agents_turns() for turn in turns[1:])
    assert len(pauses) > 10_000
    assert pauses[len(pauses) // 2] == pytest.approx(5 / 4, rel=0.05)
    assert pauses[int(0.99 * len(pauses))] == pytest.approx(81 / 4, rel=0.15)
    assert statistics.fmean(pauses) == pytest.approx(SMALL.pause_mean_s, rel=0.05)


def test_agents_share_a_few_prompts_and_nothing_else():
    firsts = [session[0].prompt_ids for session in whole_sessions()]
    num_shared = round(10_000 / 32)
    assert len({prompt[:num_shared] for prompt in firsts}) == 4
    assert len({prompt[num_shared:] for prompt in firsts}) == len(firsts)
    assert all(min(prompt) >= FIRST_TOKEN_ID and max(prompt) < 1000 for prompt in firsts)


def test_all_lengths_of_context_are_there_from_the_start():
    """The first session of an agent has begun at any turn; its first prompt has what came before."""
    firsts = [len(turns[0].prompt_ids) for turns in agents_turns()]
    assert min(firsts) < 800 and max(firsts) > 2000
    assert statistics.fmean(firsts) == pytest.approx(SMALL.mean_context / 32, rel=0.15)
    starts = [turns[0].at_s for turns in agents_turns()]
    assert max(starts) < SMALL.pause_mean_s and len(set(starts)) == len(starts)


def test_the_same_seed_gives_the_same_agents_at_every_scale_of_time():
    again = agents(40, 1000.0, SMALL, 1000)
    assert again == agents_turns()
    assert agents(40, 1000.0, SMALL, 1000, seed=1) != agents_turns()
    slow = agents(2, 4.0, AgentShape(token_scale=1 / 32), 1000)
    fast = agents(2, 1.0, SMALL, 1000)
    assert [t.prompt_ids for t in slow[0]] == [t.prompt_ids for t in fast[0]]
    assert [t.at_s for t in slow[0]] == pytest.approx([4 * t.at_s for t in fast[0]])


def test_a_share_of_the_sessions_forks_and_is_the_same_otherwise():
    forking = agents(40, 1000.0, dataclasses.replace(SMALL, fork_share=0.4), 1000)
    main = [[dataclasses.replace(turn, branch=()) for turn in turns] for turns in forking]
    assert main == agents_turns()
    found = [session for turns in forking for session in sessions_of(turns)[1:-1]]
    forked = [session for session in found if any(turn.branch for turn in session)]
    assert len(forked) / len(found) == pytest.approx(0.4, abs=0.1)
    places = []
    for session in forked:
        (at,) = (turn for turn in session if turn.branch)
        places.append(at.turn / (len(session) - 1))
        assert 1 <= len(at.branch) <= len(session) - 1 - at.turn
        assert [turn.turn for turn in at.branch] == [at.turn + 1 + i for i in range(len(at.branch))]
        assert {turn.session for turn in at.branch} == {f"{at.session}-branch"}
        assert [turn.retain for turn in at.branch] == [True] * (len(at.branch) - 1) + [False]
        branched = contexts([*session[: at.turn + 1], *at.branch])
        assert max(branched) < 1.35 * contexts(session)[-1]
    assert min(places) < 0.2 and max(places) > 0.8
    pauses = [turn.at_s for turns in forking for at in turns for turn in at.branch]
    assert statistics.median(pauses) == pytest.approx(5 / 4, rel=0.15)


def test_branches_have_begun_before_the_first_turn():
    forking = agents(200, 1.0, dataclasses.replace(SMALL, fork_share=1.0), 1000)
    begun = [turns for turns in forking if turns[0].branch and turns[0].branch[0].turn == 0]
    assert 40 < len(begun) < 140
    for main, *_ in begun:
        first = main.branch[0].prompt_ids
        shared = next(
            (i for i, (a, b) in enumerate(zip(first, main.prompt_ids, strict=False)) if a != b),
            len(first),
        )
        assert len(first) == len(main.prompt_ids) and round(12_000 / 32) <= shared < len(first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_turns": 1}, "num_turns: must be >= 2, got 1"),
        ({"shared_tokens": 12_000}, "must be >= 0 and ascending, got 12000, 12000, 80000"),
        ({"num_shared_prompts": 0}, "num_shared_prompts: must be >= 1, got 0"),
        ({"pause_median_s": 90.0}, "pause_median_s, pause_p99_s: must be > 0 and ascending"),
        ({"fork_share": 1.5}, "fork_share: must be from 0 to 1, got 1.5"),
        ({"token_scale": 0.0}, "token_scale: must be above 0 and at most 1, got 0"),
        ({"time_scale": 2.0}, "time_scale: must be above 0 and at most 1, got 2"),
        ({"input_per_output": 20.0}, "input_per_output: answers must be shorter"),
    ],
)
def test_a_shape_out_of_its_bounds_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        AgentShape(**change)


def test_agents_out_of_their_bounds_are_named():
    for arguments, message in (
        ((0, 1.0, SMALL, 1000), "num_agents: must be >= 1, got 0"),
        ((1, 0.0, SMALL, 1000), "duration_s: must be > 0, got 0"),
        ((1, 1.0, SMALL, 300), "vocab_size: must be > 300, got 300"),
    ):
        with pytest.raises(ValueError, match=message):
            agents(*arguments)

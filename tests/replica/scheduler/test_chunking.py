"""How much prefill a step holds: bounds in tokens and in time, progress, and what decoding rows are promised."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_config import small_config

from quire.protos.sampling_params import SamplingParams
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepResult
from quire.replica.scheduler.chunking import MIN_CHUNK_TOKENS, StepBudget
from quire.replica.scheduler.scheduler import Scheduler
from quire.replica.scheduler.speed import StepSpeed

CONFIG = dict(
    max_model_len=8192,
    block_size=32,
    num_blocks=2048,
    max_batch_tokens=512,
    max_running_requests=32,
    max_waiting_requests=256,
    prefix_caching=False,
    max_prefill_ms=50.0,
)


class Machine:
    """A scheduler on a device whose steps take a time that is known."""

    def __init__(self, step_s=0.010, row_s=0.0002, token_s=0.0002, key_s=1e-7, noise=0.0, **config):
        self.scheduler = Scheduler(small_config(**{**CONFIG, **config}))
        self.costs = [step_s, row_s, token_s, key_s]
        self.noise, self.rng = noise, np.random.default_rng(0)
        self.now_s = 0.0
        self.steps = []  # (decoding rows, prefill tokens, seconds)
        self.told_s = {}  # when each row got its last token
        self.gaps_s = []

    def submit(self, key, num_tokens, max_tokens=1, **options):
        prompt = np.random.default_rng(hash(key) % 2**32).integers(3, 1000, num_tokens)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        assert self.scheduler.add(Request(key, prompt, params, **options)) is None

    def step(self):
        plan = self.scheduler.plan(self.now_s)
        if plan is None:
            return None
        counts = np.diff(plan.cu_q)[plan.num_decode_rows :]
        ends = plan.kv_len[plan.num_decode_rows :]
        keys = float((counts * (ends - counts) + counts * (counts + 1) / 2).sum())
        amounts = [1, plan.num_decode_rows, int(counts.sum()), keys]
        duration_s = float(np.dot(self.costs, amounts))
        duration_s *= 1 + self.noise * self.rng.random()
        self.now_s += duration_s
        self.steps.append((plan.num_decode_rows, int(counts.sum()), duration_s))
        result = StepResult(np.full(len(plan.sampling.token_index), 7), duration_s)
        for delta in self.scheduler.commit(plan, result, self.now_s):
            if delta.key in self.told_s:
                self.gaps_s.append(self.now_s - self.told_s[delta.key])
            self.told_s[delta.key] = self.now_s
        return plan

    def decode(self, rows, max_tokens=2000):
        """Requests that decode, and a decode step that has been measured."""
        for i in range(rows):
            self.submit(("decodes", i), 8, max_tokens)
        for _ in range(3):
            self.step()
        self.gaps_s.clear()


def known_speed(token_s, key_s):
    speed = StepSpeed()
    for start in (0, 1000, 0, 3000, 500, 0, 2000):
        for tokens in (64, 200):
            keys = tokens * start + tokens * (tokens + 1) // 2
            speed.observe(tokens, 0, token_s * tokens + key_s * keys, keys)
    return speed


SPEEDS = st.tuples(st.floats(1e-6, 1e-2), st.floats(0, 1e-3)).map(
    lambda pair: (pair[0], pair[0] * pair[1])
)


@settings(max_examples=200, deadline=None)
@given(
    speed=SPEEDS,
    tokens=st.integers(1, 600),
    seconds=st.one_of(st.just(math.inf), st.floats(-0.1, 2.0)),
    block_size=st.sampled_from([8, 32, 64]),
    prefills=st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 900)), min_size=1, max_size=6),
)
def test_a_budget_is_kept_and_never_stops_everybody(speed, tokens, seconds, block_size, prefills):
    token_s, key_s = speed
    budget = StepBudget(known_speed(token_s, key_s), tokens, seconds, block_size)
    took_s, granted = 0.0, []
    for start, missing in prefills:
        count = budget.grant(start, missing)
        assert 0 <= count <= missing
        if 0 < count < min(missing, budget.tokens) and count > MIN_CHUNK_TOKENS:
            assert (start + count) % block_size == 0 or count < block_size
        if count:
            budget.spend(start, count)
        took_s += token_s * count + key_s * (count * start + count * (count + 1) / 2)
        granted.append(count)
    assert sum(granted) == budget.num_tokens <= tokens
    assert granted[0] > 0, "progress"
    if sum(granted) > MIN_CHUNK_TOKENS:
        assert took_s <= seconds * (1 + 1e-3)
    if seconds == math.inf:
        assert sum(granted) == min(tokens, sum(missing for _, missing in prefills))


@settings(max_examples=100, deadline=None)
@given(speed=SPEEDS, start=st.integers(0, 100_000), seconds=st.floats(1e-4, 10.0))
def test_the_fit_finds_both_terms_and_inverts_them(speed, start, seconds):
    token_s, key_s = speed
    fitted = known_speed(token_s, key_s)
    for position, tokens in ((0, 100), (5000, 64), (0, 1)):
        exact = token_s * tokens + key_s * (tokens * position + tokens * (tokens + 1) / 2)
        assert fitted.prefill_s(position, tokens) == pytest.approx(exact, rel=1e-3)
    count = fitted.tokens_within(seconds, start)
    assert fitted.prefill_s(start, count) <= seconds * (1 + 1e-9)
    assert fitted.prefill_s(start, count + 1) > seconds * (1 - 1e-9)


def test_nothing_is_known_before_the_first_step():
    speed = StepSpeed()
    assert (speed.prefill_s(0, 100), speed.tokens_within(1.0, 0)) == (0.0, 0)
    budget = StepBudget(speed, 500, 0.05, 32)
    assert budget.grant(0, 400) == MIN_CHUNK_TOKENS


def test_a_decode_step_is_measured_anew_after_many_with_prefill():
    speed = StepSpeed()
    speed.observe(0, 4, 0.010)
    for _ in range(40):
        speed.observe(16, 4, 0.2, 136)
    speed.observe(0, 4, 0.190)
    assert speed.decode_step_s == pytest.approx(0.19, rel=0.02)


@pytest.mark.parametrize("scheduler", ["shortest_first", "fifo", "prefill_first", "priority"])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_time_between_tokens_is_bounded_whatever_others_send(scheduler, noise):
    machine = Machine(scheduler=scheduler, noise=noise)
    machine.decode(8)
    for i, length in enumerate([4000, 30, 6000, 300, 1000, 7000, 64]):
        machine.submit(i, length, max_tokens=40)
    while machine.scheduler.num_waiting or machine.scheduler.rows.num_missing_tokens:
        machine.step()
    decode_s = 0.010 + 15 * 0.0002
    assert max(machine.gaps_s) <= (decode_s + 0.050) * (1 + noise) * 1.1
    # And it is used: the bound is not kept by computing nothing.
    prefills = [seconds for rows, tokens, seconds in machine.steps[5:] if rows and tokens]
    assert np.median(prefills) >= 0.75 * (decode_s + 0.050)


def test_without_the_bound_a_long_prompt_takes_the_step():
    machine = Machine(max_prefill_ms=None)
    machine.decode(8)
    machine.submit("long", 4000)
    machine.step()
    assert machine.steps[-1][:2] == (8, 504)
    assert machine.steps[-1][2] > 0.1


def test_while_nobody_decodes_a_prompt_takes_the_step():
    machine = Machine()
    machine.submit("long", 2000)
    machine.step()
    machine.step()
    assert [tokens for _, tokens, _ in machine.steps] == [512, 512]


def test_several_prompts_share_the_step_with_those_who_decode():
    machine = Machine()
    machine.decode(8)
    for i in range(4):
        machine.submit(i, 30)
    plan = machine.step()
    assert plan.num_decode_rows == 8
    assert np.diff(plan.cu_q)[8:].tolist() == [30] * 4


def test_a_chunk_that_is_cut_short_ends_with_a_block():
    machine = Machine()
    machine.decode(8)
    machine.submit("long", 3000)
    machine.step()
    plan = machine.step()
    assert plan.kv_len[-1] % 32 == 0


def test_a_decode_step_that_grew_does_not_hold_prefill_down():
    machine = Machine(key_s=0.0)
    machine.decode(8)
    machine.submit("a", 8000)
    for _ in range(4):
        machine.step()
    machine.costs[0] = 0.100  # more than the bound is now the decode step's, not the prefill's
    for _ in range(82):
        machine.step()
    tokens = [tokens for _, tokens, _ in machine.steps[8:]]
    assert min(tokens) <= MIN_CHUNK_TOKENS, "at first it was taken for the prefill's"
    assert np.median(tokens[-5:]) > 150
    assert max(machine.gaps_s[-40:]) <= (0.1 + 9 * 0.0002 + 0.050) * 1.02


def test_prefill_first_finishes_started_prompts_before_it_decodes():
    machine = Machine(scheduler="prefill_first", max_prefill_ms=None)
    machine.decode(8)
    machine.submit("long", 1200)
    machine.submit("short", 60)
    machine.step()  # admitted behind the decodes
    for _ in range(4):
        machine.step()
        if machine.steps[-1][0]:
            break
        assert machine.scheduler.num_waiting == 1, "no new prompt while decodes wait"
    # 504 beside the decodes, 512 alone, then the rest of 184 with the decodes and the next prompt.
    assert [step[:2] for step in machine.steps[-3:]] == [(8, 504), (0, 512), (8, 184 + 60)]


def test_prefill_first_lets_decodes_wait_no_longer_than_the_bound():
    machine = Machine(
        scheduler="prefill_first", max_prefill_ms=300.0, max_batch_tokens=128, key_s=0.0
    )
    machine.decode(16)
    machine.submit("long", 8000)
    while machine.scheduler.num_waiting or machine.scheduler.rows.num_missing_tokens:
        machine.step()
    left_out = [tokens for rows, tokens, _ in machine.steps if not rows]
    assert len(left_out) > 20, "prompts come first"
    assert max(machine.gaps_s) <= 0.3 + 0.010 + 17 * 0.0002


def test_what_ran_beside_a_burst_is_forgotten_after_a_pause():
    speed = StepSpeed()
    for i in range(50):
        speed.observe(100, 0, 0.9, end_s=1.0 + i)
    assert speed.prefill_s_per_token == pytest.approx(0.009)
    speed.observe(100, 0, 0.1, end_s=50.0 + 8 * StepSpeed.HORIZON_S)
    assert speed.prefill_s_per_token == pytest.approx(0.001, rel=0.1)


def test_a_first_prompt_that_was_held_up_is_forgotten_with_the_first_fast_one():
    speed = StepSpeed()
    speed.observe(3000, 0, 3.0, end_s=3.0)  # all replicas of the machine have begun at once
    speed.observe(60, 0, 0.006, end_s=4.0)
    # A fifth of half of what was foretold: 0.2 of the old, 0.8 of the new.
    assert speed.prefill_s_per_token == pytest.approx(0.2 * 0.001 + 0.8 * 0.0001)
    for i in range(2):
        speed.observe(60, 0, 0.006, end_s=5.0 + i)
    # Of what is left, less than a factor of two, time is the judge.
    assert 0.0001 < speed.prefill_s_per_token < 0.0002
    assert 0.1 < speed.prefill_s(0, 1000) < 0.2  # what bounds a chunk, too


@pytest.mark.parametrize(("num_decode_rows", "duration_s"), [(4, 0.006), (0, 0.033)])
def test_what_is_known_stands_where_a_step_proves_nothing(num_decode_rows, duration_s):
    """Beside decodes the prompt's part of a step is an estimate; and neighbours take or give less than a half."""
    speed = StepSpeed()
    speed.observe(3000, 0, 3.0, end_s=3.0)
    speed.observe(60, num_decode_rows, duration_s, end_s=3.0 + duration_s)
    known, new = 3000 * (1 - StepSpeed.WEIGHT), 60
    assert speed.prefill_s_per_token == pytest.approx(
        (known * 0.001 + duration_s) / (known + new), rel=1e-6
    )


def test_a_slow_step_after_a_pause_counts_beside_what_was_known():
    speed = StepSpeed()
    for i in range(50):
        speed.observe(100, 0, 0.1, end_s=45.0 + 0.1 * (i + 1))
    pause_s = 8 * StepSpeed.HORIZON_S
    speed.observe(100, 0, 0.9, end_s=50.0 + pause_s)
    known, new = StepSpeed.KEPT_TOKENS * (1 - StepSpeed.WEIGHT), 100
    assert speed.prefill_s_per_token == pytest.approx(
        (known * 0.001 + new * 0.009) / (known + new), rel=0.02
    )
    for i in range(30):  # it stays slow
        speed.observe(100, 0, 0.9, end_s=51.0 + pause_s + i)
    assert speed.prefill_s_per_token == pytest.approx(0.009, rel=0.05)

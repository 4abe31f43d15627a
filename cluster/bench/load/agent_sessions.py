"""Sessions of agents: each turn repeats a growing context, and a tool runs between two turns.

```
 session     [shared prompt | own task ]                                   turn 0
             [shared prompt | own task | answer | tool result ]            turn 1
             [shared prompt | own task | answer | tool result | answer | tool result ]   turn 2 ...
 time         turn 0 ── pause ── turn 1 ── pause ── turn 2 ...
 branch                                └── pause ── turn 2 ── pause ── turn 3 ...
```

The defaults are the means that public traces of coding agents show. The context of a session grows to the same length
in few turns or in many. All agents run all the time: an agent begins its
next session after a pause. The first session of each agent has already begun, so at any time the sessions are at all
turns, and the contexts have all lengths.

A session may fork once: a branch continues the context so far while the session does, with turns and pauses of its
own. It has a session name of its own. The session itself is the same with and without the branch. Branches, too, have
already begun at the start.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from quire.cluster.bench.load.workloads import (
    FIRST_TOKEN_ID,
    TimedRequest,
    random_token_ids,
)

# Fractions of their means by which the turns of a session, and the tokens of answers and of tool results, vary,
# uniformly.
_TURNS_SPREAD, _TOKENS_SPREAD = 0.25, 0.5
_P99_DEVIATIONS = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShape:
    """Means of a session at full scale, and the two factors by which a run is smaller.

    Attributes
    ----------
    num_turns
        Turns of a session.
    first_tokens, last_tokens
        Context of the first and of the last turn.
    shared_tokens
        The part of the first context that many sessions share: system prompt and tools.
    num_shared_prompts
        Number of different shared prompts; each agent has one of them.
    input_per_output
        Prompt tokens, cached ones included, for each output token.
    fork_share
        Share of the sessions that fork, at a random turn.
    pause_median_s, pause_p99_s
        Median and 99th percentile of the pauses for tools, which are log-normal.
    token_scale, time_scale
        Factors of all token counts and of all pauses.
    """

    num_turns: int = 33
    first_tokens: int = 12_000
    last_tokens: int = 80_000
    shared_tokens: int = 10_000
    num_shared_prompts: int = 4
    input_per_output: float = 131.0
    fork_share: float = 0.0
    pause_median_s: float = 5.0
    pause_p99_s: float = 81.0
    token_scale: float = 1.0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.num_turns < 2:
            raise ValueError(f"num_turns: must be >= 2, got {self.num_turns}")
        if not 0 <= self.shared_tokens < self.first_tokens < self.last_tokens:
            raise ValueError(
                "shared_tokens, first_tokens, last_tokens: must be >= 0 and ascending, got "
                f"{self.shared_tokens}, {self.first_tokens}, {self.last_tokens}"
            )
        if self.num_shared_prompts < 1:
            raise ValueError(f"num_shared_prompts: must be >= 1, got {self.num_shared_prompts}")
        if not 0 <= self.fork_share <= 1:
            raise ValueError(f"fork_share: must be from 0 to 1, got {self.fork_share:g}")
        if not 0 < self.pause_median_s < self.pause_p99_s:
            raise ValueError(
                "pause_median_s, pause_p99_s: must be > 0 and ascending, got "
                f"{self.pause_median_s:g}, {self.pause_p99_s:g}"
            )
        for field in ("token_scale", "time_scale"):
            if not 0 < getattr(self, field) <= 1:
                raise ValueError(
                    f"{field}: must be above 0 and at most 1, got {getattr(self, field):g}"
                )
        least_growth = (self.last_tokens - self.first_tokens) / self.num_turns / (1 + _TURNS_SPREAD)
        if self.input_per_output <= 0 or self.answer_tokens >= least_growth:
            raise ValueError(
                "input_per_output: answers must be shorter than the growth of the context, got "
                f"{self.input_per_output:g}"
            )

    @property
    def mean_context(self) -> float:
        """Mean prompt of a turn, at full scale."""
        return (self.first_tokens + self.last_tokens) / 2

    @property
    def answer_tokens(self) -> float:
        """Mean output of a turn, at full scale."""
        return self.mean_context / self.input_per_output

    @property
    def pause_mean_s(self) -> float:
        """Mean pause, scaled."""
        return self.time_scale * self.pause_median_s * math.exp(self._pause_sigma**2 / 2)

    @property
    def _pause_sigma(self) -> float:
        return math.log(self.pause_p99_s / self.pause_median_s) / _P99_DEVIATIONS

    def pause_s(self, rng: random.Random) -> float:
        """Draw a pause, scaled."""
        return self.time_scale * rng.lognormvariate(
            math.log(self.pause_median_s), self._pause_sigma
        )

    def scaled(self, tokens: float) -> int:
        """Number of tokens that stand for `tokens` at full scale, at least 1."""
        return max(1, round(tokens * self.token_scale))


def agents(
    num_agents: int, duration_s: float, shape: AgentShape, vocab_size: int, seed: int = 0
) -> list[list[TimedRequest]]:
    """Make the turns of agents that all run for `duration_s`, one list for each agent.

    A turn has only its new tokens, and `at_s` is the pause before it. All turns but a session's last one end with a
    tool call, so they ask the server to retain the session. Turn 0 begins a new session, with an empty
    context. The first session of an agent begins at a random turn: its first prompt has the context of all turns before
    it.

    Raises
    ------
    ValueError
        A number is not positive, or the vocabulary has no ids above the special tokens.
    """
    if num_agents < 1:
        raise ValueError(f"num_agents: must be >= 1, got {num_agents}")
    if duration_s <= 0:
        raise ValueError(f"duration_s: must be > 0, got {duration_s:g}")
    if vocab_size <= FIRST_TOKEN_ID:
        raise ValueError(f"vocab_size: must be > {FIRST_TOKEN_ID}, got {vocab_size}")
    rng = random.Random(f"agents/{seed}")
    num_shared = round(shape.shared_tokens * shape.token_scale)
    shared = [
        random_token_ids(rng, num_shared, vocab_size) for _ in range(shape.num_shared_prompts)
    ]
    return [
        _agent(
            *(i, duration_s, shape, shared[i % len(shared)], vocab_size, rng),
            random.Random(f"forks/{seed}/{i}"),
        )
        for i in range(num_agents)
    ]


def _agent(
    agent: int,
    duration_s: float,
    shape: AgentShape,
    shared: list[int],
    vocab_size: int,
    rng: random.Random,
    fork_rng: random.Random,
) -> list[TimedRequest]:
    """The turns of one agent until its pauses alone last for `duration_s`; `fork_rng` draws the branches."""

    def varied(mean: float, spread: float = _TOKENS_SPREAD) -> float:
        return mean * rng.uniform(1 - spread, 1 + spread)

    def is_fork() -> bool:
        return shape.fork_share > 0 and fork_rng.random() < shape.fork_share

    turns: list[TimedRequest] = []
    session = 0
    # All agents start within the time in which each sends one turn.
    at_s = rng.uniform(0.0, shape.pause_mean_s)
    total_s = 0.0
    while True:
        num_turns = max(2, round(varied(shape.num_turns, _TURNS_SPREAD)))
        growth = (shape.last_tokens - shape.first_tokens) / (num_turns - 1)
        num_before = rng.randrange(num_turns) if session == 0 else 0
        # The session's last turn has no tool call, so no branch begins there.
        forks_at = fork_rng.randrange(num_turns - 1) if is_fork() else -1
        own = shape.first_tokens - shape.shared_tokens + num_before * growth
        prompt = shared + random_token_ids(rng, shape.scaled(own), vocab_size)
        for turn in range(num_turns - num_before):
            if turn:
                new = shape.scaled(varied(growth - shape.answer_tokens))
                prompt = random_token_ids(rng, new, vocab_size)
            output = shape.scaled(varied(shape.answer_tokens))
            name = f"agent-{agent}-{session}"
            is_last = turn == num_turns - num_before - 1
            branch: tuple[TimedRequest, ...] = ()
            if num_before + turn == max(forks_at, num_before) and forks_at >= 0:
                # Its context grows to no more than the session's.
                num_turns_left = fork_rng.randint(1, num_turns - 1 - forks_at)
                num_turns_left -= max(0, num_before - forks_at)
                fork_tokens = shape.first_tokens + forks_at * growth
                has_begun = forks_at < num_before
                common = prompt[: shape.scaled(fork_tokens)] if has_begun else []
                first_turn, branch_name = 0 if has_begun else turn + 1, f"{name}-branch"
                parts = growth, vocab_size, fork_rng, common, len(prompt) - len(common)
                branch = _branch(shape, branch_name, first_turn, num_turns_left, *parts)
            turns.append(TimedRequest(at_s, tuple(prompt), output, name, turn, not is_last, branch))
            total_s += at_s
            if total_s >= duration_s:
                return turns
            at_s = shape.pause_s(rng)
        session += 1


def _branch(
    shape: AgentShape,
    session: str,
    first_turn: int,
    num_turns: int,
    growth: float,
    vocab_size: int,
    rng: random.Random,
    common: list[int],
    num_own: int,
) -> tuple[TimedRequest, ...]:
    """The turns of a branch.

    Parameters
    ----------
    first_turn
        Number of its first turn. 0: the branch has begun before, so its first prompt is a whole context.
    num_turns
        Turns that are left; below 1: it has ended before.
    growth
        Tokens by which the context grows in a turn, in the mean.
    common, num_own
        Of a whole context: the tokens that the session has too, and the number of further ones.
    """
    turns = []
    for i in range(num_turns):
        spread = 1 - _TOKENS_SPREAD, 1 + _TOKENS_SPREAD
        new = shape.scaled((growth - shape.answer_tokens) * rng.uniform(*spread))
        prompt: list[int] = []
        if i == 0 and first_turn == 0:
            prompt, new = common, num_own
        prompt = prompt + random_token_ids(rng, new, vocab_size)
        output = shape.scaled(shape.answer_tokens * rng.uniform(*spread))
        is_last = i == num_turns - 1
        turns.append(
            TimedRequest(
                shape.pause_s(rng), tuple(prompt), output, session, first_turn + i, not is_last
            )
        )
    return tuple(turns)

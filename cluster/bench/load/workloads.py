"""Workloads: batches of prompts, and requests with send times.

The module computes token ids and seconds and reads no clock. Prompts differ between repetitions, so a prefix cache has
no hits from an earlier repetition. A workload that needs hits has a prefix that its requests share.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Most vocabularies have special tokens and single bytes below this id.
FIRST_TOKEN_ID = 300


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch of requests that are submitted at once.

    Each prompt is a prefix of `shared_tokens` that all requests share, then `prompt_tokens` of its own. Each answer
    is greedy and has exactly `output_tokens`; EOS does not end it.
    """

    name: str
    num_requests: int
    shared_tokens: int
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for field in ("num_requests", "prompt_tokens", "output_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: must be >= 1, got {getattr(self, field)}")
        if self.shared_tokens < 0:
            raise ValueError(f"shared_tokens: must be >= 0, got {self.shared_tokens}")

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the whole batch generates."""
        return self.num_requests * self.output_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens of one prompt and its answer."""
        return self.shared_tokens + self.prompt_tokens + self.output_tokens

    def prompts(self, repetition: int | str, vocab_size: int) -> list[list[int]]:
        """The prompts of one repetition: [num_requests][shared + prompt tokens] ids in [FIRST_TOKEN_ID, vocab_size).

        Raises
        ------
        ValueError
            The vocabulary has no ids above the special tokens.
        """
        if vocab_size <= FIRST_TOKEN_ID:
            raise ValueError(f"vocab_size: must be > {FIRST_TOKEN_ID}, got {vocab_size}")
        rng = random.Random(f"{self.name}/{repetition}")
        shared = random_token_ids(rng, self.shared_tokens, vocab_size)
        return [
            shared + random_token_ids(rng, self.prompt_tokens, vocab_size)
            for _ in range(self.num_requests)
        ]

    @classmethod
    def parse(cls, text: str) -> Workload:
        """W1 to W5, or `REQUESTS x (SHARED + PROMPT -> OUTPUT)` written as `32x768+32->16` or `32x128->64`.

        Raises
        ------
        ValueError
            The text is neither.
        """
        if text in WORKLOADS:
            return WORKLOADS[text]
        try:
            requests, _, rest = text.partition("x")
            prompt, _, output = rest.partition("->")
            shared, plus, own = prompt.partition("+")
            if not plus:
                shared, own = "0", prompt
            return cls(text, int(requests), int(shared), int(own), int(output))
        except ValueError as error:
            raise ValueError(
                f"workload: must be one of {', '.join(WORKLOADS)} or like 32x768+32->16, got {text!r} ({error})"
            ) from None

    def scaled(self, share: float) -> Workload:
        """The same lengths with a share of the requests, at least one."""
        return dataclasses.replace(self, num_requests=max(1, round(self.num_requests * share)))


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", 32, 0, 128, 64),  # offline throughput
        Workload("W2", 16, 0, 16, 256),  # mostly decode
        Workload("W3", 16, 0, 1024, 8),  # mostly prefill
        Workload("W4", 32, 768, 32, 16),  # a shared prefix
        Workload("W5", 1, 0, 128, 128),  # one stream
    )
}


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request with the time at which a user sends it.

    `at_s` counts from the start of the run; for later turns of a session, from the end of the previous turn. `retain`
    asks the server to retain the session, because the answer ends with a tool call and another turn follows soon.
    `branch` are the turns of a second conversation that begins with this turn's answer and runs beside the session.
    """

    at_s: float
    prompt_ids: tuple[int, ...]
    output_tokens: int
    session: str = ""
    turn: int = 0
    retain: bool = False
    branch: tuple[TimedRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts and answers, distributed uniformly between two bounds, both included."""

    prompt_tokens: tuple[int, int] = (128, 128)
    output_tokens: tuple[int, int] = (64, 64)

    def __post_init__(self) -> None:
        for field in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, field)
            if not 1 <= low <= high:
                raise ValueError(
                    f"{field}: must be LOW-HIGH with 1 <= LOW <= HIGH, got {low}-{high}"
                )


@dataclass(frozen=True, slots=True)
class PrefixMix:
    """Shared prefixes at the start of prompts, chosen with Zipf's weights: 1, 1/2, 1/3, ..."""

    num_prefixes: int = 0  # 0: no shared prefixes
    prefix_tokens: int = 512

    def __post_init__(self) -> None:
        if self.num_prefixes < 0:
            raise ValueError(f"num_prefixes: must be >= 0, got {self.num_prefixes}")
        if self.num_prefixes and self.prefix_tokens < 1:
            raise ValueError(f"prefix_tokens: must be >= 1, got {self.prefix_tokens}")


def poisson(
    rate_per_s: float,
    duration_s: float,
    lengths: Lengths,
    mix: PrefixMix,
    vocab_size: int,
    seed: int = 0,
) -> list[TimedRequest]:
    """Make requests with exponentially distributed gaps (a Poisson process), in order of time.

    Raises
    ------
    ValueError
        The rate or the duration is not positive.
    """
    if rate_per_s <= 0:
        raise ValueError(f"rate_per_s: must be > 0, got {rate_per_s:g}")
    if duration_s <= 0:
        raise ValueError(f"duration_s: must be > 0, got {duration_s:g}")
    rng = random.Random(f"poisson/{seed}")
    maker = _PromptMaker(rng, lengths, mix, vocab_size)
    requests, at_s = [], rng.expovariate(rate_per_s)
    while at_s < duration_s:
        requests.append(TimedRequest(at_s, *maker.next()))
        at_s += rng.expovariate(rate_per_s)
    return requests


def closed(
    num_requests: int, lengths: Lengths, mix: PrefixMix, vocab_size: int, seed: int = 0
) -> list[TimedRequest]:
    """Make requests without times for a closed loop, in which each user sends the next request after an answer."""
    if num_requests < 1:
        raise ValueError(f"num_requests: must be >= 1, got {num_requests}")
    maker = _PromptMaker(random.Random(f"closed/{seed}"), lengths, mix, vocab_size)
    return [TimedRequest(0.0, *maker.next()) for _ in range(num_requests)]


def sessions(
    num_sessions: int,
    num_turns: int,
    rate_per_s: float,
    think_s: float,
    lengths: Lengths,
    mix: PrefixMix,
    vocab_size: int,
    seed: int = 0,
) -> list[list[TimedRequest]]:
    """Make conversations whose starts are a Poisson process.

    A turn has only the user's new tokens; the client puts the earlier turns and the server's answers before them.
    `at_s` of the first turn is the start of the session. For later turns it is the user's pause (exponential, mean
    `think_s`) after the last token of the previous answer.
    """
    for field, value in (("num_sessions", num_sessions), ("num_turns", num_turns)):
        if value < 1:
            raise ValueError(f"{field}: must be >= 1, got {value}")
    if rate_per_s <= 0:
        raise ValueError(f"rate_per_s: must be > 0, got {rate_per_s:g}")
    if think_s < 0:
        raise ValueError(f"think_s: must be >= 0, got {think_s:g}")
    rng = random.Random(f"sessions/{seed}")
    maker = _PromptMaker(rng, lengths, mix, vocab_size)
    found, start_s = [], 0.0
    for i in range(num_sessions):
        start_s += rng.expovariate(rate_per_s)
        turns = []
        for turn in range(num_turns):
            at_s = start_s if turn == 0 else (rng.expovariate(1 / think_s) if think_s else 0.0)
            prompt, output = maker.next(with_prefix=turn == 0)
            turns.append(TimedRequest(at_s, prompt, output, f"session-{i}", turn))
        found.append(turns)
    return found


@dataclass(frozen=True, slots=True)
class TraceScale:
    """Scales a trace down for a small model; prompts share the same fraction of their tokens as recorded.

    Attributes
    ----------
    block_tokens
        Tokens that one of `hash_ids` stands for; 512 as recorded.
    output_share
        Fraction of the recorded output tokens that is generated, at least one token.
    max_tokens
        Requests with a longer scaled prompt and answer are left out.
    """

    block_tokens: int = 512
    output_share: float = 1.0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= _TRACE_BLOCK_TOKENS:
            raise ValueError(
                f"block_tokens: must be from 1 to {_TRACE_BLOCK_TOKENS}, got {self.block_tokens}"
            )
        if not 0 < self.output_share <= 1:
            raise ValueError(
                f"output_share: must be above 0 and at most 1, got {self.output_share:g}"
            )

    def prompt_tokens(self, recorded: int) -> int:
        return max(1, recorded * self.block_tokens // _TRACE_BLOCK_TOKENS)

    def output_tokens(self, recorded: int) -> int:
        return max(1, round(recorded * self.output_share))

    def fits(self, num_tokens: int) -> bool:
        return self.max_tokens is None or num_tokens <= self.max_tokens


_TRACE_BLOCK_TOKENS = 512  # prompt tokens for each of `hash_ids`
_AS_RECORDED = TraceScale()


def read_trace(
    path: Path,
    vocab_size: int,
    *,
    speed: float = 1.0,
    limit: int | None = None,
    scale: TraceScale = _AS_RECORDED,
) -> list[TimedRequest]:
    """Read the requests of a JSON-lines trace, plain or `.gz`, in order of time.

    A line is `{"at_s": 0.2, "prompt_tokens": 120, "output_tokens": 40}`, or has `timestamp` in milliseconds,
    `input_length` and `output_length` as the public Mooncake traces do, with `hash_ids`: one id for each 512
    tokens of the prompt. Equal ids become equal tokens, so prompts share the same prefixes as recorded.

    Parameters
    ----------
    speed
        Replay speed; 2 replays twice as fast.
    limit
        Most requests to read.
    scale
        Scale of prompts and answers.

    Raises
    ------
    ValueError
        A line has missing or invalid fields; the message names the line.
    """
    if speed <= 0:
        raise ValueError(f"speed: must be > 0, got {speed:g}")
    rows = []
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = _TraceRow.parse(json.loads(line), number, scale)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name}, line {number}: {error!r}") from None
        if scale.fits(row.prompt_tokens + row.output_tokens):
            rows.append(row)
    if not rows:
        raise ValueError(f"{path.name}: no requests")
    rows.sort(key=lambda row: row.at_s)
    first_s = rows[0].at_s
    return [
        TimedRequest((row.at_s - first_s) / speed, row.prompt(vocab_size, scale), row.output_tokens)
        for row in rows[:limit]
    ]


@dataclass(frozen=True, slots=True)
class _TraceRow:
    """A line of a trace with its scaled lengths."""

    number: int  # line number
    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: Sequence[int] | None

    @classmethod
    def parse(cls, row: dict, number: int, scale: TraceScale) -> _TraceRow:
        at_s = row["at_s"] if "at_s" in row else row["timestamp"] / 1000
        length = int(row["prompt_tokens"] if "prompt_tokens" in row else row["input_length"])
        output = int(row["output_tokens"] if "output_tokens" in row else row["output_length"])
        if at_s < 0 or length < 1 or output < 1:
            raise ValueError(f"at_s >= 0 and lengths >= 1 wanted, got {at_s:g}, {length}, {output}")
        hash_ids = row.get("hash_ids")
        if hash_ids is not None and len(hash_ids) * _TRACE_BLOCK_TOKENS < length:
            raise ValueError(f"hash_ids: {len(hash_ids)} blocks for {length} tokens")
        return cls(number, at_s, scale.prompt_tokens(length), scale.output_tokens(output), hash_ids)

    def prompt(self, vocab_size: int, scale: TraceScale) -> tuple[int, ...]:
        """The prompt's token ids."""
        if self.hash_ids is None:
            rng = random.Random(f"trace/{self.number}")
            return tuple(random_token_ids(rng, self.prompt_tokens, vocab_size))
        tokens = [
            token
            for block in self.hash_ids
            for token in random_token_ids(
                random.Random(f"trace-block/{block}"), scale.block_tokens, vocab_size
            )
        ]
        return tuple(tokens[: self.prompt_tokens])


class _PromptMaker:
    """Makes random prompts and lengths."""

    def __init__(self, rng: random.Random, lengths: Lengths, mix: PrefixMix, vocab_size: int):
        if vocab_size <= FIRST_TOKEN_ID:
            raise ValueError(f"vocab_size: must be > {FIRST_TOKEN_ID}, got {vocab_size}")
        self._rng, self._lengths, self._vocab_size = rng, lengths, vocab_size
        self._prefixes: Sequence[list[int]] = [
            random_token_ids(rng, mix.prefix_tokens, vocab_size) for _ in range(mix.num_prefixes)
        ]
        self._weights = [1 / (i + 1) for i in range(mix.num_prefixes)]

    def next(self, with_prefix: bool = True) -> tuple[tuple[int, ...], int]:
        """The next prompt's ids and its number of output tokens."""
        rng = self._rng
        prompt: list[int] = []
        if self._prefixes and with_prefix:
            prompt += rng.choices(self._prefixes, self._weights)[0]
        prompt += random_token_ids(rng, rng.randint(*self._lengths.prompt_tokens), self._vocab_size)
        return tuple(prompt), rng.randint(*self._lengths.output_tokens)


def random_token_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    """Draw token ids from [FIRST_TOKEN_ID, vocab_size)."""
    return [rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(count)]


def batches(names: Sequence[str]) -> Iterator[Workload]:
    """Yield the workloads with these names; a repeated name counts once."""
    for name in dict.fromkeys(names):
        yield Workload.parse(name)

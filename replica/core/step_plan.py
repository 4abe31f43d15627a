"""What enters and leaves one step: pure data between the scheduler and the runner.

A step is one forward pass over a ragged batch: all tokens of all its rows lie in one flat axis, decode rows
first (one token each), then prefill chunks. Nothing is padded.

```
 row          0    1    2        3              4
 token_ids  [ a ][ b ][ c ][ d d d d d d ][ e e e e ]     T tokens
 cu_q       0    1    2    3             9          13
              decode rows     prefill chunks
```
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from quire.protos.errors import QuireError
from quire.protos.wire import PromptLogprobs, TokenLogprob
from quire.replica.core.table_changes import NO_CHANGES, TableChanges

NO_TOKEN = int(np.iinfo(np.int64).min)  # no defect gives it by accident


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Ids that one row's request favours or excludes, whatever the history is."""

    allowed_ids: np.ndarray | None = None  # [n] int64: no others
    bias_ids: np.ndarray | None = None  # [m] int64, each once
    bias: np.ndarray | None = None  # [m] float32, added to the logits of `bias_ids`


@dataclass(frozen=True, slots=True)
class Penalties:
    """The rows on whose next token its history weighs. P of them.

    The counts themselves live with the sampler, on its device (`TokenCounts`), and it adds each sampled
    token by itself; the plan brings only the history of rows that sample for the first time.
    """

    index: np.ndarray  # [P] int64, which of the S rows that sample
    row: np.ndarray  # [P] int64, their places in the row table
    repetition: np.ndarray  # [P] float32, 1 = off
    presence: np.ndarray  # [P] float32
    frequency: np.ndarray  # [P] float32
    begun: tuple[tuple[int, np.ndarray, np.ndarray], ...] = ()
    # (row, prompt ids, output ids) of those that have sampled nothing since they got their row


class TokenMask(Protocol):
    """Where a row is in its grammar."""

    def mask(self) -> np.ndarray:
        """[ceil(vocab / 32)] int32, bit i of word w set: id 32 * w + i may come next."""
        ...


_NO_ROWS = np.empty(0, np.int64)
_NO_ROWS.setflags(write=False)


class SamplingBatch(NamedTuple):
    """Columns for the rows that sample a token in this step, in the order of the rows. S of them."""

    token_index: np.ndarray  # [S] int32, flat index in [0, T) of the hidden state to sample from
    temperature: np.ndarray  # [S] float32, 0 = greedy
    top_k: np.ndarray  # [S] int32, 0 = off
    top_p: np.ndarray  # [S] float32, 1 = off
    seed: np.ndarray  # [S] uint64
    choice: np.ndarray  # [S] int32
    position: (
        np.ndarray
    )  # [S] int64, absolute position of the token to be sampled (prompt + output)
    suppressed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # (index in [0, S), token ids that must not be sampled there): EOS and stop ids before min_tokens, bad
    # words of one token, and the last tokens of longer ones whose beginnings have just been generated
    min_p: np.ndarray | None = None  # [S] float32, 0 = off
    rules: tuple[tuple[int, TokenRules], ...] = ()  # (index in [0, S), what holds there)
    penalties: Penalties | None = None
    # (index in [0, S), its grammar): the sampler asks for the masks once the forward pass is launched
    grammars: tuple[tuple[int, TokenMask], ...] = ()
    logprobs: tuple[tuple[int, int], ...] = ()  # (index in [0, S), number of likeliest ids wanted)
    # [S] int64, places in the row table, where the device keeps what it samples; empty: nowhere
    rows: np.ndarray = _NO_ROWS

    @property
    def is_plain(self) -> bool:
        """Whether temperature, top-k, top-p, min-p and noise are all that any row asks for."""
        return not (
            self.suppressed
            or self.rules
            or self.grammars
            or self.logprobs
            or self.penalties is not None
        )


_NO_PAIRS = np.empty((0, 2), np.int64)
_NO_PAIRS.setflags(write=False)


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Tokens of one row's prompt whose log-probabilities are wanted, given those before them. n of them."""

    row: int  # its place in the row table
    begin: int  # flat index of the hidden state before the first of them; the others follow
    start: int  # position in the prompt of the first of them
    token_ids: np.ndarray  # [n] int64
    num_top: int  # likeliest ids wanted


class StepPlan(NamedTuple):
    """One step for the runner. `num_rows` = n, T tokens.

    `block_tables` lies in one of two buffers: valid until the second plan after this one is made.
    """

    step: int  # counts up from 1
    num_decode_rows: int  # the first rows have one token each
    token_ids: np.ndarray  # [T] int32; not those of `decode_rows`, which may not be known yet
    positions: np.ndarray  # [T] int32, absolute position of each token in its sequence
    cu_q: np.ndarray  # [n + 1] int32, row i owns tokens [cu_q[i], cu_q[i + 1])
    kv_len: np.ndarray  # [n] int32, tokens in the cache once this step has written its own
    # G layer groups. Entries beyond a row's length, and of blocks that fell out of its reach, are 0.
    block_tables: np.ndarray  # [G, n, max blocks of the batch] int32
    slots: (
        np.ndarray
    )  # [G, T] int64, block_id * block_size + offset: where each token's KV is written
    sampling: SamplingBatch
    copies: tuple[
        tuple[int, int], ...
    ] = ()  # (from, to) blocks copied before the step (copy-on-write)
    prompts: tuple[PromptTargets, ...] = ()
    # Whole blocks copied between the tiers before that: first the saves, then the restores.
    saves: np.ndarray = _NO_PAIRS  # [k, 2] int64, (device block, host block)
    restores: np.ndarray = _NO_PAIRS  # [k, 2] int64, (host block, device block)
    # Whether the step uses blocks that it, or a step before it, restores and that may not be there yet
    uses_restores: bool = True
    # [D] int64, places in the row table of the first D rows: each computes what was last sampled there; D is
    # `num_decode_rows`, or 0 where `token_ids` has all tokens
    decode_rows: np.ndarray = _NO_ROWS
    # [n] int64, places in the request table of all rows; empty: of a plan that was made without one
    rows: np.ndarray = _NO_ROWS
    changes: TableChanges = NO_CHANGES  # of the request table, since the plan before
    # What some row may sample depends on a token of the step in flight: `sampling` is not whole before that is
    # committed, see `Scheduler.complete`; the forward pass needs none of it
    awaits_tokens: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.kv_len)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def written_blocks(self, block_size: int) -> np.ndarray:
        """[m] int64, the blocks whose content the step changes, each once."""
        targets = np.array([target for _, target in self.copies], np.int64)
        return np.unique(np.concatenate([self.slots.ravel() // block_size, targets]))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner computed."""

    # [S] int64, aligned with `StepPlan.sampling`; NO_TOKEN where a row's constraints leave none
    token_ids: np.ndarray
    duration_s: float  # launch to tokens on the host
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by index in [0, S), if asked
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # aligned with `StepPlan.prompts`
    restores: tuple[tuple[int, float], ...] = ()  # (blocks, seconds) of copies that have ended
    # What the plans up to that of this step restore is there; None: what all plans made so far do
    restored_step: int | None = None


@dataclass(slots=True)
class RequestDelta:
    """What a step did for one request: new tokens and, at the end, how it ended."""

    key: Hashable  # the owner's name for the request
    index: int  # absolute output index of token_ids[0]
    token_ids: list[int]
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # over the whole request, earlier attempts included
    queue_s: float = 0.0
    prefill_s: float = 0.0
    error: QuireError | None = None
    logprobs: list[TokenLogprob] | None = None  # one for each token, when asked for
    prompt_logprobs: PromptLogprobs | None = None  # of what the step computed of the prompt
    num_host_cached_tokens: int = 0  # of `num_cached_tokens`, those copied back from the host tier

"""Input and output of one step: pure data between the scheduler and the runner.

A step is one forward pass over a ragged batch. A row has `num_scheduled` tokens; a token is sampled after each of its
last `num_sampled` tokens. The tokens of all rows are concatenated along one axis without padding.

```
 row             0    1       2            3              4
 token_ids     [ a ][ b ][ c c c ][ d d d d d d ][ e e e e ]     T tokens
 cu_q          0    1    2       5             11          15
 num_scheduled   1    1      3          6              4
 num_sampled     1    1      3          0              1         rows 0 to 2 decode, 2 with a draft of two tokens;
                                                                 3 and 4 are chunks of prompts
```
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from quire.protos.wire import PromptLogprobs, TokenLogprob
from quire.replica.core.adapter import NO_SLOTS, AdapterLoad
from quire.replica.core.table_changes import NO_CHANGES, TableChanges

# Stands in the place of a token id for a row that cannot sample, because its constraints exclude every id. No defect
# produces this value by accident.
NO_TOKEN = int(np.iinfo(np.int64).min)


_NO_PAIRS = np.empty((0, 2), np.int64)
_NO_PAIRS.setflags(write=False)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Token ids that a row's request excludes or biases, independent of the tokens so far."""

    allowed_ids: np.ndarray | None = None  # [n] int64; all other ids are excluded
    bias_ids: np.ndarray | None = None  # [m] int64, unique
    bias: np.ndarray | None = None  # [m] float32, added to the logits of `bias_ids`


@dataclass(frozen=True, slots=True)
class Penalties:
    """P rows with penalties, which depend on how often each token has occurred.

    The sampler keeps the counts on its device (`TokenCounts`) and adds each sampled token. The plan only has the tokens
    of rows that sample for the first time.
    """

    index: np.ndarray  # [P] int64, index among the S rows that sample
    row: np.ndarray  # [P] int64, rows in the request table
    # (row, prompt ids, output ids) of each row that has sampled nothing since its request got it
    begun: tuple[tuple[int, np.ndarray, np.ndarray], ...] = ()
    # [k, 2] int64, (entry of `index`, token id): drafted tokens that precede the sample and are not counted yet
    ahead: np.ndarray = field(default_factory=lambda: _NO_PAIRS)


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafted tokens of a step. A sample counts if the drafted tokens before it in its row are the tokens drawn.

    ```
     tokens of a row     [ newest ][ a ][ b ]
     samples                 x       y    z        y counts if a is x; z counts if also b is y
     offset                  0       1    2
     token_ids              -1       a    b
    ```
    """

    offset: np.ndarray  # [S] int64, number of drafted tokens of the row before the sample
    token_ids: np.ndarray  # [S] int64, the last of these tokens; -1: there is none

    def before(self, i: int) -> tuple[int, ...]:
        """The drafted tokens of the row before sample i."""
        ids: list[int] = self.token_ids[i + 1 - self.offset[i] : i + 1].tolist()
        return tuple(ids)

    def counting(self, drawn: np.ndarray) -> np.ndarray:
        """[S] bool, whether each sample counts, for the drawn tokens [S]. `draft_check.py` does it on the device."""
        num_wrong = ((self.offset > 0) & (self.token_ids != np.roll(drawn, 1))).cumsum()
        is_right: np.ndarray = num_wrong == num_wrong[np.arange(len(drawn)) - self.offset]
        return is_right


class TokenMask(Protocol):
    """The position of a row's output in its grammar, and the mask of the ids that may follow."""

    def mask(self) -> np.ndarray:
        """[ceil(vocab / 32)] int32; if bit i of word w is set, id 32 * w + i may come next."""
        ...


_NO_ROWS = np.empty(0, np.int64)
_NO_ROWS.setflags(write=False)


class SamplingBatch(NamedTuple):
    """Parameters of the S samples of this step, in the order of the rows. A row with a draft has several samples."""

    token_index: np.ndarray  # [S] int32, flat index in [0, T) of the hidden state to sample from
    columns: np.ndarray  # [S] `sampling_record.RECORD`
    # [S] int64, absolute position of the token to be sampled (prompt + output)
    position: np.ndarray
    # (index in [0, S), token ids that must not be sampled): EOS and stop ids before min_tokens, bad words of one token,
    # and the last token of each longer bad word if the output ends with the other tokens of the bad word
    suppressed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    rules: tuple[tuple[int, TokenRules], ...] = ()  # (index in [0, S), its rules)
    penalties: Penalties | None = None
    # (index in [0, S), its grammar); the sampler computes the masks after the forward pass is launched
    grammars: tuple[tuple[int, TokenMask], ...] = ()
    # (index in [0, S), number of most likely ids to return)
    logprobs: tuple[tuple[int, int], ...] = ()
    # [S] int64, rows of the request table for which the device keeps the sampled token; empty: it keeps none
    rows: np.ndarray = _NO_ROWS
    # None: no row has a draft, so the rows are unique.
    drafts: Drafts | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes its most likely token."""
        return not self.columns["temperature"].any()

    @property
    def is_plain(self) -> bool:
        """Whether no row needs more than its limits (`sampling_record.LIMITS`) and noise."""
        return not (
            self.suppressed
            or self.rules
            or self.grammars
            or self.logprobs
            or self.penalties is not None
        )


_NO_SAVES = np.empty((0, 3), np.int64)
_NO_SAVES.setflags(write=False)


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """n consecutive tokens of one row's prompt that need a log-probability."""

    # Row of the request table.
    row: int
    # Flat index of the hidden state that predicts the first token; the hidden states for the other tokens follow it.
    begin: int
    # Position of the first token in the prompt.
    start: int
    token_ids: np.ndarray  # [n] int64
    # Number of most likely ids to return.
    num_top: int


@dataclass(frozen=True, slots=True)
class PoolTargets:
    """Consecutive tokens of one row's prompt with hidden states that are summed for an embedding."""

    # Row of the request table.
    row: int
    # Flat indices [begin, end) of the hidden states.
    begin: int
    end: int
    # Number of leading tokens of the prompt that are computed after this step.
    num_computed: int
    # Whether these are the last tokens of the prompt.
    is_last: bool


class BlockTables(NamedTuple):
    """The block tables of a step's rows, in a larger array; 0 where a row has no block.

    A step on the CPU copies them. A GPU has a table of its own, which `StepPlan.changes` keep up to date.
    """

    tables: (
        np.ndarray
    )  # [G, R, max blocks] int32, for G layer groups: the request table's own array
    rows: np.ndarray  # [n] int64 in [0, R)
    width: int  # number of blocks of the longest row

    @classmethod
    def of(cls, tables: np.ndarray) -> BlockTables:
        """All of [G, n, width] int32, for a plan made without a request table."""
        return cls(tables, np.arange(tables.shape[1]), tables.shape[2])

    def gather(self) -> np.ndarray:
        """Copy the rows' tables, [G, n, width] int32."""
        return np.ascontiguousarray(self.tables[:, self.rows, : self.width])


class StepPlan(NamedTuple):
    """One step for the runner: n rows, T tokens. `block_tables` is valid until the request table changes."""

    # Number of the step, counted from 1.
    step: int
    # [T] int32. -1 - r stands for the token that was last sampled for row r of the request table. The device keeps it;
    # the host may not know it yet.
    token_ids: np.ndarray
    positions: np.ndarray  # [T] int32, absolute position of each token in its sequence
    cu_q: np.ndarray  # [n + 1] int32, row i owns tokens [cu_q[i], cu_q[i + 1])
    num_sampled: (
        np.ndarray
    )  # [n] int32, a token is sampled after each of the row's last `num_sampled` tokens
    kv_len: np.ndarray  # [n] int32, tokens in the cache after this step
    block_tables: BlockTables
    # [G, T] int64, block_id * block_size + offset: where each token's KV is written
    slots: np.ndarray
    sampling: SamplingBatch
    # (from, to) device blocks that are copied before the step: a fork's copy of its parent's last prompt block.
    copies: tuple[tuple[int, int], ...] = ()
    prompts: tuple[PromptTargets, ...] = ()
    pooling: tuple[PoolTargets, ...] = ()
    # Blocks that are copied between device and host memory before `copies`: first the saves, then the restores.
    saves: np.ndarray = _NO_PAIRS  # [k, 2] int64, (device block, host block)
    restores: np.ndarray = _NO_PAIRS  # [k, 2] int64, (host block, device block)
    # Snapshots of recurrent states: copies between slots before the step, in this order, and those taken during it. A
    # row's slot has the number of the row; slots in host memory have the highest numbers.
    state_copies: np.ndarray = _NO_PAIRS  # [k, 2] int64, (from, to)
    # [k, 3] int64, (index of the row in the step, number of its tokens in the step before the snapshot, slot)
    state_saves: np.ndarray = _NO_SAVES
    # Whether the step uses blocks restored by this step or an earlier one that may not have arrived.
    uses_restores: bool = True
    # A hint for graphs, and for measuring speed: the first rows of the step have one token each, which is the one that
    # was last sampled for them.
    num_decode_rows: int = 0
    # [n] int64, rows of the request table; empty: the plan was made without a request table
    rows: np.ndarray = _NO_ROWS
    # Changes of the request table since the plan before.
    changes: TableChanges = NO_CHANGES
    # Whether `sampling` is incomplete, because the ids that some row may sample depend on its token in the step in
    # flight (launched, not yet committed). `Scheduler.complete` adds the rest after that step is committed. The forward
    # pass does not need it.
    awaits_tokens: bool = False
    # [n] int32, the adapter slot of each row, 0 without an adapter; empty: no row has one.
    adapters: np.ndarray = NO_SLOTS
    # Slots that get an adapter before the step.
    adapter_loads: tuple[AdapterLoad, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.kv_len)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_scheduled(self) -> np.ndarray:
        """[n] int32, number of tokens of each row."""
        return np.diff(self.cu_q)

    @property
    def token_adapters(self) -> np.ndarray:
        """[T] int32, the adapter slot of each token; empty: no row has an adapter."""
        return np.repeat(self.adapters, self.num_scheduled) if len(self.adapters) else NO_SLOTS

    def written_blocks(self, block_size: int) -> np.ndarray:
        """The blocks that the step's tokens and `copies` write to, [m] int64, each once."""
        targets = np.array([target for _, target in self.copies], np.int64)
        return np.unique(np.concatenate([self.slots.ravel() // block_size, targets]))


class CopiesDone(NamedTuple):
    """Copies between device and host memory that have ended since the last report.

    The defaults are those of copies that end with their step.
    """

    # (number of blocks, seconds) of each copy from host memory.
    restores: tuple[tuple[int, float], ...] = ()
    # The copies from host memory of the steps up to this number have arrived; None: the copies of all steps have.
    restored_step: int | None = None
    # Host blocks that have been copied to host memory; None: those of the step that has just ended.
    saved: tuple[int, ...] | None = None
    # Whether no other copy is queued.
    are_all: bool = True


_WITH_THE_STEP = CopiesDone()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step."""

    # [S] int64, the samples of `StepPlan.sampling`, in their order; NO_TOKEN if the constraints exclude every id
    token_ids: np.ndarray
    # Seconds from the step's launch until its tokens are on the host, without the copies between the tiers before it.
    duration_s: float
    # Index in [0, S) to the log-probability of the token, for rows that requested it.
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    # Log-probabilities of prompt tokens, aligned with `StepPlan.prompts`.
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    # Sums of hidden states, [hidden size] float64 each, aligned with `StepPlan.pooling`.
    pooled: tuple[np.ndarray, ...] = ()
    copies: CopiesDone = _WITH_THE_STEP

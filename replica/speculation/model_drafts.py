"""Drafts by a second model, whose keys and values are in blocks with the ids of the requests' own blocks.

```
 blocks of a request   7           12          3
 pool of the target    [ a b c d ] [ e f g h ] [ i . . . ]      i is the newest token
 pool of the draft     [ a b c d ] [ e f g h ] [ i x y . ]      x y z is the draft: x and y are computed to find y and z
                         └ num_computed ┘└─ the next step computes these, then one token after the other
```

The draft model computes what it has not computed yet of each request, then it drafts one token in each step. It follows
the request's block table, so it needs no allocator, and it never writes outside of the request's blocks. Its pool is a
tensor of its own: its content changes no answer, only the number of accepted tokens.

The target's blocks also arrive by prefix hits, forks, copies from the host tier and adoption, which bring nothing to
the pool of the draft. Therefore `_content` names the tokens that each of its blocks holds. A request uses a block if
the block holds its own tokens, and computes it otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np

from quire.replica.config import EngineConfig
from quire.replica.core.draft_source import Reserve
from quire.replica.core.request import Request
from quire.replica.core.step_plan import StepPlan
from quire.replica.core.table_changes import NO_CHANGES, TableChanges
from quire.replica.speculation.draft_steps import DraftRunner, greedy_plan, run_chain
from quire.replica.speculation.measured_lengths import MeasuredLengths

logger = logging.getLogger(__name__)

_NO_TOKENS = np.empty(0, np.int32)


class DraftLengths(Protocol):
    """The interface of `MeasuredLengths`."""

    def choose(self, num_rows: int) -> tuple[int, int]: ...

    def observe(self, num_drafted: int, num_accepted: int) -> None: ...

    def observe_step(self, num_rows: int, num_drafted: int, duration_s: float) -> None: ...

    def observe_draft(self, step_s: float) -> None: ...


class _Row:
    """What the draft model has computed of one request, and what it computes for the next draft."""

    def __init__(self, request: Request):
        self.request = request
        # Number of leading tokens with keys and values in `blocks`.
        self.num_computed = 0
        self.blocks = _NO_TOKENS  # [m] int32
        # Number of leading blocks that the draft runner's copy of the block table has.
        self.num_sent = 0
        # For each full block a number that stands for the tokens up to its end.
        self.digests: list[int] = []
        # The last draft, all but its last token computed, and the request's length then.
        self.drafted = _NO_TOKENS
        self.length = 0
        # The next draft has `count` tokens; before, the tokens up to `end` are computed.
        self.count = 0
        self.end = 0

    @property
    def num_missing(self) -> int:
        return self.length - self.num_computed

    def advance(self, block_size: int) -> None:
        """Take over the request's newest tokens. The drafted ones among them are computed."""
        tokens = self.request.token_ids
        new = tokens[self.length :][: max(0, len(self.drafted) - 1)]
        is_wrong = new != self.drafted[: len(new)]
        self.num_computed += int(is_wrong.argmax()) if is_wrong.any() else len(new)
        self.drafted, self.length = _NO_TOKENS, len(tokens)
        # The last token is computed in any case, because the first drafted one follows from it.
        self.num_computed = min(self.num_computed, self.length - 1)
        for i in range(len(self.digests), self.length // block_size):
            before = self.digests[-1] if i else hash(self.request.chain.tenant)
            block = tokens[i * block_size : (i + 1) * block_size]
            self.digests.append(hash((before, block.tobytes())))

    def move(self, blocks: np.ndarray, content: dict[int, int], block_size: int) -> None:
        """Use these blocks from now on. Tokens in other blocks than before count as computed if `content` has them."""
        common = min(len(blocks), len(self.blocks))
        is_other = blocks[:common] != self.blocks[:common]
        num_same = int(is_other.argmax()) if is_other.any() else common
        self.num_sent = min(self.num_sent, num_same)
        self.num_computed = min(self.num_computed, num_same * block_size)
        self.blocks = blocks
        i, rest = divmod(self.num_computed, block_size)
        if rest:
            return
        while (i + 1) * block_size < self.length and (
            content.get(int(blocks[i])) == self.digests[i]
        ):
            i += 1
        self.num_computed = i * block_size


class ModelSource:
    """A `DraftSource`: the likeliest tokens of a second model, as many as pay.

    Parameters
    ----------
    config
        The configuration of the engine, whose step limits also bound the work for one draft.
    runner
        Runs the draft model. Requests longer than its `max_model_len` get no drafts.
    lengths
        Chooses how many tokens to draft; None: by what it measures.
    clock
        Seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: DraftRunner,
        lengths: DraftLengths | None = None,
        clock: Callable[[], float] = perf_counter,
    ):
        max_tokens = config.speculation.max_draft_tokens
        self._lengths = MeasuredLengths(max_tokens) if lengths is None else lengths
        self._clock = clock
        self._has_failed = False
        self._step_tokens = config.max_batch_tokens
        self._block_size = config.block_size
        self._runner = runner
        self._max_len = runner.config.max_model_len
        self._max_blocks = runner.config.max_row_blocks
        self._reserve: Reserve | None = None
        self._rows: dict[Hashable, _Row] = {}
        # By block: the digest of the tokens whose keys and values it holds. Other blocks hold anything.
        self._content: dict[int, int] = {}

    def attach(self, reserve: Reserve) -> None:
        self._reserve = reserve

    def propose(self, requests: Sequence[Request], room: int) -> list[np.ndarray]:
        length = num_rows = 0
        if requests and not self._has_failed:
            length, num_rows = self._lengths.choose(len(requests))
        if not length:
            return [_NO_TOKENS] * len(requests)
        num_rows = min(num_rows, room)
        length = min(length, room // num_rows)
        rows = [self._row(request, length) for request in requests[:num_rows]]
        chosen = self._choose([row for row in rows if row is not None])
        try:
            if chosen:
                self._draft(chosen)
        except Exception:
            logger.exception(
                "the draft model failed; there are no drafts until the engine starts again"
            )
            self._has_failed = True
            return [_NO_TOKENS] * len(requests)
        drafts = [_NO_TOKENS if row is None else row.drafted for row in rows]
        return drafts + [_NO_TOKENS] * (len(requests) - len(rows))

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self._lengths.observe(num_drafted, num_accepted)

    def observe_step(self, num_rows: int, num_drafted: int, duration_s: float) -> None:
        self._lengths.observe_step(num_rows, num_drafted, duration_s)

    def end(self, request: Request) -> None:
        self._rows.pop(request.key, None)

    def _row(self, request: Request, most: int) -> _Row | None:
        """The row of a request with the length of its next draft; None if it gets no draft."""
        length = request.num_tokens
        most = min(most, request.run_length - length - 1, self._max_len - length)
        if most <= 0:
            return None
        row = self._rows.get(request.key)
        if row is None:
            row = self._rows[request.key] = _Row(request)
        row.advance(self._block_size)
        assert self._reserve is not None
        blocks = self._reserve(request, most)[: self._max_blocks]
        row.move(blocks, self._content, self._block_size)
        # The draft's last token is not computed.
        row.count = min(most, len(blocks) * self._block_size - length + 1)
        return row

    def _choose(self, rows: list[_Row]) -> list[_Row]:
        """The rows that compute, with their `end`. Those that lack least come first, so a long prompt delays none."""
        left, chosen = self._step_tokens, []
        for row in sorted(rows, key=lambda row: row.num_missing):
            row.end = min(row.length, row.num_computed + left)
            if row.end < row.length:
                row.count = 0
            if row.end > row.num_computed:
                chosen.append(row)
                left -= row.end - row.num_computed
        # Rows with longer drafts first: each step of one token has the first ones of the step before.
        return sorted(chosen, key=lambda row: -row.count)

    def _draft(self, rows: list[_Row]) -> None:
        """Compute the missing tokens of all rows in one step, then draft for those that lack no more."""
        for row in rows:
            self._begin_writes(row)
        began_s, num_missing = self._clock(), sum(row.end - row.num_computed for row in rows)
        drafted = np.zeros((len(rows), max(1, rows[0].count)), np.int32)
        for k, tokens in enumerate(run_chain(self._runner, self._plans(rows))):
            drafted[: len(tokens), k] = tokens
        if num_missing <= 2 * len(rows):  # as after each draft
            self._lengths.observe_draft((self._clock() - began_s) / drafted.shape[1])
        for row, tokens in zip(rows, drafted, strict=True):
            self._end_writes(row)
            row.drafted = tokens[: row.count]

    def _plans(self, rows: list[_Row]) -> Iterator[StepPlan]:
        """A step with the missing tokens of all rows, then steps with one token of each row that drafts more."""
        ids = np.array([row.request.row for row in rows])
        tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), np.int32)
        for i, row in enumerate(rows):
            tables[i, : len(row.blocks)] = row.blocks
        spans = [row.request.token_ids[row.num_computed : row.end] for row in rows]
        starts = np.array([row.num_computed for row in rows])
        yield greedy_plan(ids, starts, spans, tables, self._block_size, self._send_blocks(rows))
        lengths = np.array([row.length for row in rows])
        counts = np.array([row.count for row in rows])
        for k in range(1, rows[0].count):
            n = np.count_nonzero(counts > k)
            starts = lengths[:n] + k - 1
            yield greedy_plan(ids[:n], starts, None, tables[:n], self._block_size)

    def _send_blocks(self, rows: list[_Row]) -> TableChanges:
        """The entries of the rows' block tables that the draft runner's copy of them lacks."""
        places, blocks = [], []
        for row in rows:
            begin, end = row.num_sent, len(row.blocks)
            if begin < end:
                places.append(row.request.row * self._max_blocks + np.arange(begin, end))
                blocks.append(row.blocks[begin:])
            row.num_sent = end
        if not places:
            return NO_CHANGES
        return TableChanges(((0, np.concatenate(places), np.concatenate(blocks)),))

    def _begin_writes(self, row: _Row) -> None:
        """Forget the content of the blocks that the row writes to."""
        first, end = row.num_computed // self._block_size, row.end + max(0, row.count - 1)
        for block in row.blocks[first : -(-end // self._block_size)].tolist():
            self._content.pop(block, None)

    def _end_writes(self, row: _Row) -> None:
        """Count the row's tokens up to `end` as computed."""
        first, end = row.num_computed // self._block_size, row.end // self._block_size
        self._content |= zip(row.blocks[first:end].tolist(), row.digests[first:end], strict=True)
        row.num_computed = row.end

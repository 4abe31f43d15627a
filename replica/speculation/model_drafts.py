"""Drafts by a second model, whose keys and values are in blocks with the ids of the requests' own blocks.

```
 blocks of a request   7           12          3
 pool of the target    [ a b c d ] [ e f g h ] [ i . . . ]      i is the newest token
 pool of the draft     [ a b c d ] [ e f g h ] [ i x y . ]      x y z is the draft: x and y are computed to find y and z
                         └ num_computed ┘└─ the next step computes these, then one token after the other
```

The draft model computes what it has not computed yet of each request, then it drafts one token in each step. It follows
the request's block table, so it needs no allocator, and it never writes outside of the request's blocks. Its pool is a
tensor of its own: whatever is in it, answers stay the same, and only the number of accepted tokens changes.

The target's blocks also arrive by prefix hits, forks, copies from the host tier and adoption, which bring nothing to
the pool of the draft. Therefore `_content` names the tokens that each of its blocks holds. A request uses a block if
the block holds its own tokens, and computes it otherwise.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from quire.replica.config import EngineConfig
from quire.replica.core.draft_source import Reserve
from quire.replica.core.request import Request
from quire.replica.core.sampling_record import records
from quire.replica.core.step_plan import BlockTables, SamplingBatch, StepPlan, StepResult

_NO_TOKENS = np.empty(0, np.int32)


class DraftRunner(Protocol):
    """The runner of the draft model. Its pool has as many blocks as the engine's, of the same number of tokens."""

    config: EngineConfig

    def run(self, plan: StepPlan) -> StepResult: ...


class _Row:
    """What the draft model has computed of one request, and what it computes for the next draft."""

    def __init__(self, request: Request):
        self.request = request
        # Number of leading tokens with keys and values in `blocks`.
        self.num_computed = 0
        self.blocks = _NO_TOKENS  # [m] int32
        # For each full block a number that stands for the tokens up to its end.
        self.digests: list[int] = []
        # The last draft, all but its last token computed, and the request's length then.
        self.drafted = _NO_TOKENS
        self.length = 0
        # The next draft has this many tokens, once the tokens up to `end` are computed.
        self.count = 0
        self.end = 0

    @property
    def num_missing(self) -> int:
        return self.length - self.num_computed

    def advance(self, block_size: int) -> None:
        """Take over the request's newest tokens. The drafted ones among them are computed."""
        tokens = self.request.token_ids
        new = tokens[self.length :][: len(self.drafted) - 1] if len(self.drafted) else _NO_TOKENS
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
        """Go on with these blocks: as far as they are those of before, and then as far as they hold its tokens."""
        used = -(-self.num_computed // block_size)
        is_other = blocks[:used] != self.blocks[:used]
        if is_other.any():
            self.num_computed = int(is_other.argmax()) * block_size
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
    """A `DraftSource`: the likeliest tokens of a second model, `max_draft_tokens` of them where there is room.

    Parameters
    ----------
    config
        The configuration of the engine, whose step limits also bound the work for one draft.
    runner
        Runs the draft model. Requests longer than its `max_model_len` get no drafts.
    """

    def __init__(self, config: EngineConfig, runner: DraftRunner):
        self._max_tokens = config.speculation.max_draft_tokens
        self._step_tokens = config.max_batch_tokens
        self._block_size = config.block_size
        self._runner = runner
        self._max_len = runner.config.max_model_len
        self._reserve: Reserve | None = None
        self._rows: dict[Hashable, _Row] = {}
        # By block: the digest of the tokens whose keys and values it holds. Other blocks hold anything.
        self._content: dict[int, int] = {}
        self._num_steps = 0

    def attach(self, reserve: Reserve) -> None:
        self._reserve = reserve

    def propose(self, requests: Sequence[Request], room: int) -> list[np.ndarray]:
        share = max(1, room // max(1, len(requests)))
        rows = [self._row(request, share) for request in requests[:room]]
        chosen = self._choose([row for row in rows if row is not None])
        if chosen:
            self._draft(chosen)
        drafts = [_NO_TOKENS if row is None else row.drafted for row in rows]
        return drafts + [_NO_TOKENS] * (len(requests) - len(rows))

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        pass

    def observe_step(self, num_rows: int, num_drafted: int, duration_s: float) -> None:
        pass

    def end(self, request: Request) -> None:
        self._rows.pop(request.key, None)

    def _row(self, request: Request, most: int) -> _Row | None:
        """The row of a request with the length of its next draft; None if it gets no draft."""
        length = request.num_tokens
        most = min(most, self._max_tokens, request.run_length - length - 1, self._max_len - length)
        if most <= 0:
            return None
        row = self._rows.get(request.key)
        if row is None:
            row = self._rows[request.key] = _Row(request)
        row.advance(self._block_size)
        assert self._reserve is not None
        row.move(self._reserve(request, most), self._content, self._block_size)
        # The draft's last token is not computed.
        row.count = min(most, len(row.blocks) * self._block_size - length + 1)
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
        tables = np.zeros((len(rows), max(len(row.blocks) for row in rows)), np.int32)
        for i, row in enumerate(rows):
            tables[i, : len(row.blocks)] = row.blocks
            self._begin_writes(row)
        starts = np.array([row.num_computed for row in rows])
        spans = [row.request.token_ids[row.num_computed : row.end] for row in rows]
        tokens = self._next_tokens(spans, starts, tables)
        for row in rows:
            self._end_writes(row)
        counts = np.array([row.count for row in rows])
        lengths = np.array([row.length for row in rows])
        drafted = np.zeros((len(rows), max(1, counts.max())), np.int32)
        drafted[:, 0] = tokens
        for k in range(1, counts.max()):
            n = int(np.count_nonzero(counts > k))
            before = drafted[:n, k - 1 : k]
            drafted[:n, k] = self._next_tokens(list(before), lengths[:n] + k - 1, tables[:n])
        for row, tokens in zip(rows, drafted, strict=True):
            row.drafted = tokens[: row.count]

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

    def _next_tokens(
        self, spans: Sequence[np.ndarray], starts: np.ndarray, tables: np.ndarray
    ) -> np.ndarray:
        """Compute tokens of n rows in one step of the draft model; returns the likeliest next ones, [n] int64.

        Parameters
        ----------
        spans, starts
            [at least 1] int32 tokens of each row, and [n] the position of the first.
        tables
            [n, blocks] int32.
        """
        self._num_steps += 1
        num_scheduled = np.array([len(span) for span in spans])
        cu_q = np.concatenate([[0], np.cumsum(num_scheduled)]).astype(np.int32)
        kv_len = (starts + num_scheduled).astype(np.int32)
        row = np.repeat(np.arange(len(spans)), num_scheduled)
        positions = np.arange(cu_q[-1]) + (starts - cu_q[:-1])[row]
        blocks = tables[row, positions // self._block_size].astype(np.int64)
        width = -(-int(kv_len.max()) // self._block_size)
        plan = StepPlan(
            step=self._num_steps,
            token_ids=np.concatenate(spans).astype(np.int32),
            positions=positions.astype(np.int32),
            cu_q=cu_q,
            num_sampled=np.ones(len(spans), np.int32),
            kv_len=kv_len,
            block_tables=BlockTables.of(tables[None, :, :width]),
            slots=(blocks * self._block_size + positions % self._block_size)[None],
            sampling=SamplingBatch(
                token_index=cu_q[1:] - 1,
                columns=records(len(spans), temperature=0.0),
                position=kv_len.astype(np.int64),
            ),
        )
        return self._runner.run(plan).token_ids

"""Which decoding rows get a draft in a step, and what is known once the step has verified it.

```
 step n      [ newest | d0 d1 d2 ]       d0 is right, d1 is not: the row gains two tokens, d0 and the one drawn after it
 commit n    length + 2; the KV of d0 is kept, that of d1 and d2 is overwritten
 step n + 1                              planned before commit n: the row is left out, its length is not known
```

A draft needs no preemption: it is cut where blocks, budget or grammar end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.replica.config import EngineConfig
from quire.replica.core.draft_source import DraftSource
from quire.replica.core.request import Request
from quire.replica.kv_cache.blocks import BlockManager
from quire.replica.request_table.decode_rows import DecodeRows, Draft
from quire.replica.request_table.rows import RowTable


class Drafting:
    """Gives drafts to decoding rows.

    Parameters
    ----------
    rows, blocks
        The request table, and the owners of the device's blocks.
    source
        Proposes the drafts. None: there are none. Recurrent models get none, because their states cannot go back.
    """

    # If at least this share of the decoding rows has a draft in flight, the next step is planned after the commit: a
    # step without these rows would delay them more than the pause of the device delays the others.
    LOCKSTEP_SHARE = 0.1

    def __init__(
        self,
        config: EngineConfig,
        rows: RowTable,
        blocks: BlockManager,
        source: DraftSource | None,
    ):
        self._vocab_size = config.vocab_size
        self._rows = rows
        self._blocks = blocks
        self._source = None if config.has_states else source
        self.is_on = self._source is not None
        if self._source is not None:
            self._source.attach(self._reserve)

    def waits(self) -> bool:
        """Whether so many rows have a draft in flight that the next step should be planned after the commit."""
        if self._source is None:
            return False
        num_verified = np.count_nonzero(self._rows.num_drafted)
        num_decoding = np.count_nonzero(self._rows.decoding)
        return bool(0 < self.LOCKSTEP_SHARE * num_decoding <= num_verified)

    def choose(self, decodes: DecodeRows, room: int) -> list[Draft]:
        """The drafts of a step with these rows: at most `room` drafted tokens, for which the rows have blocks."""
        source, table = self._source, self._rows
        if source is None or room <= 0 or not len(decodes):
            return []
        rows = decodes.ids.tolist()
        for row in rows:
            table.flush(row)
        requests = [table.request(row) for row in rows]
        drafts = []
        proposals = source.propose(requests, room)
        for row, request, proposed in zip(rows, requests, proposals, strict=True):
            if room and len(proposed):
                token_ids = self._cut(row, request, np.asarray(proposed, np.int32), room)
                if len(token_ids):
                    start = int(table.num_computed[row])
                    drafts.append(Draft(row, int(table.owners[row]), start, token_ids))
                    room -= len(token_ids)
        return drafts

    def _cut(self, row: int, request: Request, token_ids: np.ndarray, room: int) -> np.ndarray:
        """The leading tokens of a proposal that the step can verify."""
        table, start = self._rows, int(self._rows.num_computed[row])
        # The step samples one token more than the draft has.
        most = min(room, int(table.run_length[row]) - start - 2)
        if start == table.length[row]:
            # The step in flight samples the row's newest token; the first proposed token stands for it.
            token_ids = token_ids[1:]
        elif request.grammar is not None:
            most = min(most, request.grammar.num_allowed(token_ids[: max(0, most)].tolist()))
        is_wrong = (token_ids < 0) | (token_ids >= self._vocab_size)
        if is_wrong.any():
            most = min(most, int(is_wrong.argmax()))
        return token_ids[: self._extend(row, start, min(most, len(token_ids)))]

    def _reserve(self, request: Request, count: int) -> np.ndarray:
        """Give a decoding request blocks for a draft of this length; the result is that of `Reserve`."""
        table, row = self._rows, request.row
        start = int(table.num_computed[row])
        self._extend(row, start, min(count, int(table.run_length[row]) - start - 2))
        return table.block_tables[0, row, : table.num_blocks[0, row]].copy()

    def _extend(self, row: int, start: int, count: int) -> int:
        """Give the row blocks for `count` tokens after its newest one; return the number of tokens that fit."""
        table, block_size = self._rows, self._rows.block_size
        if count <= 0:
            return 0
        num_owned = int(table.num_blocks[0, row])
        lacking = (start + count) // block_size + 1 - num_owned
        if lacking <= 0:
            return count
        blocks = self._blocks.allocate(lacking * len(table.groups))
        if blocks is None:
            return num_owned * block_size - 1 - start
        table.extend(row, blocks, range(len(table.groups)))
        return count

    def end(self, drafts: Sequence[Draft]) -> None:
        """Tell the source how the drafts were verified, once the new tokens of their rows are recorded.

        Afterwards only the accepted tokens of these rows, which still belong to their requests, are computed ones.
        """
        if self._source is None:
            return
        for row, _, start, token_ids in drafts:
            self._rows.flush(row)
            request, num_drafted = self._rows.request(row), len(token_ids)
            gained = request.token_ids[start + 1 :][:num_drafted]
            # All are drafted tokens, apart from the last one. Tokens after the request's end do not count.
            num_accepted = int(np.count_nonzero(gained == token_ids[: len(gained)]))
            request.num_drafted += num_drafted
            request.num_accepted += num_accepted
            self._source.observe(request, num_drafted, num_accepted)
        self._rows.end_drafts(np.array([draft.row for draft in drafts], np.int64))

    def observe_step(self, num_rows: int, drafts: Sequence[Draft], duration_s: float) -> None:
        """Tell the source how long a step of decoding rows only took."""
        if self._source is not None:
            num_drafted = sum(len(draft.token_ids) for draft in drafts)
            self._source.observe_step(num_rows, num_drafted, duration_s)

    def drop(self, request: Request) -> None:
        """Tell the source that a request leaves its row."""
        if self._source is not None:
            self._source.end(request)

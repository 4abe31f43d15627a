"""The request table: numpy columns with the data of every running request that steps need.

A request keeps its row (its slot in the table) from admission until it ends or is preempted. Work that each step does
for each decoding row is a numpy operation over columns. Python code runs for a single row only when the row fills a
block or ends. `decode_rows` returns the decoding rows as `DecodeRows`, which are reused while no row comes or goes.

```
 position of a row      0 ........ num_tokens ...... length        run_length
                        └ Request.token_ids ┘└ tail ┘
                        0 ... num_computed (their KV is written when the planned step has run)
```

`tail` holds the tokens of the block that a row is writing, prompt tokens included. The generated tokens in it are
appended to the request when the block is full, so that a single token needs no Python code.

In each layer group a row owns the blocks [first_block, num_blocks) of its table. Earlier blocks were given back when no
later query could see them. Later blocks are allocated when their tokens are scheduled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from quire.replica.core.adapter import AdapterSlots
from quire.replica.core.request import FinishReason, Request
from quire.replica.core.table_changes import TableJournal
from quire.replica.kv_cache.groups import FULL_ATTENTION, LayerGroup
from quire.replica.request_table.decode_rows import DecodeRows, Draft
from quire.replica.request_table.row_columns import RowColumns

_MAX_INT32 = 2**31 - 1


class RowTable(RowColumns):
    """Rows of running requests, as numpy columns (`RowColumns`).

    Parameters
    ----------
    max_rows
        R, the largest number of requests that can run at once.
    max_blocks
        Largest number of blocks that one request can have in a group.
    block_size
        Tokens of a block.
    vocab_size
        Token ids are in [0, vocab_size).
    groups
        G layer groups, full-attention groups first.
    num_adapter_slots
        Number of adapters that the requests in the table may have at once.
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        vocab_size: int,
        groups: Sequence[LayerGroup] = (FULL_ATTENTION,),
        num_adapter_slots: int = 0,
    ):
        super().__init__(max_rows)
        self.adapters = AdapterSlots(num_adapter_slots, max_rows)
        self.block_size = block_size
        self.groups = tuple(groups)
        # Indices of the groups that give blocks back when these fall out of the window or the attention chunk.
        self.sliding = [g for g, group in enumerate(groups) if not group.is_full]
        self.requests: list[Request | None] = [None] * max_rows
        self._num_owners = 0
        num_groups = len(self.groups)
        self.first_block = np.zeros((num_groups, max_rows), dtype=np.int32)  # [G, R]
        self.num_blocks = np.zeros((num_groups, max_rows), dtype=np.int32)  # [G, R]
        # [G, R + 1, max_blocks]; the last row never has a request: devices use it to pad steps
        self.block_tables = np.zeros((num_groups, max_rows + 1, max_blocks), dtype=np.int32)
        self.flat_tables = self.block_tables.reshape(num_groups, -1)  # [G, (R + 1) * max_blocks]
        # [R, block_size] token at position % block_size of the block that the row is writing
        self._tail = np.zeros((max_rows, block_size), dtype=np.int32)
        self._flat_tail = self._tail.reshape(-1)
        self._num_enders = np.zeros(vocab_size, dtype=np.int32)  # [vocab] rows that end on this id
        self._free = list(range(max_rows - 1, -1, -1))
        # Last result of `decode_rows`; None: the set of decoding rows has changed since.
        self._decode_rows: DecodeRows | None = None
        self.journal = TableJournal()  # changes since the last plan
        self.num_decode_tokens = 0  # total number of computed tokens of the decoding rows
        self.num_missing_tokens = 0  # total number of tokens that the prefilling rows still lack

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return len(self.requests) - len(self._free)

    def claim(self, request: Request, blocks: Sequence[Sequence[int]], num_computed: int) -> int:
        """Give a request a row; its first `num_computed` tokens are computed.

        Parameters
        ----------
        blocks
            For each group the request's blocks, starting with the first one that the next token sees.
        """
        row = self._free.pop()
        request.row = row
        self.requests[row] = request
        self.write(row, request)
        self.adapters.take(request.adapter, row)
        self._num_owners += 1
        self.owners[row] = self._num_owners
        self.num_computed[row] = num_computed
        self._num_enders[list(request.stop_ids)] += 1
        for g, (group, own) in enumerate(zip(self.groups, blocks, strict=True)):
            first = int(group.first_key(num_computed)) // self.block_size
            self.first_block[g, row] = first
            self.num_blocks[g, row] = first + len(own)
            self.block_tables[g, row, first : first + len(own)] = own
            self._journal_span(g, row, first, first + len(own))
        self.journal.claim(row)
        full = request.num_tokens - request.num_tokens % self.block_size
        self._tail[row, : request.num_tokens - full] = request.token_ids[full:]
        self.num_missing_tokens += request.num_tokens - num_computed
        return row

    def begin_decoding(self, rows: np.ndarray) -> None:
        """Let prefilling rows that have sampled their first token decode."""
        self.decoding[rows] = True
        self._decode_rows = None
        self.num_decode_tokens += int(self.num_computed[rows].sum())

    def set_run_length(self, row: int, run_length: int) -> None:
        """Change the length at which the row ends or pauses."""
        self.run_length[row] = run_length
        self._decode_rows = None

    def set_paused(self, row: int, paused: bool) -> None:
        """Leave the row out of later steps, or let it take part again."""
        self.paused[row] = paused
        self._decode_rows = None

    def vacate(self, row: int) -> list[int]:
        """Free the row, and append its newest tokens to its request.

        Returns
        -------
        The row's blocks in the order of the sequence; for the same tokens, the blocks of full-attention groups come
        first. If they are released in reverse, each block is evicted before the blocks that are needed to find it.
        """
        self.flush(row)
        request = self.request(row)
        blocks = self.blocks(row)
        if self.decoding[row]:
            self._decode_rows = None
            self.num_decode_tokens -= int(self.num_computed[row])
        else:
            self.num_missing_tokens -= int(self.length[row] - self.num_computed[row])
        request.row = -1
        self.adapters.release(row)
        self.requests[row] = None
        self.keys[row] = None
        self.active[row] = False
        self.owners[row] = 0
        self.decoding[row] = False
        self._num_enders[list(request.stop_ids)] -= 1
        self.block_tables[:, row, : self.num_blocks[:, row].max()] = 0
        self.first_block[:, row] = self.num_blocks[:, row] = 0
        self._free.append(row)
        return blocks

    def request(self, row: int) -> Request:
        request = self.requests[row]
        if request is None:
            raise ValueError(f"row {row} has no request")
        return request

    def blocks(self, row: int) -> list[int]:
        """The row's blocks in the order of the sequence; for the same tokens, full-attention groups come first."""
        if len(self.groups) == 1:
            first, end = self.first_block[0, row], self.num_blocks[0, row]
            blocks: list[int] = self.block_tables[0, row, first:end].tolist()
            return blocks
        end = int(self.num_blocks[:, row].max())
        index = np.arange(end)[:, None]
        owned = (index >= self.first_block[:, row]) & (index < self.num_blocks[:, row])
        blocks = self.block_tables[:, row, :end].T[owned].tolist()
        return blocks

    def flush(self, row: int) -> None:
        """Append the row's newest tokens, which are all in one block, to its request."""
        request = self.request(row)
        count = int(self.length[row]) - request.num_tokens
        if count:
            start = request.num_tokens % self.block_size
            request.append(self._tail[row, start : start + count].tobytes())

    def newest_output(self, row: int, count: int) -> tuple[int, ...]:
        """The last `count` tokens of the row's output; fewer if the output is shorter."""
        request = self.request(row)
        length = int(self.length[row])
        start = max(length - count, int(self.num_prompt_tokens[row]))
        in_tail = np.arange(max(start, request.num_tokens), length) % self.block_size
        return (*request.token_ids[start:].tolist(), *self._tail[row, in_tail].tolist())

    # -- planning ----------------------------------------------------------------------------------------

    def decode_rows(self) -> DecodeRows:
        """The rows that decode, are not paused and have no draft in flight, with their current positions."""
        decodes = self._decode_rows
        if decodes is None or (decodes.is_located and decodes.num_left <= 0):
            # Not after their last token, even if it is in flight.
            is_short = self.num_computed + 1 < self.run_length
            is_known = self.num_drafted == 0
            ids = np.flatnonzero(self.decoding & ~self.paused & is_short & is_known)
            decodes = self._decode_rows = self._gather(ids)
        if not decodes.is_located:
            decodes.locate(self.num_computed[decodes.ids])
        return decodes

    def some_decode_rows(self, rows: Sequence[int] | np.ndarray) -> DecodeRows:
        """These decoding rows, for a step that leaves out the others."""
        decodes = self._gather(np.asarray(rows, np.int64))
        decodes.locate(self.num_computed[decodes.ids])
        return decodes

    def _gather(self, ids: np.ndarray) -> DecodeRows:
        columns = self.gather(ids)
        return DecodeRows(
            block_size=self.block_size,
            ids=ids,
            columns=columns,
            token_ids=(-1 - ids).astype(np.int32),
            cu_q=np.arange(len(ids) + 1, dtype=np.int32),
            num_sampled=np.ones(len(ids), np.int32),
            table_begin=ids * self.block_tables.shape[2],
            is_plain=not (
                self.is_special[ids] | (self.min_length[ids] > columns.num_prompt_tokens)
            ).any(),
        )

    @property
    def current_decodes(self) -> DecodeRows | None:
        """The last result of `decode_rows`; None if the set of decoding rows has changed since."""
        return self._decode_rows

    def are_unchanged(self, decodes: DecodeRows) -> bool:
        """Whether the set of decoding rows is the same as when `decode_rows` returned `decodes`."""
        return self._decode_rows is decodes

    def lacking_block(self, decodes: DecodeRows) -> np.ndarray:
        """The rows without a block for their next token, [n] int64 in [0, D)."""
        begun = decodes.begun
        if not len(begun):
            return begun
        # A decoding row has the same number of blocks in every group.
        lacks = self.num_blocks[0, decodes.ids[begun]] <= decodes.begun_index
        return begun if np.count_nonzero(lacks) == len(begun) else begun[lacks]

    def fill_blocks(
        self, rows: np.ndarray, index: np.ndarray
    ) -> Iterator[tuple[int, Request, int, list[int], bytes]]:
        """Append the newest tokens of rows with a block that is now full to the rows' requests.

        Parameters
        ----------
        rows, index
            [n] integers each: the rows, and the indices of the filled blocks in their tables.

        Yields
        ------
        The row, its request, the block's index in the row's tables, the block of each group, and the block's tokens
        as int32.
        """
        blocks = self.block_tables[:, rows, index].T.tolist()
        raw = self._tail[rows].tobytes()
        width = 4 * self.block_size
        requests = self.requests
        begin = 0
        for row, i, own in zip(rows.tolist(), index.tolist(), blocks, strict=True):
            token_bytes = raw[begin : begin + width]
            begin += width
            request = requests[row]
            # Number of the block's tokens that the request already has.
            known = request.num_tokens - i * self.block_size
            request.append(token_bytes[4 * known :] if known else token_bytes)
            yield row, request, i, own, token_bytes

    def append_blocks(
        self, decodes: DecodeRows, lacking: np.ndarray, blocks: Sequence[int]
    ) -> None:
        """Give rows the blocks of their next tokens.

        Parameters
        ----------
        lacking
            [n] the result of `lacking_block`: rows in [0, D) without a block for their next token.
        blocks
            [G * n] one block per group and row: first those of group 0, then those of group 1, and so on.
        """
        index = decodes.begun_index if lacking is decodes.begun else decodes.block_index(lacking)
        own = np.array(blocks, np.int32).reshape(len(self.groups), len(lacking))
        at = decodes.table_begin[lacking] + index
        self.flat_tables[:, at] = own
        self.journal.write(at, own)
        self.num_blocks[:, decodes.ids[lacking]] = index + 1

    def extend(self, row: int, blocks: Sequence[int], groups: Sequence[int]) -> None:
        """Append the same number of blocks to the row's table in each of these groups."""
        count = len(blocks) // len(groups)
        for i, g in enumerate(groups):
            end = int(self.num_blocks[g, row])
            own = blocks[i * count : (i + 1) * count]
            self.block_tables[g, row, end : end + count] = own
            self._journal_span(g, row, end, end + count)
            self.num_blocks[g, row] = end + count

    def trim(self, held: Mapping[int, int] | None = None) -> list[int]:
        """Remove the blocks that no later query of their row sees, and return them; for each row the oldest first.

        Parameters
        ----------
        held
            Row to the position of an earlier token that a fork of the row may still compute: blocks that it sees stay.
        """
        freed: list[int] = []
        if not self.sliding:
            return freed
        rows = np.flatnonzero(self.active)
        # Drafted tokens may be rejected, and the blocks of the tokens before them are indexed once they are verified.
        num_drafted = self.num_drafted[rows]
        position = self.num_computed[rows] - num_drafted - (num_drafted > 0)
        if held:
            position = np.minimum(position, [held.get(row, _MAX_INT32) for row in rows.tolist()])
        for g in self.sliding:
            first = self.groups[g].first_key(position) // self.block_size
            stale = np.flatnonzero(first > self.first_block[g, rows])
            for row, end in zip(rows[stale].tolist(), first[stale].tolist(), strict=True):
                table = self.block_tables[g, row, self.first_block[g, row] : end]
                freed += table.tolist()
                table[:] = 0
                self.first_block[g, row] = end
        return freed

    def replace_block(self, g: int, row: int, i: int, block: int) -> None:
        """Replace the block at index i in the row's table of group g by another one with the same content."""
        self.block_tables[g, row, i] = block
        self._journal_span(g, row, i, i + 1)
        if self._decode_rows is not None:
            # The block may be the one of the next token.
            self._decode_rows.slots = None

    def _journal_span(self, g: int, row: int, begin: int, end: int) -> None:
        """Record a change of the entries [begin, end) in the row's table of group g."""
        first = row * self.block_tables.shape[2]
        blocks = self.block_tables[g, row, begin:end].copy()
        self.journal.write(np.arange(first + begin, first + end), blocks, g)

    def report_again(self) -> None:
        """Report all rows in use in the next plan, because an earlier plan may not have reached the device."""
        for row in np.flatnonzero(self.active).tolist():
            for g in range(len(self.groups)):
                self._journal_span(
                    g, row, int(self.first_block[g, row]), int(self.num_blocks[g, row])
                )
            self.journal.claim(row)
        self.adapters.report_again()

    def count_computed(
        self, rows: np.ndarray, kv_len: np.ndarray, num_decode_tokens: int, num_chunk_tokens: int
    ) -> None:
        """Count the tokens of a planned step as computed.

        Parameters
        ----------
        rows, kv_len
            [n] each: the rows of the step, and the number of their tokens in the cache after it (int32).
        num_decode_tokens
            Number of tokens of decoding rows in the step.
        num_chunk_tokens
            Number of tokens in the step's prefill chunks.
        """
        self.num_computed[rows] = kv_len
        self.num_decode_tokens += num_decode_tokens
        self.num_missing_tokens -= num_chunk_tokens
        if self._decode_rows is not None:
            self._decode_rows.is_located = False

    def begin_drafts(self, drafts: Sequence[Draft]) -> None:
        """Leave rows with a planned draft out of later steps until `end_drafts`."""
        for draft in drafts:
            self.num_drafted[draft.row] = len(draft.token_ids)
        self._decode_rows = None

    # -- after the step ----------------------------------------------------------------------------------

    def end_drafts(self, rows: np.ndarray) -> None:
        """Count the rejected tokens of rows with a verified draft, whose new tokens are recorded, as not computed."""
        num_rejected = self.num_computed[rows] - (self.length[rows] - 1)
        self.num_computed[rows] -= num_rejected
        self.num_decode_tokens -= int(num_rejected.sum())
        self.num_drafted[rows] = 0
        self._decode_rows = None

    def record(
        self, rows: np.ndarray, token_ids: np.ndarray, cu: np.ndarray | None = None
    ) -> np.ndarray:
        """Append new tokens, [N] int32, to different rows, [S] (`protos.ragged`). Returns the lengths, [S] int32."""
        begin = self.length[rows]
        if cu is None:
            owners, position = rows, begin
            length: np.ndarray = begin + 1
        else:
            count = np.diff(cu)
            owners, length = np.repeat(rows, count), begin + count
            position = np.arange(len(owners)) - np.repeat(cu[:-1] - begin, count)
            # The tail holds one block, so tokens that go beyond it are appended to their request.
            for i in (begin % self.block_size + count > self.block_size).nonzero()[0].tolist():
                self.flush(rows[i])
                self.request(rows[i]).append(token_ids[cu[i] : cu[i + 1]].tobytes())
        self._flat_tail[owners * self.block_size + position % self.block_size] = token_ids
        self.length[rows] = length
        return length

    def record_decodes(self, decodes: DecodeRows, token_ids: np.ndarray) -> np.ndarray:
        """Fast path of `record` for a step of these decoding rows only, if each still belongs to its request."""
        self._flat_tail[decodes.tail_index] = token_ids
        self.length[decodes.ids] = decodes.length
        return decodes.length

    def ended(
        self,
        rows: np.ndarray,
        token_ids: np.ndarray,
        length: np.ndarray,
        decodes: DecodeRows | None = None,
    ) -> dict[int, FinishReason]:
        """Find the rows that end with their new tokens, and advance grammars; call it once for each token.

        The arguments are [N] each: each token's row, the token, and the row's length with it. Tokens of a row are in
        order; those after its end have no effect. `decodes` are the rows, if `record_decodes` recorded them. Returns
        the index of each row's last token and the reason; LENGTH also if the row only pauses, its credit being spent.
        """
        reasons: dict[int, FinishReason] = {}
        if decodes is None or decodes.num_left <= 0:
            full = (length >= self.run_length[rows]).nonzero()[0]
            reasons = dict.fromkeys(full.tolist(), FinishReason.LENGTH)
        # Few rows have an id that ends any running request; `count_nonzero` is the cheapest test for "any".
        enders = self._num_enders[token_ids]
        if np.count_nonzero(enders):
            for i in enders.nonzero()[0].tolist():
                row, token_id = int(rows[i]), int(token_ids[i])
                if length[i] > self.min_length[row] and token_id in self.request(row).stop_ids:
                    reasons[i] = FinishReason.STOP
        ends: dict[int, int] = {}  # row to its first end
        for i in reasons:
            ends[int(rows[i])] = min(i, ends.get(int(rows[i]), i))
        if decodes is None or not decodes.is_plain:
            for i in self.has_grammar[rows].nonzero()[0].tolist():
                row = int(rows[i])
                grammar, has_ended = self.request(row).grammar, ends.get(row, i) < i
                if grammar is not None and not has_ended and grammar.advance(int(token_ids[i])):
                    # The grammar allows no further token, so the request ends even if it ignores EOS.
                    reasons[i] = FinishReason.STOP
                    ends[row] = i
        return {i: reasons[i] for i in ends.values()}

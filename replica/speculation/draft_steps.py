"""Steps of the draft model: each takes the tokens of the one before on the device, so the host waits for none.

```
 host     launch 1 | launch 2 | collect 1 | launch 3 | collect 2 | collect 3
 device            [ step 1: missing tokens ][ step 2: drafts ][ step 3: drafts ]
```

A row has the same number as in the engine's request table. The draft runner's table has no limits of requests, so every
row is greedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from quire.replica.config import EngineConfig
from quire.replica.core.sampling_record import records
from quire.replica.core.step_plan import BlockTables, SamplingBatch, StepPlan, StepResult
from quire.replica.core.table_changes import NO_CHANGES, TableChanges


class DraftRunner(Protocol):
    """The runner of the draft model. Its pool has as many blocks as the engine's, of the same number of tokens."""

    config: EngineConfig

    def launch(self, plan: StepPlan) -> Any: ...

    def collect(self, in_flight: Any) -> StepResult: ...


def run_chain(runner: DraftRunner, plans: Iterable[StepPlan]) -> Iterator[np.ndarray]:
    """Run steps one behind the other; yields the tokens of each, [S] int64."""
    before = None
    for plan in plans:
        in_flight = runner.launch(plan)
        if before is not None:
            yield runner.collect(before).token_ids
        before = in_flight
    if before is not None:
        yield runner.collect(before).token_ids


def greedy_plan(
    rows: np.ndarray,
    starts: np.ndarray,
    spans: Sequence[np.ndarray] | None,
    tables: np.ndarray,
    block_size: int,
    changes: TableChanges = NO_CHANGES,
) -> StepPlan:
    """Plan a step that computes tokens of n rows, and after each row's last one takes the likeliest token.

    Parameters
    ----------
    rows, starts
        [n] integers: rows of the request table, and the position of the first token.
    spans
        The tokens of each row, [1 or more] int32; None: the one that the step before has sampled.
    tables
        [n, blocks] int32, the rows' block tables.
    """
    is_decode = spans is None
    spans = [*(-1 - rows)[:, None]] if spans is None else spans
    num_scheduled = np.array([len(span) for span in spans])
    cu_q = np.concatenate([[0], np.cumsum(num_scheduled)]).astype(np.int32)
    kv_len = (starts + num_scheduled).astype(np.int32)
    index = np.repeat(np.arange(len(rows)), num_scheduled)
    positions = np.arange(cu_q[-1]) + (starts - cu_q[:-1])[index]
    blocks = tables[index, positions // block_size].astype(np.int64)
    width = -(-int(kv_len.max()) // block_size)
    return StepPlan(
        step=0,
        token_ids=np.concatenate(spans).astype(np.int32),
        positions=positions.astype(np.int32),
        cu_q=cu_q,
        num_sampled=np.ones(len(rows), np.int32),
        kv_len=kv_len,
        block_tables=BlockTables.of(tables[None, :, :width]),
        slots=(blocks * block_size + positions % block_size)[None],
        sampling=SamplingBatch(
            token_index=cu_q[1:] - 1,
            columns=records(len(rows), temperature=0.0),
            position=kv_len.astype(np.int64),
            rows=rows,
        ),
        num_decode_rows=len(rows) if is_decode else 0,
        rows=rows,
        changes=changes,
    )

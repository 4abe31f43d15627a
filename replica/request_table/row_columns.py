"""The columns of the request table, each declared once: dtype, and where its value comes from.

```
 declaration ─▶ host array [R]     ─▶ gathered for the decoding rows (`DecodeRows.columns`)
                                   ─▶ changes of a plan (`TableChanges`) ─▶ the device's array (`DeviceTable`)
```

The sampling parameters are one column of records. Their fields, bounds, defaults and conversions are declared by
`protos.sampling_params.SamplingParams`.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from quire.protos.sampling_params import Column, SamplingParams, annotated
from quire.replica.core.request import Request
from quire.replica.core.sampling_record import RECORD, record_of
from quire.replica.core.step_plan import TokenRules
from quire.replica.request_table.bad_words import BadWords


def _is_penalised(request: Request) -> bool:
    params = request.params
    return params.repetition_penalty != 1 or bool(
        params.presence_penalty or params.frequency_penalty
    )


def _token_rules(params: SamplingParams) -> TokenRules | None:
    if not params.allowed_token_ids and not params.logit_bias:
        return None
    allowed = np.unique(np.array(params.allowed_token_ids, np.int64))
    biased = params.logit_bias
    return TokenRules(
        allowed_ids=allowed if len(allowed) else None,
        bias_ids=np.array([i for i, _ in biased], np.int64) if biased else None,
        bias=np.array([b for _, b in biased], np.float32) if biased else None,
    )


def _has_rules(request: Request) -> bool:
    return bool(request.params.allowed_token_ids or request.params.logit_bias)


def _needs_history(request: Request) -> bool:
    return request.grammar is not None or bool(request.params.bad_words)


def _is_special(request: Request) -> bool:
    return (
        _is_penalised(request)
        or _has_rules(request)
        or _needs_history(request)
        or request.params.logprobs is not None
    )


class RowColumns:
    """Arrays with one entry per row, [R] each.

    Parameters
    ----------
    num_rows
        R, the largest number of requests that can run at once.
    """

    # The request of the row.
    keys: Annotated[np.ndarray, Column(object, lambda r: r.key, in_decodes=True)]
    sources: Annotated[np.ndarray, Column(np.int32, lambda r: r.source, in_decodes=True)]
    stream_ids: Annotated[np.ndarray, Column(np.int64, lambda r: r.stream_id, in_decodes=True)]
    arrival_index: Annotated[np.ndarray, Column(np.int64, lambda r: r.arrival_index)]
    # Number of tokens of the client's prompt.
    num_prompt_tokens: Annotated[
        np.ndarray, Column(np.int32, lambda r: r.num_prompt_tokens, in_decodes=True)
    ]
    run_length: Annotated[np.ndarray, Column(np.int32, lambda r: r.run_length, in_decodes=True)]
    # No EOS or stop id before this length.
    min_length: Annotated[
        np.ndarray, Column(np.int32, lambda r: r.num_prompt_tokens + r.params.min_tokens)
    ]
    stop_ids: Annotated[np.ndarray, Column(object, lambda r: tuple(sorted(r.stop_ids)))]

    # Sampling parameters. The bool columns mark the rows with rare ones, so that only those are visited.
    sampling: Annotated[np.ndarray, Column(RECORD, lambda r: record_of(r.params), in_decodes=True)]
    rules: Annotated[np.ndarray, Column(object, lambda r: _token_rules(r.params))]
    bad_words: Annotated[
        np.ndarray,
        Column(object, lambda r: BadWords(r.params.bad_words) if r.params.bad_words else None),
    ]
    is_penalised: Annotated[np.ndarray, Column(bool, _is_penalised)]
    has_rules: Annotated[np.ndarray, Column(bool, _has_rules)]
    has_bad_words: Annotated[np.ndarray, Column(bool, lambda r: bool(r.params.bad_words))]
    has_grammar: Annotated[np.ndarray, Column(bool, lambda r: r.grammar is not None)]
    # The allowed ids depend on the tokens before, which the host must know first.
    needs_history: Annotated[np.ndarray, Column(bool, _needs_history)]
    # The request's hidden states are pooled, so that it samples nothing.
    is_pooled: Annotated[np.ndarray, Column(bool, lambda r: bool(r.params.pooling))]
    # Sampling needs more than the limits and noise, apart from `min_tokens`.
    is_special: Annotated[np.ndarray, Column(bool, _is_special)]

    # State of the row.
    active: Annotated[np.ndarray, Column(bool, lambda r: True)]  # has a request
    # Number of the row's request (`RowTable.claim` counts over all rows); 0: no request. A step keeps the owners of its
    # rows, and compares them to find out whether a row still belongs to the same request.
    owners: Annotated[np.ndarray, Column(np.int64, in_decodes=True)]
    decoding: Annotated[np.ndarray, Column(bool, lambda r: False)]  # the phase is DECODING
    # Keeps its blocks and computes nothing.
    paused: Annotated[np.ndarray, Column(bool, lambda r: r.is_paused)]
    length: Annotated[np.ndarray, Column(np.int32, lambda r: r.num_tokens)]  # prompt and output
    num_computed: Annotated[np.ndarray, Column(np.int32)]  # tokens with KV, planned steps too
    # Drafted tokens among them that the step in flight verifies. Until it is committed, the row is in no later step.
    num_drafted: Annotated[np.ndarray, Column(np.int32, lambda r: 0)]

    def __init__(self, num_rows: int):
        for name, column in _COLUMNS.items():
            empty = np.empty if column.dtype is object else np.zeros
            setattr(self, name, empty(num_rows, column.dtype))
        self._written = [
            (getattr(self, name), column.source)
            for name, column in _COLUMNS.items()
            if column.source is not None
        ]

    def write(self, row: int, request: Request) -> None:
        """Write the entries of a row that come from its request."""
        for column, source in self._written:
            column[row] = source(request)

    def gather(self, rows: np.ndarray) -> RowColumns:
        """Copy the columns that each step reads for the decoding rows."""
        gathered = object.__new__(RowColumns)
        for name in _IN_DECODES:
            setattr(gathered, name, getattr(self, name).take(rows))
        return gathered


_COLUMNS = annotated(RowColumns, Column)
_IN_DECODES = [name for name, column in _COLUMNS.items() if column.in_decodes]

"""Results of a step: its tokens go to the request table, for the next step, and to the host.

```
 compute  [ step N: sample ─▶ last_token[row], tokens of slot 0 ] [ step N+1: gather last_token ... ─▶ slot 1 ]
 d2h                                                        └─▶ result of slot 0
 host                                                               └─▶ collect N, commit N
```

The host collects N before it launches N+2, so two slots are enough, and no stream waits until the host has read a slot.

Terms: a step's *queued work* is the device operations queued on its stream, which never make the host wait. A *row*
is a request's slot in the request table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.protos.wire import TokenLogprob
from quire.replica.core.step_plan import SamplingBatch
from quire.replica.device.device import Device, Event, Stream
from quire.replica.runner.step_inputs import FixedInputs, StepInputs, sampling_rows
from quire.replica.sampling.logprobs import SCORE_COLUMNS, StepPromptLogprobs, token_logprobs
from quire.replica.sampling.step_sampler import Masks


@dataclass(slots=True)
class TokenSlot:
    """Buffers of one step's tokens and log-probs."""

    tokens: torch.Tensor  # [max samples] int64, on the device
    result: torch.Tensor  # [max samples] int64, pinned
    # [max samples, SCORE_COLUMNS] float32, on the device; entry i belongs to the i-th row that asked for log-probs
    scores: torch.Tensor
    scores_result: torch.Tensor  # copy of `scores`, pinned
    num_tokens: int = 0
    # `SamplingBatch.logprobs`: (row, number of log-probs asked) of each row that asked
    asked: tuple[tuple[int, int], ...] = ()
    arrived: Event | None = None  # the copies to the host are done

    def collect(self) -> np.ndarray:
        """Sleep until the tokens have arrived; returns [num_tokens] int64."""
        assert self.arrived is not None
        self.arrived.wait()
        return self.result[: self.num_tokens].numpy().copy()

    def collect_scores(self) -> dict[int, TokenLogprob]:
        """Return log-probs by row index; call after `collect`."""
        return token_logprobs(self.asked, self.scores_result[: len(self.asked)].numpy())


@dataclass(slots=True)
class InFlight:
    """A launched step that is not collected yet."""

    slot: TokenSlot
    started_s: float
    # Only on the CPU device: end of the step, in seconds of `time.perf_counter`, like `started_s`.
    finished_s: float | None = None
    # Only on a GPU: start and end of the step, and the end of the previous step (None after an idle period).
    begun: Event | None = None
    done: Event | None = None
    done_before: Event | None = None
    # Only on a GPU, and only if sampling waited for the previous step's tokens: end of the forward pass, and start of
    # sampling.
    forward_done: Event | None = None
    sampling_begun: Event | None = None
    # Queues the sampling of the step's tokens; arguments: sampling options, and masks of the grammars. None once it is
    # queued.
    sample: Callable[[SamplingBatch, Masks], None] | None = None
    # Log-probs of prompt tokens; set by the step's queued work.
    prompts: tuple[StepPromptLogprobs, ...] = ()
    # Sums of hidden states for embeddings, [hidden size] float64 each; set by the step's queued work.
    pooled: tuple[torch.Tensor, ...] = ()


class StepOutputs:
    """Owns the last-token column of the request table and the ring of result slots.

    Parameters
    ----------
    max_rows
        Rows of the request table, including the padding row, which is the last one.
    max_samples
        Largest number of samples of a step, if more than `max_rows`.
    depth
        Number of slots: steps that may be launched before the oldest one is collected.
    """

    def __init__(
        self, device: Device, max_rows: int, max_samples: int | None = None, depth: int = 2
    ):
        # A warm-up step has a prefill in addition to the most decoding rows.
        count = max(max_rows, max_samples or 0)
        self._device = device
        self.num_copies = 0
        self.num_bytes = 0  # of all copies
        self.last_token = device.empty((max_rows,), torch.int64)  # [max_rows], by row of the table
        self.last_token[-1] = 0  # padding row: any valid id
        self._slots = [
            TokenSlot(
                device.empty((count,), torch.int64),
                device.pinned((count,), torch.int64),
                device.empty((count, SCORE_COLUMNS), torch.float32),
                device.pinned((count, SCORE_COLUMNS), torch.float32),
            )
            for _ in range(depth)
        ]
        self._turn = 0  # next slot

    def take(self, num_tokens: int) -> TokenSlot:
        """Return the slot for the next step, which samples `num_tokens` tokens."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        slot.num_tokens, slot.asked = num_tokens, ()
        return slot

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Replace placeholders in token ids [T] int64. Part of a step's queued work.

        An id -1 - r stands for the last token of table row r, which was unknown when the step was planned.
        """
        rows = (-1 - token_ids).clamp_(min=0)
        return torch.where(token_ids < 0, self.last_token[rows], token_ids)

    def keep(self, slot: TokenSlot, tokens: torch.Tensor, inputs: FixedInputs) -> None:
        """Store tokens [S] int64 in the slot and in the table rows of the samples. Part of a step's queued work.

        A row with a draft keeps its last token that counts.
        """
        self._write(slot, tokens)
        rows = sampling_rows(inputs)[: len(tokens)]
        if isinstance(inputs, StepInputs) and inputs.has_drafts:
            rows = inputs.newest_rows(tokens, rows, len(self.last_token) - 1)
        self.remember(tokens, rows)

    def _write(self, slot: TokenSlot, tokens: torch.Tensor) -> None:
        slot.tokens[: len(tokens)].copy_(tokens)

    def remember(self, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Store tokens [S] int64 in the table rows [S] int64. Part of a step's queued work.

        `rows` is empty if the plan was made without a request table; then nothing is stored.
        """
        if not len(rows):
            return
        # NO_TOKEN (the row's constraints allow no token) ends the request, but the next step may already be launched
        # with its row and reads this token, so it must be a valid id.
        self.last_token.index_copy_(0, rows, tokens.clamp(min=0))

    def send(self, slot: TokenSlot, done: Event) -> None:
        """Queue the copy of the slot's tokens and log-probs to the host, after the event `done` of the step."""
        device = self._device
        device.wait(Stream.D2H, done)
        count = slot.num_tokens
        device.copy(Stream.D2H, slot.result[:count], slot.tokens[:count], "tokens")
        self.num_copies += 1
        self.num_bytes += slot.tokens[:count].nbytes
        if (count := len(slot.asked)) > 0:
            device.copy(Stream.D2H, slot.scores_result[:count], slot.scores[:count], "log-probs")
            self.num_copies += 1
            self.num_bytes += slot.scores[:count].nbytes
        slot.arrived = device.record(Stream.D2H, "tokens arrived")

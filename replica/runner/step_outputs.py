"""What a step leaves: its tokens in the request table, for the next step, and on their way to the host.

```
 compute  [ step N: sample ─▶ last_token[row], tokens of slot 0 ] [ step N+1: gather last_token ... ─▶ slot 1 ]
 d2h                                                        └─▶ result of slot 0
 host                                                               └─▶ collect N, commit N
```

The host has collected N before it launches N+2, so two slots are enough and no stream waits for another's reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.protos.wire import TokenLogprob
from quire.replica.core.step_plan import SamplingBatch
from quire.replica.device.device import Device, Event, Stream
from quire.replica.sampling.logprobs import SCORE_COLUMNS, StepPromptLogprobs, token_logprobs
from quire.replica.sampling.step_sampler import Masks


@dataclass(slots=True)
class TokenSlot:
    """Where one step's tokens go."""

    tokens: torch.Tensor  # [max rows] int64, on the device
    result: torch.Tensor  # [max rows] int64, pinned
    # [max rows, SCORE_COLUMNS] float32, on the device: first those of the rows that want log-probs
    scores: torch.Tensor
    scores_result: torch.Tensor  # the same, pinned
    num_tokens: int = 0
    # `SamplingBatch.logprobs`: whose log-probs come with the tokens
    asked: tuple[tuple[int, int], ...] = ()
    arrived: Event | None = None

    def collect(self) -> np.ndarray:
        """Sleep until the tokens are there; [num_tokens] int64."""
        assert self.arrived is not None
        self.arrived.wait()
        return self.result[: self.num_tokens].numpy().copy()

    def collect_scores(self) -> dict[int, TokenLogprob]:
        """After `collect`: log-probs by index of the row."""
        return token_logprobs(self.asked, self.scores_result[: len(self.asked)].numpy())


@dataclass(slots=True)
class InFlight:
    """A launched step."""

    slot: TokenSlot
    started_s: float
    finished_s: float | None = None  # if it was over when it was launched
    # On a device that queues its work: when the step began and ended, and the end of the one before it
    begun: Event | None = None
    done: Event | None = None
    done_before: Event | None = None
    # Of a step that awaited tokens: the end of its forward pass and the begin of its draw
    forward_done: Event | None = None
    draw_begun: Event | None = None
    # Queues the draw; None: it is queued. Given what rows may sample, and the masks of their grammars.
    draw: Callable[[SamplingBatch, Masks], None] | None = None
    # Set by the step's work.
    prompts: tuple[StepPromptLogprobs, ...] = ()


class StepOutputs:
    """The token column of the request table, and the ring of results.

    Parameters
    ----------
    max_rows
        Rows of the request table, with the one that pads steps, and of a step.
    depth
        Steps launched and not collected.
    """

    def __init__(self, device: Device, max_rows: int, depth: int = 2):
        self._device = device
        self.num_copies = 0
        self.num_bytes = 0  # of all copies
        self.last_token = device.empty((max_rows,), torch.int64)  # [max_rows], by row of the table
        self.last_token[-1] = 0  # of the row that pads steps: any id
        self._slots = [
            TokenSlot(
                device.empty((max_rows,), torch.int64),
                device.pinned((max_rows,), torch.int64),
                device.empty((max_rows, SCORE_COLUMNS), torch.float32),
                device.pinned((max_rows, SCORE_COLUMNS), torch.float32),
            )
            for _ in range(depth)
        ]
        self._turn = 0

    def take(self, num_tokens: int) -> TokenSlot:
        """The slot for the next step."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        slot.num_tokens, slot.asked = num_tokens, ()
        return slot

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Part of a step's work: [T] int64 ids, where -1 - r becomes what was last sampled in the table row r."""
        rows = (-1 - token_ids).clamp_(min=0)
        return torch.where(token_ids < 0, self.last_token[rows], token_ids)

    def keep(self, slot: TokenSlot, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Part of a step's work: put [S] int64 tokens into the slot, and into the table rows [S] int64."""
        slot.tokens[: len(tokens)].copy_(tokens)
        self.remember(tokens, rows)

    def remember(self, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Part of a step's work: put [S] int64 tokens into the table rows [S] int64, if there are any."""
        if not len(rows):
            return
        # NO_TOKEN ends its row one step late: until then it must be an id that the model knows.
        self.last_token.index_copy_(0, rows, tokens.clamp(min=0))

    def send(self, slot: TokenSlot, done: Event) -> None:
        """Queue the copy of the slot's tokens and log-probs to the host, behind `done`, the step that computes them."""
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

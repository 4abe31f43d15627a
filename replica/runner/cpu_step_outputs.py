"""`StepOutputs` with numpy, which saves about 0.1 ms per step compared with torch."""

from __future__ import annotations

import numpy as np
import torch

from quire.replica.runner.step_outputs import StepOutputs, TokenSlot


class CpuStepOutputs(StepOutputs):
    """`StepOutputs` with all tensors on the CPU."""

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `StepOutputs.known`."""
        ids, last = token_ids.numpy(), self.last_token.numpy()
        if ids.min(initial=0) >= 0:
            return token_ids
        return torch.from_numpy(np.where(ids < 0, last[np.maximum(-1 - ids, 0)], ids))

    def keep(self, slot: TokenSlot, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """See `StepOutputs.keep`."""
        slot.tokens.numpy()[: len(tokens)] = tokens.numpy()
        self.remember(tokens, rows)

    def remember(self, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """See `StepOutputs.remember`."""
        if len(rows):
            self.last_token.numpy()[rows.numpy()] = np.maximum(tokens.numpy(), 0)

"""Sampling with masks, bias, penalties and log-probs by GPU kernels.

```
 host      arrays ──▶ pinned staging                                   does not wait for the device
 compute              └─ copy ▸ histories ▸ edited rows ▸ sample ▸ counts ▸ log-probs
```

The logits are not changed. Rows with masks, bias or penalties are sampled from float32 copies
(`quire.kernels.sampling.logit_edits`), all other rows from the logits in the model's dtype. A step's *queued work*,
mentioned below, is the device operations queued on its stream, which never make the host wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.replica.core.step_plan import NO_TOKEN, SamplingBatch
from quire.replica.device.device import Device
from quire.replica.device.staging import Staged, Staging
from quire.replica.sampling.draft_check import counting
from quire.replica.sampling.sampling_arrays import EditArrays, SamplingArrays
from quire.replica.sampling.step_sampler import Masks
from quire.replica.sampling.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class StagedSampling:
    """Sampling options of a step's rows in pinned memory."""

    arrays: Staged
    # One more than the last table row with a new token history here; 0: there is none.
    num_rows: int


class DeviceSampler:
    """Owns the token counts for penalties and the staging memory.

    Parameters
    ----------
    vocab_size
        Number of columns of the logits.
    """

    def __init__(self, device: Device, vocab_size: int):
        self._vocab_size = vocab_size
        self._staging = Staging(device)
        self._counts = TokenCounts(vocab_size, device.torch_device)

    def stage(self, batch: SamplingBatch, masks: Masks, *, has_limits: bool) -> StagedSampling:
        """Copy the sampling options of a batch to pinned memory. Call `queued` after `sample` is queued.

        Parameters
        ----------
        masks
            Future of the masks of the batch's grammars, or None.
        has_limits
            Whether the request table on the device has the rows' limits; otherwise they are staged, with noise keys.
        """
        filled = None if masks is None else masks.result()
        edits = EditArrays.of(batch, filled, self._vocab_size)
        other = SamplingArrays.of(batch, edits, self._vocab_size, has_limits=has_limits)
        staged = self._staging.write([(array, array.dtype.type) for array in (*edits, *other)])
        return StagedSampling(staged, 1 + int(other.begun.max(initial=-1)))

    def queued(self) -> None:
        """Record that the sampling with the last staged options is queued; their memory is reused after it has run."""
        self._staging.queued()

    def sample(
        self,
        logits: torch.Tensor,
        staged: StagedSampling,
        limits: torch.Tensor | None,
        noise_keys: torch.Tensor | None,
        scores: torch.Tensor,
    ) -> torch.Tensor:
        """Sample one token per row. Part of a step's queued work.

        Parameters
        ----------
        logits
            [S, vocab] of any dtype.
        limits, noise_keys
            [S, NUM_LIMITS] int32 and [S] int64; None if they were staged.
        scores
            [max rows, 1 + 2 width] float32. Entry i receives the log-probs of the i-th row that asked for them.

        Returns
        -------
        [S] int64; `NO_TOKEN` if a row's constraints allow no token.
        """
        from quire.kernels.sampling.log_probs import log_probs
        from quire.kernels.sampling.logit_edits import Edits, edit_logits
        from quire.kernels.sampling.sampling_kernel import sample_tokens

        views = staged.arrays.copy()
        edits = EditArrays(*views[: len(EditArrays._fields)])
        other = SamplingArrays(*views[len(edits) :])
        if staged.num_rows:
            self._counts.write(staged.num_rows, other.begun, other.prompts, other.outputs)
        edited = source = None
        if len(edits.rows):
            counts = self._counts.table
            if len(other.ahead):
                counts = self._counts.ahead(other.counted_rows, other.ahead)
            edited = edit_logits(logits, Edits(**edits._asdict(), counts=counts))
            source = other.source
        if limits is None or noise_keys is None:
            limits, noise_keys = other.limits, other.noise_keys
        tokens = sample_tokens(logits, limits, noise_keys, edited=edited, source=source)
        if len(other.constrained):
            found = tokens.index_select(0, other.constrained)
            tokens.index_copy_(0, other.constrained, found.masked_fill(found < 0, NO_TOKEN))
        if len(other.counted):
            is_counting = None
            if len(other.offset):
                is_counting = counting(tokens, other.drafted, other.offset)
                is_counting = is_counting.index_select(0, other.counted)
            self._counts.add(other.counted_rows, tokens.index_select(0, other.counted), is_counting)
        if (count := len(other.scored)) > 0:
            log_probs(logits, tokens, other.num_top, source=other.scored, out=scores[:count])
        return tokens

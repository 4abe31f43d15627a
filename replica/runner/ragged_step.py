"""A step as it was planned: any rows, nothing padded. The work behind `StepInputs`, on every device, in two halves.

```
 copies ▸ last tokens of the rows that decode ▸ model, which writes KV ▸ log-probs of prompts ▸ logits │ draw ▸ keep
```

What differs between devices is handed in: where the block tables come from, and how a plain token is drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.replica.core.step_plan import SamplingBatch, StepPlan
from quire.replica.device.kv_pool import KVPool
from quire.replica.runner.forward import Forward
from quire.replica.runner.step_inputs import StepInputs
from quire.replica.runner.step_outputs import InFlight, StepOutputs
from quire.replica.sampling.sampler import likeliest
from quire.replica.sampling.step_sampler import Masks, StepSampler

Choose = Callable[[torch.Tensor], torch.Tensor]


class RaggedStep:
    """Runs steps kernel by kernel; owns nothing.

    Parameters
    ----------
    forward, sampler, outputs, pool
        Of the runner.
    """

    def __init__(self, forward: Forward, sampler: StepSampler, outputs: StepOutputs, pool: KVPool):
        self._forward = forward
        self._sampler = sampler
        self._outputs = outputs
        self._pool = pool

    def logits(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        block_tables: torch.Tensor,
        in_flight: InFlight | None = None,
    ) -> torch.Tensor:
        """Write the step's KV; [S, vocab] in the model's type, of the rows that sample.

        Parameters
        ----------
        in_flight
            Gets the log-probabilities of prompts, if it is given.
        """
        self._pool.copy_blocks(plan.copies)
        hidden = self._forward.hidden(
            self._outputs.known(inputs.token_ids),
            inputs.positions,
            inputs.cu_q,
            inputs.kv_len,
            block_tables,
            inputs.slots,
            np.diff(plan.cu_q),
            _selected(plan),
        )
        if in_flight is not None:
            in_flight.prompts = self._forward.score_prompts(hidden, plan.prompts, inputs.target_ids)
        if not _all_sample(plan):
            hidden = hidden.index_select(0, inputs.token_index)
        return self._forward.logits(hidden)

    def draw_and_keep(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        sampling: SamplingBatch,
        in_flight: InFlight,
        masks: Masks,
        choose: Choose | None = None,
    ) -> None:
        """To the step's slot, with the log-probabilities; where the sampler is torch's.

        Parameters
        ----------
        logits
            [S, vocab] in the model's type; may be overwritten.
        rows
            [S] int64, in the request table; none if nothing is to be remembered.
        choose
            Draws as the device's columns of the rows say; None: as the plan's say.
        """
        is_plain = sampling.is_plain
        if choose is None and is_plain and not sampling.temperature.any():
            choose = likeliest  # in the model's own type: a copy in float32 has the same order
        if choose is not None and is_plain:
            tokens = choose(logits)
        else:
            scores = in_flight.slot.scores
            tokens = self._sampler.sample(logits.float(), sampling, masks, scores, choose)
        self._outputs.keep(in_flight.slot, tokens, rows)


def _all_sample(plan: StepPlan) -> bool:
    """Whether every token of the step does, once and in order, as where all rows decode."""
    sampled = plan.sampling.token_index
    return len(sampled) == len(plan.token_ids) and bool((sampled == np.arange(len(sampled))).all())


def _selected(plan: StepPlan) -> np.ndarray | None:
    """[S] int64, the tokens whose hidden states are read; None: all."""
    sampled = plan.sampling.token_index
    if plan.prompts or len(sampled) >= len(plan.token_ids):
        return None
    return np.unique(sampled).astype(np.int64)  # answers that share a prompt sample from the same

"""A step of any rows without padding, in two parts: the forward pass up to the logits, and sampling.

```
 copies ▸ last tokens of decoding rows ▸ model, which writes KV ▸ log-probs of prompts, pooling ▸ logits │ sample ▸ keep
```

The caller passes the parts that depend on the device: the block tables, and the function that samples plain rows (rows
without masks, penalties or log-probs).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.replica.core.step_plan import SamplingBatch, StepPlan
from quire.replica.device.kv_pool import KVPool
from quire.replica.device.state_pool import StatePool
from quire.replica.model.layers.state_layers import StepCache
from quire.replica.runner.forward import Forward
from quire.replica.runner.step_inputs import FixedInputs, StepInputs
from quire.replica.runner.step_outputs import InFlight, StepOutputs
from quire.replica.sampling.sampler import likeliest
from quire.replica.sampling.step_sampler import Masks, StepSampler

Choose = Callable[[torch.Tensor], torch.Tensor]


class RaggedStep:
    """Runs steps kernel by kernel. Owns no buffers.

    Parameters
    ----------
    forward, sampler, outputs, pool
        The runner's forward pass, its torch sampler, its owner of last tokens and result slots, and its KV cache.
    states
        Slots of a recurrent model; None for other models.
    """

    def __init__(
        self,
        forward: Forward,
        sampler: StepSampler,
        outputs: StepOutputs,
        pool: KVPool,
        states: StatePool | None,
    ):
        self._forward = forward
        self._sampler = sampler
        self._outputs = outputs
        self._pool = pool
        self._states = states

    def logits(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        block_tables: torch.Tensor,
        in_flight: InFlight | None = None,
    ) -> torch.Tensor:
        """Write the step's KV and return logits [S, vocab], in the model's dtype, of the rows that sample.

        Parameters
        ----------
        in_flight
            Receives the log-probabilities of prompts and the sums of hidden states, if given.
        """
        self._pool.copy_blocks(plan.copies)
        num_query = plan.num_scheduled
        cache = None
        if self._states is not None:
            # Without a request table, the rows of all steps are the same requests.
            rows = plan.rows if len(plan.rows) else np.arange(plan.num_rows)
            self._states.copy(plan.state_copies)
            cache = StepCache.of(self._states, rows, num_query, plan.kv_len, plan.state_saves)
        hidden = self._forward.hidden(
            self._outputs.known(inputs.token_ids),
            inputs.positions,
            inputs.cu_q,
            inputs.kv_len,
            block_tables,
            inputs.slots,
            num_query,
            _selected(plan),
            cache,
            inputs.adapters,
        )
        if in_flight is not None:
            in_flight.prompts = self._forward.score_prompts(hidden, plan.prompts, inputs.target_ids)
            in_flight.pooled = self._forward.pool_hidden(hidden, plan.pooling)
        if not _all_sample(plan):
            hidden = hidden.index_select(0, inputs.token_index)
        return self._forward.logits(hidden)

    def sample_and_keep(
        self,
        logits: torch.Tensor,
        inputs: FixedInputs,
        sampling: SamplingBatch,
        in_flight: InFlight,
        masks: Masks,
        choose: Choose | None = None,
    ) -> None:
        """Sample tokens, compute log-probabilities and store both in the step's result slot.

        Parameters
        ----------
        logits
            [S, vocab] in the model's dtype; may be overwritten.
        inputs
            The step's inputs, which say where the tokens are kept.
        choose
            Samples with the options in the device's request table; None: torch samples with the options of the plan.
        """
        is_plain = sampling.is_plain
        if choose is None and is_plain and sampling.is_greedy:
            choose = likeliest  # in the model's dtype: float32 would have the same order
        if choose is not None and is_plain:
            tokens = choose(logits)
        else:
            scores = in_flight.slot.scores
            tokens = self._sampler.sample(logits.float(), sampling, masks, scores, choose)
        self._outputs.keep(in_flight.slot, tokens, inputs)


def _all_sample(plan: StepPlan) -> bool:
    """Whether one token is sampled after each token of the step, in order, as when all rows decode."""
    sampled = plan.sampling.token_index
    return len(sampled) == len(plan.token_ids) and bool((sampled == np.arange(len(sampled))).all())


def _selected(plan: StepPlan) -> np.ndarray | None:
    """Indices int64, ascending and unique, of the tokens whose hidden states are read after the decoder; None: all."""
    sampled = plan.sampling.token_index
    if plan.prompts or len(sampled) >= len(plan.token_ids):
        return None
    pooled = (np.arange(targets.begin, targets.end) for targets in plan.pooling)
    # Several samples of one prompt read the same token's logits.
    return np.unique(np.concatenate([sampled, *pooled])).astype(np.int64)

"""Plans of steps that write only to the trash block, for warm-up and measurements."""

from __future__ import annotations

import numpy as np

from quire.replica.config import EngineConfig
from quire.replica.core.sampling_record import records
from quire.replica.core.step_plan import (
    BlockTables,
    Penalties,
    PromptTargets,
    SamplingBatch,
    StepPlan,
    TokenRules,
)


class TrashPlans:
    """Makes plans that touch neither blocks nor rows of requests.

    Parameters
    ----------
    num_groups
        Number of layer groups of the pool.
    trash_block
        Id of the trash block.
    """

    def __init__(self, config: EngineConfig, num_groups: int, trash_block: int):
        self._config = config
        self._num_groups = num_groups
        self._trash_block = trash_block

    def plan(self, lengths: list[int], temperature: float) -> StepPlan:
        """A step with one row for each length; a length is the number of new tokens of a row."""
        num_rows, num_tokens = len(lengths), sum(lengths)
        block_size, trash = self._config.block_size, self._trash_block
        cu_q = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
        rows = np.full(num_rows, self._config.num_rows)  # the padding row
        decodes = max(lengths) == 1
        batch = SamplingBatch(
            token_index=cu_q[1:] - 1,
            columns=records(
                num_rows,
                temperature=temperature,
                top_k=min(20, self._config.vocab_size),
                top_p=0.9,
            ),
            position=np.asarray(lengths, np.int64),
            rows=rows,
        )
        return StepPlan(
            step=0,
            token_ids=(-1 - rows if decodes else np.zeros(num_tokens)).astype(np.int32),
            positions=positions,
            cu_q=cu_q,
            num_sampled=np.ones(num_rows, np.int32),
            kv_len=np.asarray(lengths, np.int32),
            block_tables=BlockTables.of(
                np.full(
                    (self._num_groups, num_rows, -(-max(lengths) // block_size)), trash, np.int32
                )
            ),
            slots=np.tile(
                trash * block_size + positions.astype(np.int64) % block_size, (self._num_groups, 1)
            ),
            sampling=batch,
            rows=rows,
            num_decode_rows=num_rows if decodes else 0,
        )

    def special_plan(self, num_rows: int) -> StepPlan:
        """A step that uses every kernel of the sampler: masks, token lists, log-probs, and penalties in row 0.

        The penalties leave token counts in row 0. The first request with penalties in that row resets them.
        """
        plan = self.plan([1] * num_rows, 0.0)
        zero = np.zeros(1, np.int64)
        two_ids = TokenRules(allowed_ids=np.arange(2))
        return plan._replace(
            sampling=plan.sampling._replace(
                suppressed=tuple((i, (1,)) for i in range(num_rows)),
                rules=tuple((i, two_ids) for i in range(num_rows)),
                penalties=Penalties(zero, zero, ((0, zero, zero),)),
                logprobs=tuple((i, 1) for i in range(num_rows)),
            ),
            prompts=(PromptTargets(self._config.num_rows, 0, 1, zero, 1),),
            num_decode_rows=0,
        )

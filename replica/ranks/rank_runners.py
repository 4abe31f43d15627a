"""The runners of a leader and of the other ranks.

```
 leader   plan ─▶ message ─▶ forward ⇄ ⇄ ⇄ ─▶ logits ─▶ sample ─▶ tokens
 rank 1              └─────▶ forward ⇄ ⇄ ⇄ ─▶ its part of the vocabulary        ⇄ sums over ranks
```
"""

from __future__ import annotations

import numpy as np
import torch

from quire.replica.core.step_plan import SamplingBatch, StepPlan
from quire.replica.model.sharded.rank_group import RankGroup
from quire.replica.ranks.rank_links import RankLinks
from quire.replica.ranks.step_message import encode, encode_saves
from quire.replica.runner.runner import Runner
from quire.replica.runner.step_outputs import InFlight
from quire.replica.sampling.step_sampler import Masks


class LeadingRunner(Runner):
    """Sends each step to the other ranks before it launches it."""

    links: RankLinks
    group: RankGroup

    def _launch(self, plan: StepPlan) -> InFlight:
        self.links.send(self._message(plan))
        try:
            in_flight = super()._launch(plan)
            if len(plan.saves):
                # A block is whole, and others may find it, once every rank has written its part.
                self.group.wait_for_all()
            return in_flight
        except Exception as error:
            # Ranks are out of step from now on, so that the replica ends. The cause may be another rank.
            self.links.fail(f"{type(error).__name__}: {error}")
            raise

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """See `Runner.forward`."""
        self.links.send(self._message(plan))
        return super().forward(plan)

    def save_blocks(self, pairs: np.ndarray) -> None:
        """See `Runner.save_blocks`."""
        self.links.send(encode_saves(pairs))
        super().save_blocks(pairs)
        self.group.wait_for_all()

    def _message(self, plan: StepPlan) -> bytes:
        """Encode a plan; the leader alone knows which tokens it has sampled last."""
        ids = torch.from_numpy(plan.token_ids.astype(np.int64))
        return encode(plan, self._outputs.known(ids).numpy())


class FollowingRunner(Runner):
    """Executes the steps of a leader, which samples."""

    group: RankGroup

    def follow(self, task: StepPlan | np.ndarray) -> None:
        """Execute a step, or save blocks (`step_message.decode`)."""
        if isinstance(task, np.ndarray):
            self.save_blocks(task)
            self.group.wait_for_all()
            return
        self.launch(task)
        self.host_pool.take_measured()
        if len(task.saves):
            self.host_pool.take_saved()
            self.group.wait_for_all()

    def _sample(self, in_flight: InFlight, sampling: SamplingBatch, masks: Masks) -> None:
        in_flight.sample = None

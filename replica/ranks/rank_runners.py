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
from quire.replica.ranks.rank_links import RankLinks
from quire.replica.ranks.step_message import encode
from quire.replica.runner.runner import Runner
from quire.replica.runner.step_outputs import InFlight
from quire.replica.sampling.step_sampler import Masks


class LeadingRunner(Runner):
    """Sends each step to the other ranks before it launches it."""

    links: RankLinks

    def _launch(self, plan: StepPlan) -> InFlight:
        self.links.send(self._message(plan))
        try:
            return super()._launch(plan)
        except Exception as error:
            # Ranks are out of step from now on, so that the replica ends. The cause may be another rank.
            self.links.fail(f"{type(error).__name__}: {error}")
            raise

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """See `Runner.forward`."""
        self.links.send(self._message(plan))
        return super().forward(plan)

    def _message(self, plan: StepPlan) -> bytes:
        """Encode a plan; the leader alone knows which tokens it has sampled last."""
        ids = torch.from_numpy(plan.token_ids.astype(np.int64))
        return encode(plan, self._outputs.known(ids).numpy())


class FollowingRunner(Runner):
    """Executes the steps of a leader, which samples."""

    def follow(self, plan: StepPlan) -> None:
        """Execute a step."""
        self.launch(plan)
        self.host_pool.take_measured()

    def _sample(self, in_flight: InFlight, sampling: SamplingBatch, masks: Masks) -> None:
        in_flight.sample = None

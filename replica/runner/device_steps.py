"""The interface of steps on a device: `cpu_steps.py` computes a step at once, `gpu_steps.py` queues its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from quire.replica.core.step_plan import SamplingBatch, StepPlan, StepResult
from quire.replica.core.warmup_plans import TrashPlans
from quire.replica.runner.graphs.graph_cache import GraphCache
from quire.replica.runner.step_outputs import InFlight
from quire.replica.sampling.step_sampler import Masks

Sample = Callable[[SamplingBatch, Masks], None]


class DeviceSteps(Protocol):
    """The interface of `CpuSteps` and `GpuSteps`.

    Order of the calls for a step: `begin`, `forward`, the function that `forward` returned, `end`, `note`. If sampling
    needs tokens of the step in flight (launched, not collected), `hold` follows `forward`, and `begin_sampling`
    precedes the returned function.
    """

    @property
    def graphs(self) -> GraphCache | None:
        """Cache of captured steps; None on the CPU."""
        ...

    def begin(self) -> None:
        """Called before a step is launched."""
        ...

    def forward(self, plan: StepPlan, in_flight: InFlight) -> Sample:
        """Run or queue the forward pass of a step; the returned function samples. Call `end` before the next step."""
        ...

    def hold(self, in_flight: InFlight) -> None:
        """Called after `forward` if sampling has to wait for tokens of the step in flight."""
        ...

    def begin_sampling(self, in_flight: InFlight) -> None:
        """Called before the sampling of a step for which `hold` was called."""
        ...

    def end(self, in_flight: InFlight) -> None:
        """Called after sampling is queued: queue the copy of the tokens to the host."""
        ...

    def note(self, in_flight: InFlight) -> None:
        """Called when the tokens have arrived: add the step's times to the counters."""
        ...

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Write the step's KV and return the logits of the rows that sample, [S, vocab] float32."""
        ...

    def run_largest(
        self, run: Callable[[StepPlan], StepResult], plans: TrashPlans
    ) -> dict[int, float]:
        """Run the largest steps of each kind: decodes, a full prefill chunk, and both mixed; greedy and with sampling.

        `run` launches and collects a step; `plans` makes steps that write only to the trash block. Return the seconds
        of the fastest step of one token alone and of the fastest step of one prompt, by their tokens.
        """
        ...

    def end_warm_up(self) -> None:
        """Called once, after `run_largest`: capture graphs, reset counters."""
        ...

    def use_idle(self) -> bool:
        """Prepare for later steps while the engine is idle; return whether there was anything to do."""
        ...

    def close(self) -> None:
        """End background work; no step follows."""
        ...

    def telemetry(self) -> dict[str, object]:
        """Counters since the start of serving."""
        ...

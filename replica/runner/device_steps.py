"""How steps run on one kind of device: `cpu_steps.py` computes them at once, `gpu_steps.py` queues them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from quire.replica.core.step_plan import SamplingBatch, StepPlan, StepResult
from quire.replica.runner.graphs.graph_cache import GraphCache
from quire.replica.runner.step_outputs import InFlight
from quire.replica.runner.trash_plans import TrashPlans
from quire.replica.sampling.step_sampler import Masks

Draw = Callable[[SamplingBatch, Masks], None]


class DeviceSteps(Protocol):
    """What `CpuSteps` and `GpuSteps` offer. One step, in this order: `begin`, `forward`, draw, `end`, `note`."""

    @property
    def graphs(self) -> GraphCache | None:
        """Captured steps; None where there are none."""
        ...

    def begin(self) -> None:
        """A step is launched next."""
        ...

    def forward(self, plan: StepPlan, in_flight: InFlight) -> Draw:
        """Run a step but its draw, which the result does; then `end` must follow before the next step."""
        ...

    def hold(self, in_flight: InFlight) -> None:
        """The forward pass runs, the draw waits for tokens: `end` follows later, and `begin_draw` before it."""
        ...

    def begin_draw(self, in_flight: InFlight) -> None:
        """The draw of a step that was held comes next."""
        ...

    def end(self, in_flight: InFlight) -> None:
        """The step has drawn: bring its tokens to the host."""
        ...

    def note(self, in_flight: InFlight) -> None:
        """Its tokens are there: add its times."""
        ...

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Write the step's KV; the logits of the rows that sample, [S, vocab] float32."""
        ...

    def run_largest(self, run: Callable[[StepPlan], StepResult], plans: TrashPlans) -> None:
        """Run the largest steps: decode alone, a full prefill chunk, and both mixed; greedy and sampled."""
        ...

    def end_warm_up(self) -> None:
        """The largest steps have run: prepare what else serving begins with."""
        ...

    def use_idle(self) -> bool:
        """Prepare for later steps while there is none; returns whether there was anything to do."""
        ...

    def close(self) -> None:
        """There is no later step."""
        ...

    def telemetry(self) -> dict[str, object]:
        """Counters since the start."""
        ...

"""The interface of steps on a device: `cpu_steps.py` computes a step at once, `gpu_steps.py` queues its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from quire.replica.core.step_plan import SamplingBatch, StepPlan, StepResult
from quire.replica.runner.graphs.graph_cache import GraphCache
from quire.replica.runner.step_outputs import InFlight
from quire.replica.runner.warmup_plans import TrashPlans
from quire.replica.sampling.step_sampler import Masks

Draw = Callable[[SamplingBatch, Masks], None]


class DeviceSteps(Protocol):
    """The interface of `CpuSteps` and `GpuSteps`.

    Order of the calls for a step: `begin`, `forward`, draw, `end`, `note`.
    """

    @property
    def graphs(self) -> GraphCache | None:
        """Cache of captured steps; None on the CPU."""
        ...

    def begin(self) -> None:
        """Called before a step is launched."""
        ...

    def forward(self, plan: StepPlan, in_flight: InFlight) -> Draw:
        """Run or queue the forward pass of a step; the returned function draws. Call `end` before the next step."""
        ...

    def hold(self, in_flight: InFlight) -> None:
        """Called after `forward` if the draw has to wait for tokens; `begin_draw` and `end` follow later."""
        ...

    def begin_draw(self, in_flight: InFlight) -> None:
        """Called before the draw of a step that was held."""
        ...

    def end(self, in_flight: InFlight) -> None:
        """Called after the draw: queue the copy of the tokens to the host."""
        ...

    def note(self, in_flight: InFlight) -> None:
        """Called when the tokens have arrived: add the step's times to the counters."""
        ...

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Write the step's KV and return the logits of the rows that sample, [S, vocab] float32."""
        ...

    def run_largest(self, run: Callable[[StepPlan], StepResult], plans: TrashPlans) -> None:
        """Run the largest steps: only decodes, a full prefill chunk, and both mixed; greedy and sampled."""
        ...

    def end_warm_up(self) -> None:
        """Called after the largest steps: capture graphs, reset counters."""
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

"""Steps where work runs when it is queued: the launch of a step computes it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from quire.replica.config import EngineConfig
from quire.replica.core.step_plan import SamplingBatch, StepPlan, StepResult
from quire.replica.device.cpu_prefault import PoolPrefault
from quire.replica.device.device import Device, Stream
from quire.replica.device.kv_pool import KVPool
from quire.replica.runner.device_steps import Draw
from quire.replica.runner.graph_cache import GraphCache
from quire.replica.runner.ragged_step import RaggedStep
from quire.replica.runner.step_inputs import direct_inputs
from quire.replica.runner.step_outputs import InFlight, StepOutputs
from quire.replica.runner.trash_plans import TrashPlans
from quire.replica.sampling.step_sampler import Masks

# A step of the warm-up takes as long at most, by the time of one with so many tokens.
_WARM_UP_STEP_S = 1.0
_WARM_UP_TOKENS = 64


class CpuSteps:
    """See `DeviceSteps`.

    Parameters
    ----------
    pool
        Its memory is backed while the engine is idle.
    ragged, outputs
        Of the runner.
    """

    graphs: GraphCache | None = None

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        pool: KVPool,
        ragged: RaggedStep,
        outputs: StepOutputs,
    ):
        self._config = config
        self._device = device
        self._ragged = ragged
        self._outputs = outputs
        self.prefault = PoolPrefault(pool)

    def begin(self) -> None:
        """See `DeviceSteps.begin`."""
        self.prefault.forbid()

    def forward(self, plan: StepPlan, in_flight: InFlight) -> Draw:
        """See `DeviceSteps.forward`."""
        inputs, tables = direct_inputs(plan), torch.from_numpy(plan.block_tables)
        logits: list[torch.Tensor] = []

        def compute() -> None:
            logits.append(self._ragged.logits(plan, inputs, tables, in_flight))

        def draw(sampling: SamplingBatch, masks: Masks) -> None:
            self._device.run(
                Stream.COMPUTE,
                lambda: self._ragged.draw_and_keep(
                    logits.pop(), inputs.sample_rows, sampling, in_flight, masks
                ),
                name=f"draw of step {plan.step}",
            )

        self._device.run(Stream.COMPUTE, compute, name=f"step {plan.step}")
        return draw

    def hold(self, in_flight: InFlight) -> None:
        """Its time is not measured."""

    def begin_draw(self, in_flight: InFlight) -> None:
        """Its time is not measured."""

    def end(self, in_flight: InFlight) -> None:
        """See `DeviceSteps.end`."""
        self._outputs.send(in_flight.slot, self._device.record(Stream.COMPUTE, "step done"))
        in_flight.finished_s = time.perf_counter()

    def note(self, in_flight: InFlight) -> None:
        """The engine's thread has measured it."""

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """See `DeviceSteps.logits`."""
        tables = torch.from_numpy(plan.block_tables)
        with torch.inference_mode():
            return self._ragged.logits(plan, direct_inputs(plan), tables).float()

    def run_largest(self, run: Callable[[StepPlan], StepResult], plans: TrashPlans) -> None:
        """See `DeviceSteps.run_largest`.

        Nothing has to be compiled, so a prefill touches the same pages greedy or sampled, and no step is longer than a
        second: a slow processor would compute for half a minute to save some page faults.
        """

        def run_step(lengths: list[int], temperature: float) -> None:
            run(plans.plan([n for n in lengths if n > 0], temperature))

        budget = self._config.max_batch_tokens
        chunk = min(budget, self._config.max_model_len)
        run_step([1], 0.0)
        run_step([1], 1.0)
        few = min(chunk, _WARM_UP_TOKENS)
        began = time.perf_counter()
        run_step([few], 0.0)
        seconds = time.perf_counter() - began
        budget = max(few, min(budget, int(few * _WARM_UP_STEP_S / seconds)))
        rows, chunk = min(self._config.num_rows, budget), min(chunk, budget)
        run_step([1] * rows, 1.0)
        run_step([chunk], 0.0)
        run_step([1] * min(rows, budget - chunk // 2) + [chunk // 2], 1.0)

    def end_warm_up(self) -> None:
        """Nothing is captured."""

    def use_idle(self) -> bool:
        """Let the pool be backed; that needs no turn of the engine's thread."""
        self.prefault.allow()
        return False

    def close(self) -> None:
        """End the thread that `use_idle` may have started."""
        self.prefault.close()

    def telemetry(self) -> dict[str, object]:
        """None."""
        return {}

"""Steps on the CPU: launching a step computes it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from quire.replica.config import EngineConfig
from quire.replica.core.step_plan import SamplingBatch, StepPlan, StepResult
from quire.replica.core.warmup_plans import TrashPlans
from quire.replica.device.cpu_prefault import PoolPrefault
from quire.replica.device.device import Device, Stream
from quire.replica.device.kv_pool import KVPool
from quire.replica.runner.device_steps import Sample
from quire.replica.runner.graphs.graph_cache import GraphCache
from quire.replica.runner.ragged_step import RaggedStep
from quire.replica.runner.step_inputs import direct_inputs
from quire.replica.runner.step_outputs import InFlight, StepOutputs
from quire.replica.sampling.step_sampler import Masks

# Upper bound of the time of a warm-up step, estimated from a step of `_WARM_UP_TOKENS` tokens.
_WARM_UP_STEP_S = 1.0
_WARM_UP_TOKENS = 64


class CpuSteps:
    """`DeviceSteps` on the CPU: work runs when it is queued.

    Parameters
    ----------
    pool
        KV cache; its memory is prefaulted while the engine is idle.
    ragged, outputs
        The runner's step without padding, and its owner of last tokens and result slots.
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
        """Stop the prefault thread until the engine is idle again."""
        self.prefault.forbid()

    def forward(self, plan: StepPlan, in_flight: InFlight) -> Sample:
        """Compute the forward pass; the returned function samples."""
        inputs, tables = direct_inputs(plan), torch.from_numpy(plan.block_tables.gather())
        logits: list[torch.Tensor] = []

        def compute() -> None:
            logits.append(self._ragged.logits(plan, inputs, tables, in_flight))

        def sample(sampling: SamplingBatch, masks: Masks) -> None:
            self._device.run(
                Stream.COMPUTE,
                lambda: self._ragged.sample_and_keep(
                    logits.pop(), inputs, sampling, in_flight, masks
                ),
                name=f"sampling of step {plan.step}",
            )

        self._device.run(Stream.COMPUTE, compute, name=f"step {plan.step}")
        return sample

    def hold(self, in_flight: InFlight) -> None:
        """Does nothing: only GPU steps measure this time."""

    def begin_sampling(self, in_flight: InFlight) -> None:
        """Does nothing: only GPU steps measure this time."""

    def end(self, in_flight: InFlight) -> None:
        """See `DeviceSteps.end`."""
        self._outputs.send(in_flight.slot, self._device.record(Stream.COMPUTE, "step done"))
        in_flight.finished_s = time.perf_counter()

    def note(self, in_flight: InFlight) -> None:
        """Does nothing: the engine's thread measures the time of CPU steps."""

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """See `DeviceSteps.logits`."""
        tables = torch.from_numpy(plan.block_tables.gather())
        with torch.inference_mode():
            return self._ragged.logits(plan, direct_inputs(plan), tables).float()

    def run_largest(self, run: Callable[[StepPlan], StepResult], plans: TrashPlans) -> None:
        """See `DeviceSteps.run_largest`.

        Warm-up on a CPU only touches memory: nothing is compiled. A prefill touches the same pages with greedy and with
        random sampling, so it runs once. Steps are made so short that none takes longer than about a second; otherwise
        a slow CPU would compute for half a minute to save a few page faults.
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
        """Does nothing: the CPU has neither graphs nor counters."""

    def use_idle(self) -> bool:
        """Let the prefault thread run. Return False, because the engine's own thread has nothing to prepare."""
        self.prefault.allow()
        return False

    def close(self) -> None:
        """End the prefault thread."""
        self.prefault.close()

    def telemetry(self) -> dict[str, object]:
        """Return {}: the CPU has no counters."""
        return {}
